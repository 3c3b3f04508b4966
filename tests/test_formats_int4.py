"""int4 against its definition in fp64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.formats.int4 import Int4


def encode(fmt: Int4, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a matrix pushed at once."""
    encoder = fmt.encoder(tuple(matrix.shape))
    encoder.push(matrix)
    return encoder.finish()


def weights(seed: int, offset: float = 0.0) -> torch.Tensor:
    """Eight rows of 256 Gaussian weights around an offset."""
    return 0.05 * torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)) + offset


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """The codes one by one, read off the bytes with Python's own arithmetic."""
    return torch.tensor(
        [code for byte in codes.tolist() for code in divmod(byte, 16)], dtype=torch.float64
    )


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), group=st.sampled_from([32, 64, 128]), offset=st.floats(-2, 2))
def test_decoding_is_code_times_scale_plus_minimum(seed: int, group: int, offset: float) -> None:
    """Written out in fp64, rounded once to fp32: exact, since the product fits in fp32."""
    fmt = Int4(group)
    parts = encode(fmt, weights(seed, offset))
    scales, minima = (
        parts[name].double().repeat_interleave(group) for name in ("scales", "minima")
    )
    expected = (unpacked(parts["codes"]) * scales + minima).float().view(8, 256)
    assert torch.equal(fmt.decode(parts, (8, 256), torch.float32), expected)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), group=st.sampled_from([32, 64, 128]), offset=st.floats(-2, 2))
def test_every_code_is_the_nearest_for_the_rounded_scale(
    seed: int, group: int, offset: float
) -> None:
    """The codes make good what rounding the scale to fp16 did, as far as sixteen codes can."""
    matrix = weights(seed, offset)
    parts = encode(Int4(group), matrix)
    scales, minima = (
        parts[name].double().repeat_interleave(group) for name in ("scales", "minima")
    )
    exact = matrix.double().view(-1)
    every = torch.arange(16, dtype=torch.float64)[:, None] * scales + minima
    chosen = (unpacked(parts["codes"]) * scales + minima - exact).abs()
    assert bool((chosen <= (every - exact).abs().amin(0) + 1e-6).all())


def test_a_group_of_one_value_far_from_zero_keeps_it() -> None:
    """A zero point counted in codes would overflow fp16 here; a minimum does not."""
    matrix = torch.full((2, 128), 3.5)
    parts = encode(Int4(), matrix)
    assert not parts["scales"].any()
    assert torch.equal(Int4().decode(parts, (2, 128), torch.float32), matrix)
