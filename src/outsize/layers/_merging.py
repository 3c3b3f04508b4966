"""Computing once, within a traced block, what is computed twice from the same.

Three projections of one input convert it to 8 bits once, and a block's second run looks up once what several of its
operations ask for. Fewer launches matter most: at small pictures a block is over before Python has queued it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node


def merge_equal_(graph: Graph) -> None:
    """Merge nodes with equal targets and arguments.

    Only torch's own pure operators: a decoded matrix is wanted twice, in recompute and for the gradient, and keeping it in
    between would cost the memory of a decoded block. What reads or shares a tensor that is written into stays as it is.
    """
    calls = [one for one in graph.nodes if one.op == "call_function"]
    written = _written(calls)
    seen: dict[Any, Node] = {}
    for node in calls:
        if not _is_pure(node.target) or written & {node, *node.all_input_nodes}:
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _written(calls: list[Node]) -> set[Node]:
    """Nodes that are written into, and all that may share memory with one."""
    groups: dict[Node, set[Node]] = {}
    for node in calls:
        for other in _shares_with(node):
            joined = groups.get(node, {node}) | groups.get(other, {other})
            groups |= dict.fromkeys(joined, joined)
    changed: set[Node] = set()
    for node in calls:
        for target in _writes_into(node):
            changed |= groups.get(target, {target})
    return changed


def _shares_with(node: Node) -> Iterator[Node]:
    """Arguments whose memory the result may be."""
    if node.target is operator.getitem:
        yield node.args[0]  # type: ignore[misc] # a node by construction
        return
    schema = getattr(node.target, "_schema", None)
    if schema is None or any(one.alias_info is not None for one in schema.returns):
        yield from node.all_input_nodes


def _writes_into(node: Node) -> Iterator[Node]:
    """Arguments that are changed."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        yield from node.all_input_nodes


def _is_pure(target: Any) -> bool:
    """Whether equal arguments give equal results that one tensor can stand for."""
    if target is operator.getitem:
        return True
    is_torchs = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"  # noqa: SLF001 - torch's name
    if not is_torchs or target._schema.is_mutable:  # noqa: SLF001
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return "empty" not in target.name()  # memory without values is made to be filled differently


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_hashable(one) for one in value))
    if isinstance(value, dict):
        return tuple((key, _hashable(one)) for key, one in sorted(value.items()))
    return (type(value).__name__, value)  # 1, 1.0 and True are different arguments
