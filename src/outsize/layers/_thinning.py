"""Low-rank products in a traced block without the wide tensors that they are written with.

PEFT scales the adapter's wide result and adds it to the base's, both ways: for each linear that is two or three tensors as wide
as the result, and passes over all of them. A factor belongs on the thin side of its product, and a product can be added
to where it is due. At 1024 px that was half a gigabyte of a block of Flux.2-dev, at its fullest moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)  # noqa: SLF001 - torch's name
_TURNS = (*_VIEWS, _aten.t.default, _aten.transpose.int, _aten.permute.default)
_THIN = 4  # a product is thin where what is summed over is at least so many times shorter than its result's sides


_library = torch.library.Library("outsize", "FRAGMENT")  # type: ignore[no-untyped-call] # torch's stub
_library.define(  # type: ignore[no-untyped-call] # as above
    "add_product_(Tensor(a!) into, Tensor a, Tensor b) -> ()"
)


@torch.library.impl(_library, "add_product_", "CompositeExplicitAutograd")
def _add_product_(into: Tensor, a: Tensor, b: Tensor) -> None:
    """`into` (M, N) += a (M, K) b (K, N), rounded once."""
    into.addmm_(a, b)


@torch.library.register_fake("outsize::add_product_", lib=_library)  # type: ignore[untyped-decorator] # as above
def _(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Nothing is returned, and shapes stay."""


def move_factors_(graph: Graph) -> None:
    """Take powers of two from wide tensors to the thin side of the products that make or use them; drop ones.

    Exact, as long as nothing overflows: such a factor changes exponents alone.
    """
    for node in [one for one in graph.nodes if _is_factor(one)]:
        x, factor = node.args
        if factor == 1:
            node.replace_all_uses_with(x)
            graph.erase_node(node)
            continue
        product = _root(x)
        if _is_thin(product) and _is_only_use(x, product):
            _scale_first_operand(graph, product, factor)
            node.replace_all_uses_with(x)
            graph.erase_node(node)
            continue
        users = list(_final_users(node))
        if users and all(_is_product(one) and _size(one) < _size(node) for one in users):
            node.replace_all_uses_with(x)
            graph.erase_node(node)
            for one in users:
                _scale_result(graph, one, factor)
    graph.lint()


def add_products_(graph: Graph) -> None:
    """Add thin products in place to what they are added to, where nobody else reads that."""
    for node in [one for one in graph.nodes if one.target is _aten.add.Tensor]:
        for wide, thin in (node.args, node.args[::-1]):
            if not (isinstance(wide, Node) and isinstance(thin, Node)):
                continue
            product, into = _root(thin), _root(wide)
            if (
                _is_thin(product)
                and _is_only_use(thin, product)
                and _is_only_use(wide, into)
                and _is_result(into)
                and _shape(into) == _shape(product)
                and _type(into) == _type(product) == _type(node)
            ):
                _add_in_place(graph, node, into, product)
                break
    graph.eliminate_dead_code()  # the products whose results are not added any more
    graph.lint()


def _add_in_place(graph: Graph, node: Node, into: Node, product: Node) -> None:
    with graph.inserting_before(node):
        graph.call_function(torch.ops.outsize.add_product_.default, (into, *product.args[:2]))
        shaped = graph.call_function(_aten.view.default, (into, list(_shape(node) or ())))
    shaped.meta = dict(node.meta)
    node.replace_all_uses_with(shaped)
    graph.erase_node(node)


def _is_factor(node: Node) -> bool:
    """Whether it multiplies a tensor by a power of two, keeping its type and layout (what reads it may count on that)."""
    if node.target not in (_aten.mul.Tensor, _aten.mul.Scalar) or len(node.args) != 2:
        return False
    x, factor = node.args
    if not isinstance(x, Node) or isinstance(factor, bool) or not isinstance(factor, int | float):
        return False
    is_power = factor > 0 and math.frexp(factor)[0] == 0.5  # so for powers of two
    return is_power and _layout(x) is not None and _layout(x) == _layout(node)


def _scale_first_operand(graph: Graph, product: Node, factor: float) -> None:
    first = product.args[0]
    assert isinstance(first, Node)
    with graph.inserting_before(product):
        scaled = graph.call_function(_aten.mul.Tensor, (first, factor))
    scaled.meta = dict(first.meta)
    product.update_arg(0, scaled)


def _scale_result(graph: Graph, product: Node, factor: float) -> None:
    with graph.inserting_after(product):
        scaled = graph.call_function(_aten.mul.Tensor, (product, factor))
    scaled.meta = dict(product.meta)
    product.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def _root(node: Any) -> Any:
    """What a chain of views looks at."""
    while isinstance(node, Node) and node.target in _VIEWS:
        node = node.args[0]
    return node


def _final_users(node: Node) -> Iterator[Node]:
    """Who reads a tensor, through views and turns."""
    for user in node.users:
        if user.target in _TURNS:
            yield from _final_users(user)
        else:
            yield user


def _is_only_use(end: Any, root: Any) -> bool:
    """Whether a chain of views from root to end is all that reads root, and one reader all that reads the end."""
    while end is not root:
        if len(end.users) != 1:
            return False
        end = end.args[0]
    return isinstance(root, Node) and len(root.users) == 1


def _is_product(node: Any) -> bool:
    return isinstance(node, Node) and node.target is _aten.mm.default


def _is_thin(node: Any) -> bool:
    if not _is_product(node):
        return False
    first, result = _shape(node.args[0]), _shape(node)
    return first is not None and result is not None and _THIN * first[1] <= min(result)


def _is_result(node: Any) -> bool:
    """Whether a tensor was computed as a whole by one operation, so that its memory is its own."""
    return isinstance(node, Node) and node.target in (_aten.mm.default, _aten._scaled_mm.default)  # noqa: SLF001 - torch's name


def _shape(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _layout(node: Node) -> tuple[Any, ...] | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return value.dtype, value.shape, value.stride()


def _size(node: Node) -> int:
    return math.prod(_shape(node) or ())


def _type(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, Tensor) else None
