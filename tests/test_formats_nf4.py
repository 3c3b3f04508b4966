"""nf4 against bitsandbytes itself, byte for byte in both directions, and against its definition in fp64."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.formats import _nested, _nf4_decode, _nf4_kernels, _nf4_values
from outsize.formats.nf4 import NF4

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def _torch_kernel(*_: object) -> _nf4_decode.Kernel:
    return _nf4_decode._torch_kernel("ours")


nf4_like_theirs = pytest.mark.parametrize(
    "fmt", [NF4(g, s) for g in (64, 32) for s in ("fp32", "double")], ids=str
)


@pytest.fixture(scope="module")
def bnb() -> ModuleType:
    """bitsandbytes.functional, which takes seconds to import."""
    module: ModuleType = pytest.importorskip("bitsandbytes.functional", exc_type=ImportError)
    return module


@pytest.fixture
def flushing_denormals() -> Iterator[None]:
    """The CPU takes numbers below 1.2e-38 for zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


def encode(fmt: NF4, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a matrix pushed at once."""
    encoder = fmt.encoder(tuple(matrix.shape))
    encoder.push(matrix)
    return encoder.finish()


def weights(rows: int, columns: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    """Weights with outliers, whose rows differ in size by factors of e**spread; one row and one group are zero."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, rows, columns, generator=generator)
    matrix = 0.02 * normal[0] * normal[1].abs() * (spread * normal[2, :, :1]).exp()
    matrix[rows // 2] = 0
    matrix[0, :64] = 0
    return matrix


def their_parts(
    bnb: ModuleType, fmt: NF4, matrix: torch.Tensor
) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """What bitsandbytes makes of a matrix: its codes and state, and the same named as ours."""
    is_double = fmt.scales == "double"
    codes, state = bnb.quantize_4bit(
        matrix, blocksize=fmt.group, compress_statistics=is_double, quant_type="nf4"
    )
    parts = {"codes": codes.view(-1), "scales": state.absmax}
    if is_double:
        parts |= {
            "nested_scales": state.state2.absmax,
            "nested_table": state.state2.code,
            "offset": state.offset.view(1),
        }
    return codes, state, parts


@nf4_like_theirs
@settings(max_examples=10, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 8).map(lambda groups: 64 * groups)),
    kind=st.tuples(st.integers(0, 2**31), st.floats(0, 4), st.sampled_from(FLOATS)),
)
def test_encoding_gives_the_bytes_of_bitsandbytes(
    bnb: ModuleType, fmt: NF4, shape: tuple[int, int], kind: tuple[int, float, torch.dtype]
) -> None:
    """A published 4-bit checkpoint and ours of the same weights are the same file contents."""
    seed, spread, dtype = kind
    matrix = weights(*shape, seed, spread).clamp(-6e4, 6e4).to(dtype)
    ours, (_, _, theirs) = encode(fmt, matrix), their_parts(bnb, fmt, matrix)
    assert ours.keys() == theirs.keys()
    for name, part in ours.items():
        assert part.dtype == theirs[name].dtype
        assert torch.equal(part, theirs[name]), f"part {name!r} differs"


@nf4_like_theirs
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [_torch_kernel, _nf4_decode._bitsandbytes_kernel])
def test_decoding_their_bytes_gives_their_matrix(
    bnb: ModuleType,
    fmt: NF4,
    dtype: torch.dtype,
    make: Callable[[torch.device, str], _nf4_decode.Kernel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both implementations: the values of a base do not depend on what decodes it."""
    monkeypatch.setitem(_nf4_decode._kernels, ("cpu", None), make(CPU, "nf4"))
    matrix = weights(301, 1024, seed=1).to(dtype)  # more than one piece of a CPU's decoding
    codes, state, parts = their_parts(bnb, fmt, matrix)
    ours = fmt.decode(parts, (301, 1024), dtype)
    assert torch.equal(ours, bnb.dequantize_4bit(codes, state))
    in_their_shape = parts | {"codes": codes}  # (n / 2, 1)
    assert torch.equal(fmt.decode(in_their_shape, (301, 1024), dtype), ours)


def test_a_weight_on_a_boundary_falls_as_in_bitsandbytes(bnb: ModuleType) -> None:
    """Bf16 weights meet boundaries often enough to matter; every float beside each is tried as well."""
    values = torch.tensor(_nf4_values.VALUES)
    bounds = (values[:-1] + values[1:]) / 2
    beside = [
        bounds,
        bounds.nextafter(torch.tensor(9.0)),
        bounds.nextafter(torch.tensor(-9.0)),
        values,
        -bounds,
    ]
    rows = torch.cat([*beside, torch.linspace(-1, 1, 4096)])
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % 63)).view(-1, 63)
    matrix = torch.cat([torch.ones(len(rows), 1), rows], dim=1)  # a leading 1 makes the scale 1
    _, _, theirs = their_parts(bnb, NF4(), matrix)
    assert torch.equal(encode(NF4(), matrix)["codes"], theirs["codes"])


def test_double_scales_over_many_blocks_and_odd_ends_equal_bitsandbytes(bnb: ModuleType) -> None:
    """A million scales meet every step of the 8-bit table; the last block is short."""
    scales = weights(1000, 1001, seed=3).abs().view(-1)
    codes, state = bnb.quantize_blockwise(scales - scales.mean(), blocksize=256)
    ours = _nested.quantise_scales({"codes": torch.empty(0), "scales": scales})
    assert torch.equal(ours["scales"], codes)
    assert torch.equal(ours["nested_scales"], state.absmax)
    assert torch.equal(ours["nested_table"], bnb.create_dynamic_map())
    theirs = bnb.dequantize_blockwise(codes, state) + scales.mean()
    assert torch.equal(_nested.decode_scales(ours, by_bitsandbytes=False), theirs)
    assert torch.equal(_nested.decode_scales(ours, by_bitsandbytes=True), theirs)


def test_scales_that_are_all_alike_need_no_nested_scale(bnb: ModuleType) -> None:
    """Their distance from the mean is zero: nothing to divide by."""
    fmt = NF4(64, "double")
    matrix = torch.full((4, 128), 0.5)
    ours, (_, _, theirs) = encode(fmt, matrix), their_parts(bnb, fmt, matrix)
    assert all(torch.equal(part, theirs[name]) for name, part in ours.items())
    assert torch.equal(fmt.decode(ours, (4, 128), torch.float32), matrix)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), group=st.sampled_from([64, 32]), spread=st.floats(0, 4))
def test_every_weight_becomes_the_nearest_value_times_the_scale(
    seed: int, group: int, spread: float
) -> None:
    """The definition in fp64: no value of the sixteen is nearer than the one chosen, but for fp32's rounding."""
    matrix = weights(6, 128, seed, spread)
    decoded = (
        NF4(group)
        .decode(encode(NF4(group), matrix), (6, 128), torch.float32)
        .double()
        .view(-1, group)
    )
    exact = matrix.double().view(-1, group)
    scale = exact.abs().amax(1, keepdim=True)
    levels = torch.tensor(_nf4_values.VALUES, dtype=torch.float64)
    nearest = (exact[..., None] - scale[..., None] * levels).abs().amin(-1)
    assert bool(((decoded - exact).abs() <= nearest + 1e-6 * scale).all())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), group=st.sampled_from([64, 32]), dtype=st.sampled_from(FLOATS))
def test_encoding_what_was_decoded_gives_the_same_codes(
    seed: int, group: int, dtype: torch.dtype
) -> None:
    """Each group's largest weight has the code of 1 or -1, so the scale survives, and each value is its own nearest.

    In fp32 exactly; in bf16 and fp16 too, as their rounding (2**-9) is far below half a gap between values (0.04).
    """
    fmt = NF4(group)
    matrix = weights(8, 128, seed, spread=0.5) + 0.05
    parts = encode(fmt, matrix)
    again = encode(fmt, fmt.decode(parts, (8, 128), dtype))
    assert torch.equal(again["codes"], parts["codes"])
    if dtype == torch.float32:
        assert torch.equal(again["scales"], parts["scales"])


def test_fp16_scales_change_scales_only() -> None:
    """Same codes; the scale is the fp32 one rounded, and decoding multiplies by that in fp32."""
    matrix = weights(16, 256, seed=4)
    full, half = encode(NF4(), matrix), encode(NF4(64, "fp16"), matrix)
    assert torch.equal(full["codes"], half["codes"])
    assert torch.equal(full["scales"].half(), half["scales"])
    widened = {"codes": half["codes"], "scales": half["scales"].float()}
    for dtype in FLOATS:
        decoded = NF4(64, "fp16").decode(half, (16, 256), dtype)
        assert torch.equal(decoded, NF4().decode(widened, (16, 256), dtype))


def test_a_cpu_decodes_by_torch_and_says_so() -> None:
    """And without importing bitsandbytes, which would cost every run on a CPU five seconds."""
    _nf4_decode._kernels.pop(("cpu", None), None)
    assert NF4().kernel(CPU) == "torch"


@pytest.fixture
def cpu_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the choice made on CUDA be made on this machine's CPU."""
    monkeypatch.setattr(_nf4_decode, "_is_served", lambda device: device == CPU)
    monkeypatch.setattr(_nf4_decode, "_kernels", {})
    monkeypatch.setitem(sys.modules, "outsize.formats._nf4_triton", None)  # as where there is none


@pytest.mark.usefixtures("cpu_is_served", "bnb")
def test_where_bitsandbytes_serves_it_is_named_with_its_version() -> None:
    """Goes into the run's journal."""
    import bitsandbytes

    report = NF4().kernel(CPU)
    assert report.startswith(
        f"bitsandbytes {bitsandbytes.__version__} (triton does not work on cpu"
    )
    assert _nf4_decode.kernel_of("cpu", None, "nf4").is_bitsandbytes


@pytest.mark.usefixtures("cpu_is_served")
def test_a_bitsandbytes_that_does_not_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch serves, with the reason: no silent fallback."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    report = NF4().kernel(CPU)
    assert report.startswith("torch (triton does not work on cpu: ModuleNotFoundError: import of ")
    assert "; bitsandbytes does not work on cpu: ModuleNotFoundError: import of bitsand" in report
    assert not _nf4_decode.kernel_of("cpu", None, "nf4").is_bitsandbytes


@pytest.mark.usefixtures("cpu_is_served", "bnb")
def test_a_bitsandbytes_with_other_values_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel built for another card may run and give nonsense; the check compares every byte and dtype."""

    def wrong(*args: Any, quant_type: str, **named: Any) -> torch.Tensor:
        assert quant_type == "nf4"
        right = _nf4_kernels.decode_by_torch(*args, **named)
        right[7, 63] += right.dtype == torch.float16
        return right

    monkeypatch.setattr(_nf4_kernels, "decode_by_bitsandbytes", wrong)
    assert NF4().kernel(CPU).endswith("on cpu: its torch.float16 values differ from the reference)")


@pytest.mark.usefixtures("cpu_is_served")
def test_a_kernel_that_transposes_wrongly_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight-bit products are decoded by the transposing kernel, which nothing else would check."""
    right = _nf4_decode._torch_kernel("ours")

    def untransposed(*arguments: Any, is_transposed: bool) -> torch.Tensor:
        found = _e4m3_by_torch(*arguments, is_transposed=is_transposed)
        return found.flip(0) if is_transposed else found

    wrong = _nf4_decode.Kernel(right.decode, "triton 0", untransposed)
    monkeypatch.setattr(_nf4_decode, "_triton_kernel", lambda *_: wrong)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert "triton 0 on cpu: its e4m3 values differ" in NF4().kernel(CPU)


@pytest.mark.parametrize("group", [64, 32])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_e4m3_is_as_near_as_three_bits_of_mantissa_allow(
    group: Literal[64, 32],
    is_transposed: bool,  # noqa: FBT001 - a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each value within a sixteenth of itself, or a 512th of the smallest normal e4m3 at its scale."""
    monkeypatch.setitem(_nf4_decode._kernels, ("cpu", None), _with_e4m3())
    matrix = weights(48, 256, seed=5) * torch.logspace(-3, 1, 48)[:, None]
    parts, shape = encode(NF4(group), matrix), (48, 256)
    wanted = NF4(group).decode(parts, shape, torch.float32)
    both = NF4(group).e4m3_scales(parts, shape)
    assert both is not None
    scales = both[is_transposed]
    values = NF4(group).decode_e4m3(parts, shape, scales, is_transposed=is_transposed)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (values.shape[0], 1)
    near = values.float() * scales
    wanted = wanted.t() if is_transposed else wanted
    allowed = wanted.abs() / 16 + scales * 2**-10
    assert bool(((near - wanted).abs() <= allowed).all())


def test_a_matrix_of_zeros_is_zero_in_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scale of 0 may divide."""
    monkeypatch.setitem(_nf4_decode._kernels, ("cpu", None), _with_e4m3())
    parts = encode(NF4(), torch.zeros(64, 64))
    scales = NF4().e4m3_scales(parts, (64, 64))
    assert scales is not None
    for one, is_transposed in zip(scales, (False, True), strict=True):
        assert bool(one.isfinite().all())
        found = NF4().decode_e4m3(parts, (64, 64), one, is_transposed=is_transposed)
        assert not found.float().any()


def test_where_no_kernel_decodes_to_e4m3_there_are_no_scales_for_it() -> None:
    """Eight-bit products then go by way of the compute type."""
    _nf4_decode._kernels.pop(("cpu", None), None)
    parts = encode(NF4(), weights(16, 64, seed=6))
    assert NF4().e4m3_scales(parts, (16, 64)) is None


def _e4m3_by_torch(
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scales: torch.Tensor,
    shape: tuple[int, ...],
    group: int,
    *,
    is_transposed: bool,
) -> torch.Tensor:
    matrix = _nf4_kernels.decode_by_torch(codes, scales, shape, torch.float32, group=group)
    matrix = matrix.t() if is_transposed else matrix
    return (matrix / row_scales).to(torch.float8_e4m3fn).contiguous()


def _with_e4m3() -> _nf4_decode.Kernel:
    """The reference with what only cards have."""
    return _nf4_decode.Kernel(_torch_kernel().decode, "ours", _e4m3_by_torch)
