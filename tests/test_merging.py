"""Merging equal operations of a graph: fewer of them, and the same bits whatever is written into."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from outsize.layers._merging import merge_equal_

X = torch.linspace(-2, 2, 12).view(3, 4)


def traced(run: Callable[[Tensor], Tensor]) -> torch.fx.GraphModule:
    graph: torch.fx.GraphModule = make_fx(run)(X.clone())
    return graph


def num_calls(graph: torch.fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in graph.graph.nodes)


def merged(run: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """How many operations there were and are; the result must be the same to the bit."""
    graph = traced(run)
    before = num_calls(graph)
    merge_equal_(graph.graph)
    graph.recompile()
    assert torch.equal(graph(X.clone()), run(X.clone()))
    return before, num_calls(graph)


def test_what_is_computed_twice_from_the_same_is_computed_once() -> None:
    before, after = merged(lambda x: x.abs().amax(1) + x.abs().amax(1))
    assert (before, after) == (5, 3)


def test_parts_of_one_result_are_taken_once() -> None:
    before, after = merged(lambda x: x.split(2, 1)[0] + x.split(2, 1)[0])
    assert before > after


def _written_through_a_view(x: Tensor) -> Tensor:
    one, other = x.sin(), x.sin()
    one[0].mul_(5)
    return one * 2 + other


def _read_before_and_after(x: Tensor) -> Tensor:
    y = x.cos()
    before = y.sum(0)
    y.mul_(3)
    return before + y.sum(0)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.exp().add_(1) + x.exp(),
        lambda x: x.exp() + x.exp().add_(1),
        _written_through_a_view,
        _read_before_and_after,
    ],
    ids=["first", "second", "through a view", "read before and after"],
)
def test_what_is_written_into_stays_apart(run: Callable[[Tensor], Tensor]) -> None:
    """Merged, the other one would change as well."""
    merged(run)


def test_memory_without_values_is_not_shared() -> None:
    """Two empty tensors are alike until they are filled."""

    def run(x: Tensor) -> Tensor:
        one, other = torch.empty_like(x), torch.empty_like(x)
        one.fill_(1)
        other.fill_(2)
        return one + other + x

    merged(run)


def test_numbers_of_different_kinds_are_different_arguments() -> None:
    """A step of 1 and of True, or 2 and 2.0, hash alike."""
    before, after = merged(lambda x: x.mul(2) + x.long().mul(2) + x.mul(2.0))
    assert before == after


def test_random_numbers_are_drawn_as_often_as_asked() -> None:
    graph = traced(lambda x: torch.rand_like(x) + torch.rand_like(x))
    before = num_calls(graph)
    merge_equal_(graph.graph)
    assert num_calls(graph) == before
