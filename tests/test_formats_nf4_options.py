"""nf4's two ways to lose less in the same bits: searched scales, and inputs turned by a Hadamard matrix."""

from __future__ import annotations

import hashlib
from typing import Literal

import pytest
import torch
from accuracy import heavy_tailed, measure
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import encode, weights

from outsize.arithmetic._compute_type import ComputeType
from outsize.arithmetic.protocol import ARITHMETICS, FrozenMatrix, Parts
from outsize.formats import _hadamard, _nf4_search, _nf4_values
from outsize.formats.nf4 import NF4
from outsize.layers.frozen import FrozenLinear

LEVELS = torch.tensor(_nf4_values.VALUES, dtype=torch.float64)
few = settings(max_examples=15, deadline=None)
TURNED = NF4(32, "fp16", scale_search=True, rotation="hadamard")

# ---------------------------------------------------------------- searched scales


def squared_errors(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The least that each group can lose with a scale, fp64: every weight becomes its nearest value."""
    off = (groups[..., None] - scales[..., None] * LEVELS).abs().amin(-1)
    return off.square().sum(1)


@pytest.mark.parametrize("group", [64, 32])
@pytest.mark.parametrize("scales", ["fp32", "fp16"])
@few
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 3))
def test_no_candidate_loses_less_than_the_scale_that_was_found(
    group: Literal[64, 32], scales: Literal["fp32", "fp16"], seed: int, spread: float
) -> None:
    """All multiples by brute force in fp64, and what was found is what the codes are for."""
    matrix = weights(6, 128, seed, spread)
    fmt = NF4(group, scales, scale_search=True)
    parts = encode(fmt, matrix)
    exact = matrix.double().view(-1, group)
    found_G1 = parts["scales"].double().view(-1, 1)
    decoded = fmt.decode(parts, (6, 128), torch.float32).double().view(-1, group)
    lost = (decoded - exact).square().sum(1)
    size = exact.abs().amax(1)
    assert bool((lost <= squared_errors(exact, found_G1) + 1e-6 * size**2).all())
    for multiple in _nf4_search.MULTIPLES:
        tried = (size * multiple).float()
        tried = (tried.half() if scales == "fp16" else tried).double()[:, None]
        assert bool((lost <= squared_errors(exact, tried) * (1 + 1e-5) + 1e-9 * size**2).all())


def test_a_found_scale_is_best_for_its_codes() -> None:
    """Least squares: the last candidate is no multiple, and some groups take it."""
    matrix = weights(64, 256, seed=1)
    parts = encode(NF4(32, scale_search=True), matrix)
    ratio = parts["scales"].double() / matrix.double().view(-1, 32).abs().amax(1)
    multiples = torch.tensor(_nf4_search.MULTIPLES, dtype=torch.float64)
    is_multiple = ((ratio[:, None] - multiples).abs() < 1e-6).any(1)
    assert 0.5 < float((~is_multiple).double().mean()) < 1


def test_a_search_changes_scales_and_codes_but_no_layout() -> None:
    """Same parts, and bitsandbytes decodes them to the same bits."""
    functional = pytest.importorskip("bitsandbytes.functional", exc_type=ImportError)
    matrix = weights(16, 256, seed=2)
    fmt = NF4(scale_search=True)
    parts = encode(fmt, matrix)
    assert fmt.parts((16, 256)) == NF4().parts((16, 256))
    state = functional.QuantState(
        absmax=parts["scales"],
        shape=torch.Size((16, 256)),
        code=torch.tensor(_nf4_values.VALUES),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.float32,
    )
    theirs = functional.dequantize_4bit(parts["codes"].view(-1, 1), state)
    assert torch.equal(fmt.decode(parts, (16, 256), torch.float32), theirs)


def test_options_that_came_later_leave_old_keys_alone() -> None:
    """A store that was prepared before them is found again."""
    assert NF4().describe() == {"name": "nf4", "group": 64, "scales": "fp32", "code_version": 1}
    assert NF4(scale_search=True).describe()["scale_search"] is True
    assert "rotation" not in NF4(scale_search=True).describe()
    assert TURNED.describe()["rotation"] == "hadamard"


# ---------------------------------------------------------------- turned inputs


def rotation(size: int) -> torch.Tensor:
    """R in fp64 by its definition: signs, then Sylvester's matrix over the root of its size."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < size:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), hadamard)
    raw = hashlib.shake_256(b"outsize: signs of a Hadamard rotation").digest(size // 8)
    signs = [1 - 2 * (raw[i // 8] >> i % 8 & 1) for i in range(size)]
    return torch.tensor(signs).double()[:, None] * hadamard / size**0.5


@pytest.mark.parametrize("size", [256, 64, 16])
def test_the_rotation_is_orthogonal_exactly_and_never_changes(size: int) -> None:
    """Stores of turned weights are worth nothing with another one; its entries are exact in every float type."""
    _hadamard.make_tables(torch.device("cpu"))
    table = _hadamard._tables[torch.device("cpu")][size]
    assert torch.equal(table.double(), rotation(size))
    assert torch.equal(table @ table.t(), torch.eye(size))
    assert torch.equal(table.bfloat16().float(), table)


@pytest.mark.parametrize(("columns", "size"), [(3072, 256), (320, 64), (96, 16), (256, 256)])
def test_weights_are_turned_in_blocks_of_the_largest_size_that_fits(
    columns: int, size: int
) -> None:
    rows = weights(5, columns, seed=3)
    turned = _hadamard.turn_rows(rows)
    wanted = (rows.double().view(5, -1, size) @ rotation(size)).view(5, columns)
    assert torch.allclose(turned.double(), wanted, rtol=0, atol=1e-6 * float(rows.abs().max()))
    back = _hadamard.turn_rows_back(turned)
    assert torch.allclose(back, rows, rtol=0, atol=1e-6 * float(rows.abs().max()))
    for dtype, bits in ((torch.float32, 24), (torch.bfloat16, 8)):
        x = rows.to(dtype)
        exact = (x.double().view(5, -1, size) @ rotation(size)).view(5, columns)
        assert _hadamard.turn(x).dtype == dtype
        assert torch.allclose(
            _hadamard.turn(x).double(), exact, rtol=2.0**-bits, atol=2e-6 * float(rows.abs().max())
        )


def test_what_is_decoded_is_the_matrix_and_not_the_turned_one() -> None:
    """Callers see nothing: only products are made with what is kept. The reference turns back in fp64."""
    shape = (40, 512)
    matrix = weights(*shape, seed=4)
    parts = encode(TURNED, matrix)
    turning = TURNED.turning()
    assert turning is not None
    kept = turning.decode(parts, shape, torch.float32).double()
    wanted = (kept.view(40, -1, 256) @ rotation(256).t()).view(shape)
    decoded = TURNED.decode(parts, shape, torch.float32)
    assert torch.allclose(decoded.double(), wanted, rtol=0, atol=1e-6 * float(matrix.abs().max()))
    assert float((decoded - matrix).norm() / matrix.norm()) < 0.09
    assert float((kept - matrix.double()).norm() / matrix.double().norm()) > 1
    plain = encode(NF4(32, "fp16", scale_search=True), _hadamard.turn_rows(matrix))
    assert all(torch.equal(part, parts[name]) for name, part in plain.items())
    assert NF4(scale_search=True).turning() is None


def linear(fmt: NF4, matrix: torch.Tensor) -> FrozenLinear:
    rows, columns = matrix.shape
    made = FrozenLinear(
        columns,
        rows,
        has_bias=False,
        fmt=fmt,
        compute=torch.float32,
        arithmetic=ARITHMETICS.load("bf16"),
    )
    made.bind(encode(fmt, matrix))
    return made


def test_a_product_and_its_gradient_are_those_of_the_decoded_matrix() -> None:
    """Turning inputs instead of the matrix is the same product, but for fp32's rounding."""
    matrix = weights(48, 320, seed=5)
    layer = linear(TURNED, matrix)
    assert layer.parts is not None
    decoded = layer.decode(layer.parts, torch.float32).double()
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(3, 7, 320, generator=generator, requires_grad=True)
    out = layer(x)
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad)
    assert x.grad is not None
    exact = x.detach().double() @ decoded.t()
    exact_grad = grad.double() @ decoded
    assert torch.allclose(out.double(), exact, rtol=1e-4, atol=1e-5)
    assert torch.allclose(x.grad.double(), exact_grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(layer(x), out)


def test_eight_bit_products_take_the_matrix_as_it_is_kept() -> None:
    """An arithmetic never sees the unturned one: what it decodes, prepares and multiplies belongs together."""
    seen = []

    class Spy(ComputeType):
        def multiply(
            self,
            x: torch.Tensor,
            matrix: FrozenMatrix,
            parts: Parts,
            prepared: Parts,
            bias: torch.Tensor | None,
        ) -> torch.Tensor:
            seen.append((x, matrix.decode(parts, torch.float32)))
            return super().multiply(x, matrix, parts, prepared, bias)

    matrix = weights(16, 64, seed=7)
    layer = linear(TURNED, matrix)
    layer.arithmetic = Spy()
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(8))
    layer(x)
    ((turned_x, kept),) = seen
    turning = TURNED.turning()
    assert turning is not None
    assert layer.parts is not None
    named = dict(zip(layer.part_names, layer.parts, strict=True))
    assert torch.equal(kept, turning.decode(named, (16, 64), torch.float32))
    assert torch.equal(turned_x, turning.turn(x))


@pytest.mark.parametrize(
    ("options", "gauss", "heavy"),
    [
        ({}, 0.0920, 0.1112),
        ({"group": 32, "scales": "fp16"}, 0.0873, 0.0959),
        ({"group": 32, "scales": "fp16", "scale_search": True}, 0.0787, 0.0900),
        ({"group": 32, "scales": "fp16", "rotation": "hadamard"}, 0.0873, 0.0872),
        (
            {"group": 32, "scales": "fp16", "scale_search": True, "rotation": "hadamard"},
            0.0787,
            0.0787,
        ),
    ],
)
def test_the_error_is_the_one_that_the_documentation_states(
    options: dict[str, object], gauss: float, heavy: float
) -> None:
    """Turned weights are bell-shaped whatever they were; the search gains a tenth on any."""
    from outsize.formats.protocol import make_format

    fmt = make_format("nf4", options)
    assert measure(fmt, weights(512, 1024, seed=9)).relative_error == pytest.approx(gauss, abs=8e-4)
    found = measure(fmt, heavy_tailed(512, 1024, seed=9)).relative_error
    assert found == pytest.approx(heavy, abs=1.5e-3)
