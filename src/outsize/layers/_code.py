"""Compiled code kept across runs, by all that it was made from.

A graph is traced at every start, which takes a second; what inductor makes of it takes a minute. The traced graph itself is
the name under which that is kept, together with whatever else decides it: arguments' layouts, constants, versions, the card,
and our own kernels' source. torch writes and reads the files, as it does those of its own cache.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from outsize.base.files import commit_file, temporary_beside
from outsize.layers._thinning import add_products_, move_factors_

# A graph is only ever given what its key describes; checking it again costs launches' time.
_SETTINGS = {"size_asserts": False, "alignment_asserts": False}
_OUR_KERNELS = (
    "arithmetic",
    "families",
    "formats",
    "layers",
)  # folders whose source a graph's operators may come from

Run = Callable[..., Sequence[Tensor]]


class KeptCode:
    """Compiles graphs, or finds them compiled. folder: where; num_found, num_compiled: so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_found = self.num_compiled = 0

    def __call__(self, graph: GraphModule, examples: Sequence[Tensor]) -> Run:
        """What runs the graph: arguments like the examples in, results out."""
        plain = [one.detach() for one in examples]
        move_factors_(graph.graph)
        add_products_(graph.graph)
        graph.recompile()
        path = self._folder / code_key(graph, plain)
        with torch.no_grad():
            found = self._find(path)
            if found is not None:
                self.num_found += 1
                return found
            self.num_compiled += 1
            return self._make(graph, plain, path)

    def _find(self, path: Path) -> Run | None:
        """What was kept; None, and the file gone, where torch does not take it."""
        if not path.exists() or not hasattr(torch._inductor, "CompiledArtifact"):  # noqa: SLF001 - torch's public names begin below it
            return None
        try:
            run: Run = torch._inductor.CompiledArtifact.load(path=str(path), format="binary")  # noqa: SLF001
        except Exception:  # noqa: BLE001 - torch asserts, unpickles and imports; whatever it is, compiling anew mends it
            path.unlink(missing_ok=True)
            return None
        return run

    def _make(self, graph: GraphModule, examples: list[Any], path: Path) -> Run:
        import torch._inductor as inductor
        import torch._inductor.config as settings

        for node in graph.graph.nodes:
            node.type = (
                None  # annotations of what was traced; as texts they keep torch from keeping code
            )
        graph.recompile()
        patches = {name: value for name, value in _SETTINGS.items() if hasattr(settings, name)}
        if not hasattr(inductor, "standalone_compile"):  # before torch 2.8: torch's own cache alone
            compiled: Run = inductor.compile(graph, examples, options=patches)
            return compiled
        made = inductor.standalone_compile(
            graph,
            examples,
            dynamic_shapes="from_example_inputs",
            options={"config_patches": patches},
        )
        if made._artifacts is not None:  # noqa: SLF001 - None: something in it that torch cannot keep
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = temporary_beside(path)
            made.save(path=str(partial), format="binary")
            commit_file(partial, path)
        run: Run = made
        return run


def lift_constants_(graph: GraphModule) -> list[Tensor]:
    """Make the tensors that a traced graph holds its last arguments, and return them: kept code cannot hold values."""
    last = [one for one in graph.graph.nodes if one.op == "placeholder"][-1]
    lifted: dict[str, Any] = {}
    values: list[Tensor] = []
    for node in [one for one in graph.graph.nodes if one.op == "get_attr"]:
        name = str(node.target)
        if name not in lifted:
            with graph.graph.inserting_after(last):
                last = lifted[name] = graph.graph.placeholder(f"constant_{len(lifted)}")
            last.meta = dict(node.meta)
            values.append(getattr(graph, name))
            delattr(graph, name)
        node.replace_all_uses_with(lifted[name])
        graph.graph.erase_node(node)
    graph.recompile()
    return values


def code_key(graph: GraphModule, examples: Iterable[Tensor]) -> str:
    """SHA-256 over everything that decides what a graph is compiled to."""
    digest = hashlib.sha256()
    is_exact = torch.are_deterministic_algorithms_enabled()
    for line in (*_surroundings(), is_exact, *_lines(graph), *map(_layout, examples)):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _lines(graph: GraphModule) -> Iterator[str]:
    """The graph's nodes: its printed code leaves out what their results are laid out like."""
    for node in graph.graph.nodes:
        target = node.target if isinstance(node.target, str) else _name_of(node.target)
        yield f"{node.op} {node.name} {target} {node.args} {node.kwargs} {_results(node.meta.get('val'))}"


def _results(value: Any) -> str:
    if isinstance(value, Tensor):
        return _layout(value)
    if isinstance(value, list | tuple):
        return str([_results(one) for one in value])
    return type(value).__name__


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - torch's name
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def _layout(tensor: Tensor) -> str:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return f"{shape} {strides} {tensor.dtype} {tensor.device} {tensor.storage_offset()}"


@cache
def _surroundings() -> tuple[str, ...]:
    """Versions, cards and our own source."""
    found = [torch.__version__, str(torch.version.cuda), str(torch.version.hip)]
    for package in ("triton", "triton-windows"):
        try:
            found.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found.append(f"{card.name} {card.major}.{card.minor} {card.multi_processor_count}")
    root = Path(__file__).parent.parent
    sources = (path for folder in _OUR_KERNELS for path in sorted((root / folder).glob("*.py")))
    return (*found, *(hashlib.sha256(path.read_bytes()).hexdigest() for path in sources))
