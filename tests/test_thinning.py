"""Low-rank products without wide tensors: the same numbers, fewer and thinner operations, and nothing written that others read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from outsize.layers._thinning import add_products_, move_factors_

TOKENS, WIDE, RANK = 24, 64, 4
Function = Callable[..., list[Tensor]]


def drawn(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def linear(scale: float) -> Function:
    """A linear with a low-rank addition, as PEFT writes it, and gradients of its input and both factors."""

    def run(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, grad: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            x, a, b = (one.detach().requires_grad_() for one in (x, a, b))
            wide = torch.nn.functional.linear(x, weight)
            added = torch.nn.functional.linear(torch.nn.functional.linear(x, a), b) * scale
            out = wide + added
            found = torch.autograd.grad(out, (x, a, b), grad)
        return [out.detach(), *found]

    return run


def arguments(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return drawn(
        (1, TOKENS, WIDE), (WIDE, WIDE), (RANK, WIDE), (WIDE, RANK), (1, TOKENS, WIDE), dtype=dtype
    )


def traced(run: Function, *examples: Tensor) -> GraphModule:
    graph: GraphModule = make_fx(run, tracing_mode="fake")(*examples)
    return graph


def count(graph: GraphModule, *targets: str) -> int:
    return sum(any(name in str(node.target) for name in targets) for node in graph.graph.nodes)


def widest_factor(graph: GraphModule) -> int:
    """Elements of the largest tensor that is multiplied by a number."""
    sizes = [
        node.meta["val"].numel()
        for node in graph.graph.nodes
        if "mul" in str(node.target) and not isinstance(node.args[1], torch.fx.Node)
    ]
    return max(sizes, default=0)


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.5])
def test_powers_of_two_go_to_the_thin_side_and_no_bit_changes(scale: float) -> None:
    given_ = arguments(torch.bfloat16)
    graph = traced(linear(scale), *given_)
    before = graph(*given_)
    move_factors_(graph.graph)
    graph.recompile()
    assert all(map(torch.equal, graph(*given_), before))
    wanted = 0 if scale == 1 else max(TOKENS, WIDE) * RANK
    assert widest_factor(graph) == wanted


def test_other_factors_stay_where_they_are() -> None:
    """Moving them would round otherwise."""
    graph = traced(linear(0.3), *arguments())
    move_factors_(graph.graph)
    assert widest_factor(graph) == TOKENS * WIDE


def test_a_factor_that_also_lays_out_anew_stays() -> None:
    """A part of a wider tensor has gaps; times one it has none, which a view of it needs."""

    def run(x: Tensor) -> list[Tensor]:
        return [(x[:, :4] * 1.0).view(-1)]

    (x,) = drawn((6, 8))
    graph = traced(run, x)
    move_factors_(graph.graph)
    graph.recompile()
    assert torch.equal(graph(x)[0], run(x)[0])


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.3])
def test_products_are_added_in_place_and_rounded_less(scale: float) -> None:
    given_ = arguments(torch.bfloat16)
    graph = traced(linear(scale), *given_)
    move_factors_(graph.graph)
    before = count(graph, "aten.add.Tensor")
    add_products_(graph.graph)
    graph.recompile()
    # the way up and the input's gradient; a factor that is no power of two keeps its wide tensor
    assert count(graph, "add_product_") == (2 if scale != 0.3 else 1)
    assert count(graph, "aten.add.Tensor") < before
    exact = traced(linear(scale), *(one.double() for one in given_))(
        *(one.double() for one in given_)
    )
    plain = traced(linear(scale), *given_)(*given_)
    for found, wanted, rounded in zip(graph(*given_), exact, plain, strict=True):
        limit = float((rounded.double() - wanted).norm())
        assert float((found.double() - wanted).norm()) <= 1.05 * limit


def reads_twice(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    wide = x @ weight
    return [wide + (x @ a) @ b, wide.relu()]


def adds_to_an_argument(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [weight + (weight @ a) @ b, x]


def gives_the_product_as_well(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    thin = (x @ a) @ b
    return [x @ weight + thin, thin]


def adds_a_row(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [(x @ weight) + ((x[:1] @ a) @ b)]


def adds_to_a_slice(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [(x @ weight)[:, :8] + (x @ a) @ b[:, :8]]


@pytest.mark.parametrize(
    "run",
    [reads_twice, adds_to_an_argument, gives_the_product_as_well, adds_a_row, adds_to_a_slice],
)
def test_what_others_read_is_not_written_into(run: Function) -> None:
    x, weight, a, b = drawn((WIDE, WIDE), (WIDE, WIDE), (WIDE, RANK), (RANK, WIDE))
    graph = traced(run, x, weight, a, b)
    add_products_(graph.graph)
    graph.recompile()
    assert count(graph, "add_product_") == 0
    kept = [one.clone() for one in (x, weight, a, b)]
    assert all(map(torch.equal, graph(x, weight, a, b), run(*kept)))
    assert all(map(torch.equal, (x, weight, a, b), kept))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["product", "scale", "relu", "twice", "view"]), max_size=6))
def test_any_chain_gives_the_same_numbers(steps: list[str]) -> None:
    def run(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        outs = []
        for step in steps:
            if step == "product":
                x = x @ weight + ((x @ a) @ b) * 0.5
            elif step == "scale":
                x = x * 2.0
            elif step == "relu":
                x = x.relu()
            elif step == "twice":
                outs.append(x)
            else:
                x = x.view(1, *x.shape).view(x.shape)
        return [*outs, x]

    given_ = [one / 8 for one in drawn((TOKENS, WIDE), (WIDE, WIDE), (WIDE, RANK), (RANK, WIDE))]
    wanted = run(*(one.double() for one in given_))
    graph = traced(run, *given_)
    move_factors_(graph.graph)
    add_products_(graph.graph)
    graph.recompile()
    for found, exact in zip(graph(*given_), wanted, strict=True):
        assert torch.allclose(
            found.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max())
        )
