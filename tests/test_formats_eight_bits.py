"""fp8 and int8: nearest codes by an exact reference, diffusers' own e4m3, and codes that 8-bit products take as they lie."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from accuracy import measure
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import encode, weights

from outsize.arithmetic.protocol import ARITHMETICS
from outsize.formats._rows import row_spans
from outsize.formats.fp8 import Fp8
from outsize.formats.int8 import Int8
from outsize.formats.protocol import make_format
from outsize.layers.frozen import FrozenLinear

VALUES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
few = settings(max_examples=15, deadline=None)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of an 8-bit type, fp64."""
    found = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return found[found.isfinite()]


@pytest.mark.parametrize("values", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scales", ["row", "tensor"])
@few
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 5))
def test_every_weight_becomes_the_nearest_of_all_numbers_of_the_type(
    values: Literal["e4m3", "e5m2"], scales: Literal["row", "tensor"], seed: int, spread: float
) -> None:
    """In fp64, over all 256 codes; the scale puts the largest weight on the largest number."""
    matrix = weights(6, 128, seed, spread)
    fmt = Fp8(values, scales)
    parts = encode(fmt, matrix)
    largest = matrix.double().abs().amax(1) if scales == "row" else matrix.double().abs().amax()
    stated = parts["scales"].double()
    assert torch.allclose(stated, largest / every_value(VALUES[values]).max(), rtol=3e-7, atol=0)
    scale_R1 = stated.view(-1, 1)
    nearest = (matrix.double()[..., None] - scale_R1[..., None] * every_value(VALUES[values])).abs()
    decoded = fmt.decode(parts, (6, 128), torch.float32).double()
    off = (decoded - matrix.double()).abs()
    assert bool((off <= nearest.amin(-1) + 1e-6 * matrix.double().abs()).all())


@pytest.mark.parametrize("values", ["e4m3", "e5m2"])
def test_fp8_decodes_to_the_product_in_fp64_rounded_once(values: Literal["e4m3", "e5m2"]) -> None:
    """Every code at scales of many sizes, bit for bit."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(40, 1)
    kept = codes.view(VALUES[values])[:, codes.view(VALUES[values])[0].float().isfinite()]
    scales = torch.logspace(-9, 3, 40)
    wanted = (kept.double() * scales.double()[:, None]).float()
    parts = {"codes": kept.contiguous(), "scales": scales}
    assert torch.equal(Fp8(values).decode(parts, tuple(kept.shape), torch.float32), wanted)


def test_e4m3_by_row_is_what_diffusers_makes_and_reads() -> None:
    """Black Forest Labs publish such files; diffusers' scale may differ in its last bit, for it divides."""
    theirs: Any = pytest.importorskip("diffusers.quantizers.bfl.utils")
    matrix = weights(64, 256, seed=1, spread=1)
    parts = encode(Fp8(), matrix)
    codes, scales = theirs.quantize_fp8r(matrix)
    assert torch.allclose(parts["scales"], scales, rtol=2e-7, atol=0)
    same = parts["codes"].view(torch.uint8) == codes.view(torch.uint8)
    assert same.double().mean() > 0.999
    read = theirs.dequantize_fp8r(parts["codes"], parts["scales"])
    assert torch.equal(read, Fp8().decode(parts, (64, 256), torch.float32))


def test_a_scale_for_the_whole_matrix_needs_its_memory_only_once() -> None:
    """Codes take the place of the rows that were held for them: two bytes a weight, as the budget counts."""
    parts = encode(Fp8("e4m3", "tensor"), weights(33, 256, seed=2).bfloat16(), (5, 20))
    assert parts["codes"].untyped_storage().nbytes() == 2 * parts["codes"].numel()
    whole = encode(Fp8("e4m3", "tensor"), weights(33, 256, seed=2).bfloat16().float())
    assert torch.equal(parts["codes"].view(torch.uint8), whole["codes"].view(torch.uint8))
    assert torch.equal(parts["scales"], whole["scales"])


def test_one_outlier_costs_other_rows_nothing_but_with_a_scale_for_all() -> None:
    """Why a scale per row is the default."""
    matrix = weights(16, 128, seed=3)
    matrix[0, 0] = 1e5
    off = {}
    for scales in ("row", "tensor"):
        fmt = Fp8("e4m3", scales)  # type: ignore[arg-type] # both are allowed
        decoded = fmt.decode(encode(fmt, matrix), (16, 128), torch.float32)
        off[scales] = float((decoded - matrix)[1:].norm() / matrix[1:].norm())
    assert off["row"] < 0.03
    assert off["tensor"] > 0.9


# ---------------------------------------------------------------- 8-bit products


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_e4m3_codes_are_operands_as_they_lie(scales: Literal["row", "tensor"]) -> None:
    """No pass over the matrix, and no second rounding, for the forward product."""
    fmt, shape = Fp8("e4m3", scales), (48, 256)
    parts = encode(fmt, weights(*shape, seed=4, spread=1))
    both = fmt.e4m3_scales(parts, shape)
    assert both is not None
    found = fmt.decode_e4m3(parts, shape, both[0], is_transposed=False)
    assert found.data_ptr() == parts["codes"].data_ptr()
    assert both[0].shape == (48, 1)
    assert torch.equal(found.float() * both[0], fmt.decode(parts, shape, torch.float32))


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_the_transpose_is_as_near_as_three_bits_of_mantissa_allow(
    scales: Literal["row", "tensor"],
) -> None:
    """Each value within a sixteenth of itself, or half the smallest step at its column's scale; nothing overflows."""
    fmt, shape = Fp8("e4m3", scales), (300, 64)
    matrix = weights(*shape, seed=5, spread=2) * torch.logspace(-3, 1, 64)
    matrix[:, 7] = 0
    parts = encode(fmt, matrix)
    both = fmt.e4m3_scales(parts, shape)
    assert both is not None
    found = fmt.decode_e4m3(parts, shape, both[1], is_transposed=True)
    assert found.is_contiguous()
    assert found.shape == (64, 300)
    wanted = fmt.decode(parts, shape, torch.float32).t()
    allowed = wanted.abs() / 16 * (1 + 1e-5) + both[1] * 2**-10
    assert bool(((found.float() * both[1] - wanted).abs() <= allowed).all())
    assert torch.allclose(both[1][:, 0] * 448, wanted.abs().amax(1).clamp_min(1e-30))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8", {}),
        ("fp8", {"scales": "tensor"}),
        ("fp8", {"values": "e5m2"}),
        ("int8", {}),
        ("nf4", {"group": 32, "scale_search": True, "rotation": "hadamard"}),
    ],
)
def test_8_bit_products_with_the_format_are_float64s_within_their_error(
    name: str, options: dict[str, object]
) -> None:
    """Codes as they lie or turned inputs: the product and its gradient are those of the decoded matrix."""
    matrix = weights(48, 320, seed=10, spread=1)
    fmt = make_format(name, options)
    layer = FrozenLinear(
        320,
        48,
        has_bias=False,
        fmt=fmt,
        compute=torch.float32,
        arithmetic=ARITHMETICS.load("fp8"),
    )
    parts = encode(fmt, matrix)
    layer.bind(parts)
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(32, 320, generator=generator, requires_grad=True)
    out = layer(x)
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad)  # type: ignore[no-untyped-call] # torch's
    decoded = fmt.decode(parts, (48, 320), torch.float32).double()
    exact, exact_grad = x.detach().double() @ decoded.t(), grad.double() @ decoded
    assert x.grad is not None
    assert float((out.detach().double() - exact).norm() / exact.norm()) < 0.05
    assert float((x.grad.double() - exact_grad).norm() / exact_grad.norm()) < 0.05


def test_e5m2_has_no_operands() -> None:
    """Products of two such are not what the matrix units take: they go by way of the compute type."""
    fmt = Fp8("e5m2")
    assert fmt.e4m3_scales(encode(fmt, weights(16, 64, seed=6)), (16, 64)) is None


# ---------------------------------------------------------------- int8


@pytest.mark.parametrize("group", ["row", 128, 64, 32])
@few
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 5))
def test_int8_takes_the_nearest_code_of_its_stored_scale(
    group: Literal["row", 128, 64, 32], seed: int, spread: float
) -> None:
    """In fp64, with the scale as it was rounded; decoding is exact before its one rounding."""
    matrix = weights(6, 256, seed, spread)
    parts = encode(Int8(group), matrix)
    size = 256 if group == "row" else group
    scale_G1 = parts["scales"].double().view(-1, 1)
    exact = matrix.double().view(-1, size)
    wanted = (exact / scale_G1).round().clamp(-127, 127)
    codes = parts["codes"].double().view(-1, size)
    # fp32's quotient may fall on the other side of a half
    near_half = ((exact / scale_G1).frac().abs() - 0.5).abs() < 1e-4
    assert bool(((codes == wanted) | near_half).all())
    decoded = Int8(group).decode(parts, (6, 256), torch.float32)
    assert torch.equal(decoded.double(), (codes * scale_G1).float().double().view(6, 256))
    assert torch.allclose(scale_G1, exact.abs().amax(1, keepdim=True) / 127, rtol=2**-8, atol=0)


@pytest.mark.parametrize("group", ["row", 128, 64, 32])
def test_int8_loses_what_even_steps_lose(group: Literal["row", 128, 64, 32]) -> None:
    """A number that is anywhere within a step is off by the step over the root of twelve."""
    matrix = weights(512, 1024, seed=9)
    step = encode(Int8(group), matrix)["scales"].double().square().mean().sqrt()
    wanted = float(step / math.sqrt(12) / matrix.double().square().mean().sqrt())
    assert measure(Int8(group), matrix).relative_error == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("fmt", [Fp8(), Fp8("e5m2", "tensor"), Int8(), Int8(64)], ids=str)
def test_weights_too_small_to_have_a_scale_are_zeros(fmt: Any) -> None:
    """No division by a number that some devices take for zero; nothing becomes infinite or nan."""
    matrix = torch.full((4, 128), 1e-40)
    matrix[0] = 3e-38
    parts = encode(fmt, matrix)
    decoded = fmt.decode(parts, (4, 128), torch.float32)
    assert bool(decoded.isfinite().all())
    assert not decoded[1:].any()


@pytest.mark.parametrize("fmt", [Fp8(), Int8(), Int8(32)], ids=str)
def test_the_largest_floats_are_held(fmt: Any) -> None:
    """bf16 and fp32 scales have no ceiling of their own."""
    matrix = weights(4, 128, seed=7)
    matrix[2] = matrix[2] / matrix[2].abs().max() * 3e38
    decoded = fmt.decode(encode(fmt, matrix), (4, 128), torch.float32)
    assert float((decoded - matrix).double().norm() / matrix.double().norm()) < 0.04


def test_a_cpu_decodes_in_pieces_and_a_card_in_one() -> None:
    """The fp32 intermediate stays in the cache; every row is in one piece."""
    assert row_spans((10, 2**17), "cpu") == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert row_spans((3, 2**20), "cpu") == [(0, 1), (1, 2), (2, 3)]
    assert row_spans((10, 2**17), "cuda") == [(0, 10)]


@pytest.mark.parametrize("shape", [(8,), (2, 4, 4), (0, 64), ()])
def test_eight_bits_hold_matrices_of_any_width(shape: tuple[int, ...]) -> None:
    for fmt in (Fp8(), Int8()):
        assert not fmt.supports(shape)
        assert fmt.supports((3, 7))
        decoded = fmt.decode(encode(fmt, weights(3, 7, seed=8)), (3, 7), torch.float32)
        assert math.isclose(
            float(decoded.norm()), float(weights(3, 7, seed=8).norm()), rel_tol=0.02
        )
