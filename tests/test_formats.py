"""What every format promises, whatever it is: sizes, slabs, files, bounds, refusals.

Each property runs over all plug-ins of the folder and all their options, so a new format is held to it at once.
"""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from accuracy import measure
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outsize.base.errors import FormatError, RecipeError
from outsize.base.parts import part_key
from outsize.formats import _hadamard, _slabs
from outsize.formats.protocol import FORMATS, Format, make_format


def _every_format() -> list[Format]:
    """Every plug-in with every combination of its options, which are all Literals or yes and no."""
    made = []
    for name in FORMATS.names():
        hints = typing.get_type_hints(FORMATS.load(name))
        fields = [field.name for field in dataclasses.fields(FORMATS.load(name))]
        choices = itertools.product(
            *(typing.get_args(hints[field]) or (False, True) for field in fields)
        )
        made += [make_format(name, dict(zip(fields, values, strict=True))) for values in choices]
    return made


EVERY_FORMAT = _every_format()
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
every_format = pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=str)
few = settings(max_examples=8, deadline=None)


def encode(
    fmt: Format, matrix: torch.Tensor, cuts: tuple[int, ...] = ()
) -> dict[str, torch.Tensor]:
    """The parts of a matrix, pushed in slabs that end at the cuts."""
    encoder = fmt.encoder(tuple(matrix.shape))
    for start, stop in itertools.pairwise((0, *cuts, len(matrix))):
        encoder.push(matrix[start:stop])
    return encoder.finish()


def weights(rows: int, columns: int, seed: int, spread: float = 0.0) -> torch.Tensor:
    """Gaussian weights; spread: standard deviation of the logarithm of each row's size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (spread * torch.randn(rows, 1, generator=generator)).exp()
    return 0.05 * sizes * torch.randn(rows, columns, generator=generator)


def assert_same_parts(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Equal names, dtypes and bytes."""
    assert left.keys() == right.keys()
    for name, part in left.items():
        assert part.dtype == right[name].dtype
        assert torch.equal(part, right[name]), f"part {name!r} differs"


@every_format
@few
@given(rows=st.integers(1, 9), groups=st.integers(1, 5), dtype=st.sampled_from(FLOATS))
def test_parts_have_the_sizes_and_types_that_the_plan_was_told(
    fmt: Format,
    rows: int,
    groups: int,
    dtype: torch.dtype,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A store lays out its buffers by parts() before anything is encoded."""
    shape = (rows, 128 * groups)
    path = tmp_path_factory.mktemp("parts") / "x.safetensors"
    save_file(
        {
            part_key("w", name): part
            for name, part in encode(fmt, weights(*shape, seed=1).to(dtype)).items()
        },
        path,
    )
    with safe_open(path, "pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    promised = {
        part_key("w", part.name): (part.dtype, list(part.shape)) for part in fmt.parts(shape)
    }
    assert {key: (each.get_dtype(), each.get_shape()) for key, each in slices.items()} == promised


@every_format
@few
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_slabs_of_any_height_give_the_bytes_of_the_whole_matrix(
    fmt: Format, data: st.DataObject, seed: int
) -> None:
    """Prepare streams; how its budget cuts the rows must not show."""
    matrix = weights(23, 256, seed, spread=1)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, 22)))))
    assert_same_parts(encode(fmt, matrix, cuts), encode(fmt, matrix))


@every_format
def test_a_push_is_cut_into_chunks_that_do_not_show(
    fmt: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk bounds memory within one push; rows wider than a chunk still go one by one."""
    matrix = weights(40, 384, seed=2, spread=1)
    whole = encode(fmt, matrix)
    for limit in (1, 1000, 384 * 7):
        monkeypatch.setattr(_slabs, "_CPU_CHUNK", limit)
        assert_same_parts(encode(fmt, matrix), whole)


@every_format
def test_a_file_gives_back_the_same_bytes_and_the_same_matrix(fmt: Format, tmp_path: Path) -> None:
    """Parts are plain tensors: safetensors needs to know nothing of formats."""
    parts = encode(fmt, weights(16, 256, seed=3))
    save_file(
        {part_key("w", name): part for name, part in parts.items()}, tmp_path / "x.safetensors"
    )
    loaded = load_file(tmp_path / "x.safetensors")
    assert_same_parts({name: loaded[part_key("w", name)] for name in parts}, parts)
    again = {name: loaded[part_key("w", name)] for name in parts}
    assert torch.equal(
        fmt.decode(again, (16, 256), torch.bfloat16), fmt.decode(parts, (16, 256), torch.bfloat16)
    )


@every_format
@pytest.mark.parametrize("dtype", FLOATS[:3])
def test_decoding_rounds_the_fp32_values_once(fmt: Format, dtype: torch.dtype) -> None:
    """Every dtype is the rounding of the same fp32 matrix, also where it is decoded piece by piece."""
    shape = (37, 16384)  # over two pieces of a CPU's decoding, and not a multiple of them
    parts = encode(fmt, weights(*shape, seed=4))
    decoded = fmt.decode(parts, shape, dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, fmt.decode(parts, shape, torch.float32).to(dtype))


@every_format
@few
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 3), dtype=st.sampled_from(FLOATS))
def test_no_weight_is_off_by_more_than_the_bound(
    fmt: Format, seed: int, spread: float, dtype: torch.dtype
) -> None:
    """Half the widest gap between neighbouring values, and what rounding the scales adds."""
    matrix = weights(8, 256, seed, spread).to(dtype)
    error = (
        fmt.decode(encode(fmt, matrix), (8, 256), torch.float32).double() - matrix.double()
    ).abs()
    assert bool((error <= _bound(fmt, matrix.double())).all())


def _bound(fmt: Format, matrix: torch.Tensor) -> torch.Tensor:
    described = fmt.describe()
    if described["name"] == "plain":
        unit = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-24}[described["dtype"]]
        return matrix.abs() * unit + 2**-25  # fp16's smallest step is 2**-24
    if described["name"] == "fp8":
        whole = (1, -1) if described["scales"] == "tensor" else (len(matrix), -1)
        absmax = matrix.reshape(whole).abs().amax(1, keepdim=True)
        # Half a step of 3 or 2 bits of mantissa; below the smallest normal number, half of its fixed step.
        half, smallest = {"e4m3": (2**-4, 2**-10 / 448), "e5m2": (2**-3, 2**-17 / 57344)}[
            described["values"]
        ]
        return matrix.abs() * (half + 1e-6) + absmax * smallest + 1e-35
    if described["name"] == "int8":
        columns = matrix.shape[1] if described["group"] == "row" else described["group"]
        absmax = matrix.view(-1, columns).abs().amax(1, keepdim=True)
        # Half a step; bf16 moves it by 2**-9, and what was rounded down cuts off as much of the largest.
        bound = absmax * (1 / 254 + (described["group"] != "row") * 2**-9) * (1 + 1e-5) + 1e-35
        return bound.expand_as(matrix.view(-1, columns)).reshape(matrix.shape)
    groups = matrix.view(-1, described["group"])
    if described["name"] == "int4":
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        step = (high - low) / 15
        # fp16 moves the minimum by 2**-11 of it and fifteen steps by 2**-11 of them; 2**-20 for its smallest numbers.
        bound = step / 2 + 2**-11 * (low.abs() + 16 * step) + 2**-20
    else:
        if described.get("rotation") == "hadamard":
            # Turned weights are sums of a block's; what they lose, turning back spreads over the block likewise.
            norms = matrix.view(-1, _hadamard.block_size(matrix.shape[1])).norm(dim=1, keepdim=True)
            groups = norms.expand(-1, _hadamard.block_size(matrix.shape[1])).reshape(matrix.shape)
            groups = groups.reshape(-1, described["group"]) * math.sqrt(matrix.shape[1])
        absmax = groups.abs().amax(1, keepdim=True)
        # -1 and -0.696 are furthest apart: 0.1520; fp16 moves all by 2**-11, fp32's rounding is far below 1e-6.
        bound = absmax * (0.15191 + 2**-11 * (described["scales"] == "fp16")) + 2**-24
        if described.get("scale_search"):
            # No group loses more than with its largest magnitude as scale, all of it in one weight at worst.
            bound = bound * math.sqrt(described["group"])
        if described["scales"] == "double":
            # One block of 256 scales, less their mean; the table's widest gap is 0.9/64. A search may choose scales of
            # 1.4 times the largest magnitude, and refine them.
            searched = described.get("scale_search")
            farthest = 1.5 * absmax.max() if searched else (absmax - absmax.mean()).abs().max()
            bound = bound + farthest * (0.9 / 64 / 2 + 2**-15) + 1e-6
    return bound.expand_as(groups).reshape(matrix.shape)


@every_format
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_named(fmt: Format, value: float) -> None:
    """Counted over all slabs, so that it can be found in the checkpoint."""
    matrix = weights(12, 256, seed=5)
    matrix[9, 130] = matrix[11, 3] = value
    encoder = fmt.encoder((12, 256))
    encoder.push(matrix[:5])
    with pytest.raises(FormatError, match=r"^row 9 of the tensor is not finite"):
        encoder.push(matrix[5:])


@pytest.mark.parametrize(
    ("name", "options"), [("nf4", {"scales": "fp16"}), ("int4", {}), ("plain", {"dtype": "fp16"})]
)
def test_a_row_too_large_for_fp16_is_named_and_not_stored_as_infinity(
    name: str, options: dict[str, str]
) -> None:
    """Silent infinities would only show as a loss that is not a number."""
    matrix = weights(6, 128, seed=6)
    matrix[4, 100] = 3e6
    with pytest.raises(FormatError, match=r"row 4 .*too large for (the )?fp16"):
        encode(make_format(name, options), matrix)


@every_format
def test_a_matrix_of_zeros_stays_zeros(fmt: Format) -> None:
    """Untrained outputs are all zeros in many checkpoints; a group of them has no scale to divide by."""
    assert not fmt.decode(encode(fmt, torch.zeros(8, 256)), (8, 256), torch.float32).any()


@every_format
def test_rows_too_many_too_few_or_too_wide_are_errors(fmt: Format) -> None:
    """An encoder fed the wrong window must not give plausible parts."""
    encoder = fmt.encoder((4, 128))
    with pytest.raises(FormatError, match="do not continue"):
        encoder.push(torch.zeros(2, 256))
    encoder.push(torch.zeros(3, 128))
    with pytest.raises(FormatError, match="3 of 4 rows"):
        encoder.finish()
    with pytest.raises(FormatError, match="of which 3 rows"):
        encoder.push(torch.zeros(2, 128))


@every_format
def test_encoding_leaves_its_input_alone(fmt: Format) -> None:
    """Prepare reads into buffers it reuses, and checks hashes after."""
    matrix = weights(8, 128, seed=7)
    before = matrix.clone()
    parts = encode(fmt, matrix)
    assert torch.equal(matrix, before)
    matrix.zero_()
    assert_same_parts(parts, encode(fmt, before))


@pytest.mark.parametrize("name", ["nf4", "int4"])
@pytest.mark.parametrize("shape", [(8, 100), (128,), (2, 64, 64), (0, 64), (), (8, 3, 3, 64)])
def test_what_is_no_matrix_of_whole_groups_is_not_supported(
    name: str, shape: tuple[int, ...]
) -> None:
    """supports() is what plan asks; the encoder refuses alike, should anybody not ask."""
    fmt = make_format(name)
    assert not fmt.supports(shape)
    with pytest.raises(FormatError, match="multiple of its group of 64"):
        fmt.encoder(shape)


@pytest.mark.parametrize("shape", [(7,), (), (3, 5), (2, 3, 3, 3), (1,)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_plain_holds_every_shape(shape: tuple[int, ...], dtype: str) -> None:
    """Biases, norms, convolutions and single numbers are all kept plain."""
    fmt = make_format("plain", {"dtype": dtype})
    tensor = torch.linspace(-1, 1, math.prod(shape)).reshape(shape)
    encoder = fmt.encoder(shape)
    encoder.push(tensor)
    (part,) = encoder.finish().values()
    assert fmt.supports(shape)
    assert fmt.parts(shape)[0].shape == tuple(part.shape) == shape
    decoded = fmt.decode({"": part}, shape, part.dtype)
    assert torch.equal(decoded, tensor.to(part.dtype))
    assert decoded.data_ptr() == part.data_ptr(), "no copy when the dtype is the stored one"


@every_format
def test_a_description_is_json_and_tells_formats_apart(fmt: Format) -> None:
    """It goes into store keys: two formats that differ must never share a store."""
    described = json.loads(json.dumps(fmt.describe()))
    assert described == fmt.describe()
    assert type(described.pop("code_version")) is int
    assert make_format(described.pop("name"), described) == fmt
    assert [other for other in EVERY_FORMAT if other.describe() == fmt.describe()] == [fmt]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"goup": 32},
            ["'nf4'", "'goup'", "did you mean 'group'?", "64 or 32", "fp32, fp16 or double"],
        ),
        ({"group": 48}, ["group is 48 but must be 64 or 32"]),
        ({"group": "64"}, ["group is '64' but must be 64 or 32"]),
        ({"scales": True}, ["scales is True but must be fp32, fp16 or double"]),
        ({"zzz": 1, "group": 7}, ["'zzz'", "group is 7"]),
    ],
)
def test_a_wrong_option_is_answered_with_the_right_ones(
    options: dict[str, object], words: list[str]
) -> None:
    """All faults at once, each with what is allowed."""
    with pytest.raises(RecipeError) as caught:
        make_format("nf4", options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_options_of_plain_types_are_checked_exactly() -> None:
    """Formats to come may have numbers: YAML's true is no 1, and a whole number is a number."""
    from outsize.base.options import build_with_options

    @dataclasses.dataclass(frozen=True)
    class Sized:
        rank: int = 1
        rate: float = 0.5
        is_exact: bool = False

    assert build_with_options("sized", Sized, {"rank": 3, "rate": 2}) == Sized(3, 2)
    with pytest.raises(RecipeError, match="rank is True but must be a whole number"):
        build_with_options("sized", Sized, {"rank": True})
    with pytest.raises(RecipeError, match="rate is '1' but must be a number"):
        build_with_options("sized", Sized, {"rate": "1"})


def test_sizes_and_packings_are_known_without_torch() -> None:
    """Plan answers at once and on machines without torch."""
    program = (
        "import sys\n"
        "from outsize.formats import _packing\n"
        "from outsize.formats.protocol import FORMATS, make_format\n"
        "for name in FORMATS.names():\n"
        "    fmt = make_format(name)\n"
        "    assert fmt.supports((8, 128)) and fmt.parts((8, 128)) and fmt.describe()\n"
        "assert 'torch' not in sys.modules and 'bitsandbytes' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_accuracy_is_that_of_the_definition() -> None:
    """Against numpy-free arithmetic by hand: two weights of which one is off by 0.25."""
    half = make_format("plain", {"dtype": "bf16"})
    matrix = torch.tensor([[4.0, 256 + 0.25]])  # bf16 keeps 8 bits: 256.25 becomes 256
    found = measure(half, matrix)
    assert found.max_abs_error == 0.25
    assert found.relative_error == pytest.approx(0.25 / math.hypot(4, 256.25))
    assert found.snr_db == pytest.approx(20 * math.log10(math.hypot(4, 256.25) / 0.25))
    assert found.bits_per_weight == 16
    assert measure(half, torch.zeros(2, 2)).relative_error == 0
    assert measure(half, torch.ones(2, 2)).snr_db == math.inf


@pytest.mark.parametrize(
    ("name", "options", "error", "bits"),
    [
        ("nf4", {}, 0.0920, 4.5),
        ("nf4", {"scales": "fp16"}, 0.0920, 4.25),
        ("nf4", {"scales": "double"}, 0.0920, 4.13),
        ("nf4", {"group": 32}, 0.0873, 5.0),
        ("nf4", {"group": 32, "scales": "fp16"}, 0.0873, 4.5),
        ("int4", {"group": 32}, 0.0783, 5.0),  # gguf's Q4_1, the same construction
        ("fp8", {}, 0.0265, 8.03),  # quanto's qfloat8, 0.0267 with a scale for longer rows
    ],
)
def test_the_error_on_gaussian_weights_is_the_known_one(
    name: str, options: dict[str, object], error: float, bits: float
) -> None:
    """Figures of bitsandbytes and gguf, measured by themselves on such weights (sampling error below 0.0002)."""
    found = measure(make_format(name, options), weights(1024, 1024, seed=8))
    assert found.relative_error == pytest.approx(error, abs=4e-4)
    assert found.bits_per_weight == pytest.approx(bits, abs=5e-3)
