"""Blocks as compiled graphs: one for the way up, one for recompute and backward together, shared by all blocks of a kind.

A block is traced once for each kind and shape of its arguments: its own code runs on tensors without memory, and what
reaches torch's operators is written down, gradients included. Nothing of Python is left in the graph, so no guard is checked
when it runs (with PEFT's many attributes that alone took longer than a block's arithmetic), no break can split it, and
recompute and backward, being one graph, need neither autograd's bookkeeping nor a choice of what to save between them.
Weights, packed parts and the adapter's matrices are arguments like any other: that is what lets blocks share a graph.

Two blocks are of one kind when their modules agree in types, plain attributes, shapes and formats (`_signature.py`). What a
block is, its adapter included, is looked at when it first runs and must not change afterwards.

Every size of pictures has its own graphs: one that served several would depend on which came first, and a resumed run would
differ from an unbroken one. What was compiled is kept in a folder, so that the time it takes is spent once per machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from outsize.layers._code import KeptCode, lift_constants_
from outsize.layers._merging import merge_equal_
from outsize.layers._signature import signature_of
from outsize.layers._state import BlockState
from outsize.layers.block import outline, unflatten
from outsize.layers.recorded import Arena, RecordedGraph

if TYPE_CHECKING:
    from outsize.devices.protocol import Recorder

# From a graph and example arguments to what runs it: arguments in, list of results out.
CompileGraph = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]]
# From arguments, and which of them always lie at one of few addresses, to results.
Launch = Callable[[Sequence[Tensor], Sequence[bool]], Sequence[Tensor]]


class BlockCompiler:
    """Makes runners that share their graphs.

    num_graphs: compiled so far; cache: folder for compiled code; recorder: what records a graph's kernels to launch them as
    one, where the device has that.
    """

    def __init__(
        self,
        cache: Path,
        *,
        recorder: Recorder | None = None,
        compile_graph: CompileGraph | None = None,
    ) -> None:
        # read by inductor and Triton when they are first used
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
        self._compile = compile_graph or KeptCode(cache / "graphs")
        self._recorder, self._arena = recorder, Arena()
        self._graphs: dict[Any, Graph] = {}
        self._kinds: dict[Any, int] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def __call__(self, module: nn.Module) -> CompiledRunner:
        """The runner of one block."""
        return CompiledRunner(module, self)

    def kind(self, signature: tuple[Any, ...]) -> int:
        """A number for a kind of block: signatures are long, and slow to compare at every call."""
        return self._kinds.setdefault(signature, len(self._kinds))

    def graph(
        self, key: Any, trace: Callable[[], tuple[torch.fx.GraphModule, list[Tensor], Any]]
    ) -> Graph:
        """The graph of a key, traced and compiled if it is new."""
        if key not in self._graphs:
            traced, examples, places = trace()
            constants = lift_constants_(traced)
            run = self._compile(traced, [*examples, *constants])
            self._graphs[key] = Graph(self._launched(run, constants), places)
        return self._graphs[key]

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
        self._arena.clear()

    def _launched(self, run: Callable[..., Sequence[Tensor]], constants: list[Tensor]) -> Launch:
        def whole(*args: Tensor) -> Sequence[Tensor]:
            return run(*args, *constants)

        if self._recorder is None:
            return lambda args, _is_fixed: whole(*args)
        return RecordedGraph(whole, self._recorder, self._arena)


class Graph:
    """A compiled graph. places: what its results are, as its tracer knows them."""

    def __init__(self, run: Launch, places: Any) -> None:
        self.run, self.places = run, places


class CompiledRunner:
    """Runs one block through graphs that it shares with others of its kind."""

    def __init__(self, module: nn.Module, compiler: BlockCompiler) -> None:
        self._module, self._inner, self._compiler = module, module.forward, compiler
        self._state: BlockState | None = None
        self._is_written_out = False

    def write_out(self, *, is_wanted: bool) -> None:
        self._is_written_out = is_wanted

    def forward(self, skeleton: Any, tensors: tuple[Tensor, ...]) -> Any:
        assert not torch.is_grad_enabled(), "a compiled block runs again in backward"
        if self._is_written_out:
            args, kwargs = unflatten(skeleton, tensors)
            return self._inner(*args, **kwargs)
        state = self._taken()
        key = ("up", self._kind, outline(skeleton), _shapes(tensors))
        graph = self._compiler.graph(key, lambda: self._trace_up(state, skeleton, tensors))
        found = graph.run(
            [*tensors, *state.tensors()], (*(False for _ in tensors), *state.is_fixed)
        )
        return tuple(found) if graph.places == "tuple" else found[0]

    def backward(
        self,
        skeleton: Any,
        tensors: tuple[Tensor, ...],
        needed: Sequence[bool],
        grads: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...]:
        state = self._taken()
        # those of a concatenation are slices; laid out alike, all blocks of a kind share one graph
        given = [one.contiguous() for one in grads if one is not None]
        where = tuple(one is not None for one in grads)
        # a gradient that nobody needs is computed all the same: the first block then shares the others' graph
        wanted = tuple(one.is_floating_point() and _is_stream(one, given) for one in tensors)
        wanted = tuple(one or bool(need) for one, need in zip(wanted, needed, strict=True))
        key = (
            "down",
            self._kind,
            outline(skeleton),
            _shapes(tensors),
            wanted,
            where,
            _shapes(given),
        )
        graph = self._compiler.graph(
            key, lambda: self._trace_down(state, skeleton, tensors, wanted, where, given)
        )
        is_fixed = (*(False for _ in tensors), *state.is_fixed, *(False for _ in given))
        with torch.no_grad():
            results = graph.run([*tensors, *state.tensors(), *given], is_fixed)
            found = dict(zip(graph.places, results, strict=True))
            for number, one in enumerate(state.trained):
                grad = found.get(("parameter", number))
                if grad is not None:
                    one.grad = grad if one.grad is None else one.grad.add_(grad)
        return tuple(
            found.get(("input", number)) if need else None for number, need in enumerate(needed)
        )

    def close(self) -> None:
        self._compiler.close()

    def _taken(self) -> BlockState:
        if self._state is None:
            self._state = BlockState(self._module)
            self._kind = self._compiler.kind(signature_of(self._module))
        return self._state

    def _trace_up(
        self, state: BlockState, skeleton: Any, tensors: tuple[Tensor, ...]
    ) -> tuple[torch.fx.GraphModule, list[Tensor], str]:
        count, kind = len(tensors), ""

        def run(*flat: Tensor) -> list[Tensor]:
            nonlocal kind
            with torch.no_grad(), state.replaced(flat[count:]):
                args, kwargs = unflatten(skeleton, flat[:count])
                out = self._inner(*args, **kwargs)
            kind = "tuple" if isinstance(out, tuple) else "one"
            return list(out) if isinstance(out, tuple) else [out]

        examples = [*tensors, *state.tensors()]
        return _traced(run, examples), examples, kind

    def _trace_down(  # noqa: PLR0917 - all of a call
        self,
        state: BlockState,
        skeleton: Any,
        tensors: tuple[Tensor, ...],
        wanted: tuple[bool, ...],
        where: tuple[bool, ...],
        given: list[Tensor],
    ) -> tuple[torch.fx.GraphModule, list[Tensor], list[tuple[str, int]]]:
        num_inputs, num_state = len(tensors), len(state.tensors())
        places: list[tuple[str, int]] = []

        def run(*flat: Tensor) -> list[Tensor]:
            inputs = [
                one.detach().requires_grad_(need)
                for one, need in zip(flat[:num_inputs], wanted, strict=True)
            ]
            own, trained = state.differentiable(flat[num_inputs : num_inputs + num_state])
            with torch.enable_grad(), state.replaced(own):
                args, kwargs = unflatten(skeleton, tuple(inputs))
                out = self._inner(*args, **kwargs)
                outs = out if isinstance(out, tuple) else (out,)
                ends = [one for one, is_given in zip(outs, where, strict=True) if is_given]
                starts = [one for one in inputs if one.requires_grad] + trained
                found = torch.autograd.grad(
                    ends, starts, flat[num_inputs + num_state :], allow_unused=True
                )
            names = [("input", number) for number, need in enumerate(wanted) if need]
            names += [("parameter", number) for number in range(len(trained))]
            there = [(name, one) for name, one in zip(names, found, strict=True) if one is not None]
            places[:] = [name for name, _ in there]
            return [one for _, one in there]

        examples = [*tensors, *state.tensors(), *given]
        return _traced(run, examples), examples, places


def _traced(run: Callable[..., list[Tensor]], examples: Sequence[Tensor]) -> torch.fx.GraphModule:
    """What `run` does to tensors like these; nothing is computed."""
    detached = [one.detach() for one in examples]
    with torch.no_grad():
        # tables that formats look values up in are constants of the graph
        graph: torch.fx.GraphModule = make_fx(
            run, tracing_mode="fake", _allow_non_fake_inputs=True
        )(*detached)
    merge_equal_(graph.graph)
    graph.recompile()
    return graph


def _shapes(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((one.shape, one.stride(), one.dtype, one.device) for one in tensors)


def _is_stream(tensor: Tensor, grads: Sequence[Tensor]) -> bool:
    """Whether a block's argument looks like what runs through all blocks: the shape of one of its results."""
    return any(tensor.shape == one.shape and tensor.dtype == one.dtype for one in grads)
