"""Products with frozen matrices: every arithmetic against float64, and what 8 bits must not hide.

Processors have no 8-bit floats to compute fast with, but torch multiplies them there; so the plug-in's own code runs here,
asked directly.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outsize.arithmetic import fp8
from outsize.arithmetic._compute_type import ComputeType
from outsize.arithmetic.fp8 import quantise_rows
from outsize.arithmetic.protocol import ARITHMETICS, Arithmetic, Parts
from outsize.formats.protocol import make_format
from outsize.layers.frozen import FrozenLinear

CPU = torch.device("cpu")
NAMES = ARITHMETICS.names()
HALF_ULP = 1 / 16  # of e4m3's three bits of mantissa, as a share of the value
HALF_SUBNORMAL = (
    2.0**-10
)  # half of the distance between e4m3's smallest numbers, times a row's scale
# (1 + 1/16)^2 - 1: both operands off by half a unit, in the same direction for every term of the sum
WORST_TERM = (1 + HALF_ULP) ** 2 - 1
# Of random operands: rounding is uniform within half a unit, whose size goes from 1/16 to 1/32 of the value; 0.037 seen.
TYPICAL_ERROR = 0.045


def load(name: str) -> Arithmetic:
    found: Arithmetic = ARITHMETICS.load(name)
    return found


class Matrix:
    """A frozen matrix that is kept as it is. has_direct: gives e4m3 by itself, as nf4 does on cards."""

    def __init__(self, weight_NK: Tensor, *, has_direct: bool = False) -> None:
        self._weight, self._has_direct = weight_NK, has_direct
        self.out_features, self.in_features = weight_NK.shape
        self.decoded = 0

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        self.decoded += 1
        return self._weight.to(dtype)

    def e4m3_scales(self, parts: Parts) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        if not self._has_direct:
            return None
        return quantise_rows(self._weight)[1], quantise_rows(self._weight.t())[1]

    def decode_e4m3(
        self,
        parts: Parts,  # noqa: ARG002
        row_scales: Tensor,
        *,
        is_transposed: bool,
    ) -> Tensor:
        weight = self._weight.t() if is_transposed else self._weight
        return (weight / row_scales).to(torch.float8_e4m3fn).contiguous()


def multiplied(
    arithmetic: Arithmetic, x: Tensor, matrix: Matrix, bias: Tensor | None = None
) -> Tensor:
    """As a layer does it."""
    return arithmetic.multiply(x, matrix, (), arithmetic.prepare(matrix, ()), bias)


def multiplied_back(arithmetic: Arithmetic, grad: Tensor, matrix: Matrix) -> Tensor:
    """The gradient of x, as a layer has it computed."""
    return arithmetic.multiply_transposed(grad, matrix, (), arithmetic.prepare(matrix, ()))


def drawn(*shape: int, seed: int, outliers: float = 1.0) -> Tensor:
    """Normal values; one of each row is `outliers` times as large."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    flat = values.view(-1, shape[-1])
    places = torch.randint(shape[-1], (len(flat),), generator=generator)
    flat[torch.arange(len(flat)), places] *= outliers
    return values


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


# --- every arithmetic, whoever adds it ---------------------------------------------------------


def allowed_error(name: str) -> float:
    """Of a product of random operands in fp32: the bound for 8 bits, or for what computes in the operands' own type."""
    return 1e-5 if type(load(name)) is ComputeType else TYPICAL_ERROR


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("outliers", [1.0, 100.0], ids=["normal", "one outlier a row"])
def test_a_product_is_float64s_within_the_arithmetics_error(name: str, outliers: float) -> None:
    """An outlier takes the row's scale; the others keep their mantissa, because e4m3 floats."""
    x, weight = drawn(96, 256, seed=1, outliers=outliers), drawn(80, 256, seed=2)
    found = multiplied(load(name), x, Matrix(weight))
    assert found.dtype == x.dtype
    assert off(found, x.double() @ weight.double().t()) < allowed_error(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("outliers", [1.0, 100.0], ids=["normal", "one outlier a row"])
def test_the_inputs_gradient_is_float64s_within_the_arithmetics_error(
    name: str, outliers: float
) -> None:
    grad, weight = drawn(96, 80, seed=3, outliers=outliers), drawn(80, 256, seed=4)
    found = multiplied_back(load(name), grad * 1e-6, Matrix(weight))  # as small as they are
    assert found.dtype == grad.dtype
    assert off(found, (grad * 1e-6).double() @ weight.double()) < allowed_error(name)


@pytest.mark.parametrize("name", NAMES)
def test_leading_dimensions_stay_and_views_are_taken_as_they_are(name: str) -> None:
    """Attention's outputs come transposed; an operand need not be contiguous."""
    x, weight = drawn(2, 64, 3, 5, seed=5).permute(0, 2, 3, 1), drawn(32, 64, seed=6)
    found = multiplied(load(name), x, Matrix(weight))
    assert found.shape == (2, 3, 5, 32)
    assert torch.equal(found, multiplied(load(name), x.contiguous(), Matrix(weight)))
    grad = drawn(2, 3, 5, 32, seed=7)
    assert multiplied_back(load(name), grad, Matrix(weight)).shape == (2, 3, 5, 64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_is_added_in_the_compute_type(name: str, dtype: torch.dtype) -> None:
    """Not rounded to few bits: the difference that it makes is itself."""
    x, weight = drawn(8, 32, seed=8).to(dtype), drawn(16, 32, seed=9)
    bias = torch.linspace(-3, 3, 16).to(dtype)
    without = multiplied(load(name), x, Matrix(weight))
    with_bias = multiplied(load(name), x, Matrix(weight), bias)
    assert with_bias.dtype == dtype
    one_rounding = torch.finfo(dtype).eps * (without.abs().max() + bias.abs().max()).item()
    assert (with_bias.float() - without.float() - bias.float()).abs().max() <= one_rounding


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_spoils_its_own_row_and_no_other(name: str) -> None:
    """A clipped infinity would train on, silently; a row that is no number stops the training."""
    x, weight = drawn(6, 32, seed=10), drawn(16, 32, seed=11)
    x[1, 4], x[3, 0], x[4, 7] = math.inf, math.nan, -math.inf
    found = multiplied(load(name), x, Matrix(weight))
    whole = found.isfinite().all(dim=1).tolist()
    assert whole == [True, False, True, False, False, True]
    assert not found[[1, 3, 4]].isfinite().any()
    grad = drawn(3, 16, seed=12)
    grad[1, 0] = math.nan
    spread = multiplied_back(load(name), grad, Matrix(weight))
    assert spread.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_zeros_give_zeros(name: str) -> None:
    """Padding must not become a division by zero."""
    x, weight = torch.zeros(4, 32), drawn(16, 32, seed=13)
    assert not multiplied(load(name), x, Matrix(weight)).any()
    assert not multiplied(load(name), drawn(4, 32, seed=14), Matrix(weight * 0)).any()
    assert not multiplied_back(load(name), torch.zeros(4, 16), Matrix(weight)).any()


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_trains_through_it_and_its_weight_is_never_asked_for_a_gradient(name: str) -> None:
    layer = frozen(64, 32, load(name))
    x = drawn(4, 64, seed=15).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    weight = layer.decode(layer.parts or (), torch.float32)
    assert off(x.grad, torch.ones(4, 32) @ weight) < 2 * allowed_error(name)
    with torch.no_grad():
        assert torch.equal(layer(x), y)


def frozen(
    in_features: int, out_features: int, arithmetic: Arithmetic, *, has_bias: bool = False
) -> FrozenLinear:
    """A layer over nf4, bound to random values."""
    fmt = make_format("nf4")
    layer = FrozenLinear(
        in_features,
        out_features,
        has_bias=has_bias,
        fmt=fmt,
        compute=torch.float32,
        arithmetic=arithmetic,
    )
    encoder = fmt.encoder((out_features, in_features))
    encoder.push(drawn(out_features, in_features, seed=16) / math.sqrt(in_features))
    layer.bind(encoder.finish())
    return layer


def test_every_plug_in_serves_or_says_why_not() -> None:
    """Faults are sentences for people, or None."""
    for name in NAMES:
        fault = load(name).fault(CPU)
        assert fault is None or (isinstance(fault, str) and len(fault.split()) > 2)


# --- e4m3 ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.integers(-30, 30), min_size=1, max_size=8),
    spread=st.floats(0, 20),
    is_half=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_each_value_is_within_a_sixteenth_of_itself(
    exponents: list[int],
    spread: float,
    is_half: bool,  # noqa: FBT001 - drawn by the test
    seed: int,
) -> None:
    """Or within half of the smallest step at its row's scale; whatever the rows' sizes, and however they differ within."""
    values = drawn(len(exponents), 48, seed=seed)
    values *= torch.exp(spread * drawn(len(exponents), 48, seed=seed + 1))
    values *= torch.tensor(exponents).float().exp2()[:, None]
    values = values.bfloat16() if is_half else values
    codes, scales = quantise_rows(values)
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    near = codes.double() * scales.double()
    # fp32's division and scale add their own roundings
    allowed = values.double().abs() * (HALF_ULP + 1e-6) + HALF_SUBNORMAL * scales.double()
    assert bool(((near - values.double()).abs() <= allowed).all())
    largest = values.float().abs().amax(1)
    used = codes.float().abs().amax(1)
    assert bool((used[largest > fp8._SMALLEST_SCALE] == fp8._LARGEST).all()), "the range is used"


@pytest.mark.parametrize(
    "has_direct", [False, True], ids=["by way of a decoded matrix", "directly"]
)
@pytest.mark.parametrize("outliers", [1.0, 300.0])
def test_no_element_of_a_product_is_off_by_more_than_its_terms_allow(
    outliers: float,
    has_direct: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A bound for each element, from the roundings of both operands: |x||w| times a constant, summed."""
    x, weight = (
        drawn(64, 128, seed=20, outliers=outliers),
        drawn(48, 128, seed=21, outliers=outliers),
    )
    matrix = Matrix(weight, has_direct=has_direct)
    found = multiplied(fp8.plugin, x, matrix).double()
    assert matrix.decoded == (not has_direct)
    (_, x_scale), (_, weight_scale) = quantise_rows(x), quantise_rows(weight)
    x, weight = x.double(), weight.double()
    tiny_x, tiny_w = x_scale.double() * HALF_SUBNORMAL, weight_scale.double() * HALF_SUBNORMAL
    terms = x.abs() @ weight.abs().t()
    # what vanishes below the smallest e4m3 of its row, times the other operand
    lost = tiny_x * weight.abs().sum(1) + x.abs().sum(1, keepdim=True) * tiny_w.t()
    allowed = terms * (WORST_TERM + 1e-4) + lost * (1 + HALF_ULP) + 128 * tiny_x * tiny_w.t()
    assert bool(((found - x @ weight.t()).abs() <= allowed).all())


def test_a_gradients_product_takes_scales_along_the_other_side() -> None:
    """Rows of W and its columns differ by orders of magnitude; one scale for both would lose the small ones."""
    weight = drawn(48, 128, seed=22) * torch.logspace(-4, 4, 128)
    grad = drawn(8, 48, seed=23)
    found = multiplied_back(fp8.plugin, grad, Matrix(weight))
    wanted = grad.double() @ weight.double()
    columns = (found.double() - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert columns.max() < 3 * TYPICAL_ERROR  # each column alone: few numbers, so they scatter


@pytest.mark.parametrize("shape", [(24, 64), (32, 40), (16, 8)])
def test_a_matrix_that_the_units_do_not_take_is_multiplied_in_the_compute_type(
    shape: tuple[int, int],
) -> None:
    """Multiples of 16 on both sides are theirs; the layer then computes as without the plug-in, bit for bit."""
    assert not fp8.plugin.supports(shape)
    rows, columns = shape
    fmt = make_format("plain")
    layers = [
        FrozenLinear(
            columns, rows, has_bias=False, fmt=fmt, compute=torch.float32, arithmetic=arithmetic
        )
        for arithmetic in (fp8.plugin, None)
    ]
    for layer in layers:
        layer.bind({name: drawn(rows, columns, seed=24).bfloat16() for name in layer.part_names})
    x = drawn(5, columns, seed=25)
    assert torch.equal(layers[0](x), layers[1](x))
    assert fp8.plugin.supports((32, 48))
