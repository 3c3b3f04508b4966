"""A block's forward under one acquisition of its weights, and one more for recompute and backward together.

A step goes up the blocks and down again. Going up, a block is acquired, run without a graph and released; only its
inputs are kept, by whom `layers/inputs.py` says. Going down, it is acquired once, run again with a graph, and differentiated, before it is released: so
a streamed block crosses the bus twice per step, never three times. A resident block may instead run once, with a graph
(`wrap_block`).

Arguments are flattened to tensors and the rest, since autograd sees only tensors that are passed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outsize.layers.inputs import InputKeeper, SavedInputs


class Bound(Protocol):
    """Gives a block its weights and takes them away."""

    def acquire(self, block: int) -> None:
        """Bind the block's packed weights."""

    def release(self, block: int) -> None:
        """Unbind them; the bytes may be overwritten by work queued later."""


class BlockRunner(Protocol):
    """Runs one block, whose weights are bound meanwhile. skeleton, tensors: its arguments, as `flatten` parts them."""

    def forward(self, skeleton: Any, tensors: tuple[Tensor, ...]) -> Any:
        """What the block makes of its arguments; with a graph where gradients are enabled."""

    def backward(
        self,
        skeleton: Any,
        tensors: tuple[Tensor, ...],
        needed: Sequence[bool],
        grads: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...]:
        """Run the block again and differentiate it: gradients of the needed tensors; those of parameters are added to theirs.

        grads: of the block's outputs, None for one that nothing depends on.
        """

    def write_out(self, *, is_wanted: bool) -> None:
        """Run forward as the block is written, whatever it was made into, from now on; or as made again."""

    def close(self) -> None:
        """Give back memory that outlives a run."""


class EagerRunner:
    """Runs a block as it is written, operation by operation."""

    def __init__(self, module: nn.Module) -> None:
        self._inner = module.forward

    def forward(self, skeleton: Any, tensors: tuple[Tensor, ...]) -> Any:
        args, kwargs = unflatten(skeleton, tensors)
        return self._inner(*args, **kwargs)

    def backward(
        self,
        skeleton: Any,
        tensors: tuple[Tensor, ...],
        needed: Sequence[bool],
        grads: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...]:
        inputs = tuple(
            one.detach().requires_grad_(need) for one, need in zip(tensors, needed, strict=True)
        )
        with torch.enable_grad():
            out = self.forward(skeleton, inputs)
        outs = out if isinstance(out, tuple) else (out,)
        pairs = [
            (one, grad)
            for one, grad in zip(outs, grads, strict=True)
            if grad is not None and one.requires_grad
        ]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
        return tuple(one.grad for one in inputs)

    def write_out(self, *, is_wanted: bool) -> None:
        """It always does."""

    def close(self) -> None:
        """It keeps none."""


class BlockCall(torch.autograd.Function):
    """Run a block without a graph; in backward run it again with one, under a single acquisition."""

    @staticmethod
    def forward(
        ctx: Any,
        bound: Bound,
        block: int,
        call: tuple[BlockRunner, Any],
        keeper: InputKeeper,
        _anchor: Tensor,
        *tensors: Tensor,
    ) -> Any:
        ctx.bound, ctx.block, ctx.call, ctx.keeper = bound, block, call, keeper
        saved, ctx.kept = keeper.keep(block, tensors)
        ctx.save_for_backward(*saved)
        runner, skeleton = call
        bound.acquire(block)
        with torch.no_grad():
            out = runner.forward(skeleton, tensors)
        bound.release(block)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        runner, skeleton = ctx.call
        tensors = ctx.keeper.take(ctx.kept, ctx.saved_tensors)
        ctx.bound.acquire(ctx.block)
        found = runner.backward(skeleton, tensors, ctx.needs_input_grad[5:], grads)
        ctx.bound.release(ctx.block)
        ctx.keeper.release(ctx.kept)
        return (None, None, None, None, None, *found)


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Move every tensor in nested tuples, lists and dicts into `tensors`; give the skeleton that is left."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: flatten(one, tensors) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(flatten(one, tensors) for one in value)
    return value


def outline(skeleton: Any) -> Any:
    """A hashable value, equal for skeletons that stand for the same call.

    Raises: TypeError naming an argument that is neither tensor nor plain value.
    """
    if isinstance(skeleton, _Place):
        return ("tensor", skeleton.index)
    if isinstance(skeleton, dict):
        return tuple((key, outline(one)) for key, one in skeleton.items())
    if type(skeleton) in (tuple, list):
        return tuple(outline(one) for one in skeleton)
    if skeleton is None or isinstance(skeleton, bool | int | float | str | torch.dtype):
        return (type(skeleton).__name__, skeleton)
    raise TypeError(f"a block was called with a {type(skeleton).__name__}, which no graph can hold")


def unflatten(skeleton: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Put the tensors back where `flatten` took them from."""
    if isinstance(skeleton, _Place):
        return tensors[skeleton.index]
    if isinstance(skeleton, dict):
        return {key: unflatten(one, tensors) for key, one in skeleton.items()}
    if type(skeleton) in (tuple, list):
        return type(skeleton)(unflatten(one, tensors) for one in skeleton)
    return skeleton


class _Place:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def wrap_block(
    module: nn.Module,
    block: int,
    bound: Bound,
    *,
    recomputes: bool,
    keeper: InputKeeper | None = None,
    make_runner: Callable[[nn.Module], BlockRunner] = EagerRunner,
) -> BlockRunner:
    """Replace a block module's forward, in place, by one that acquires its weights around every run; what runs it.

    recomputes: keep only the block's inputs for backward and run it again there. Without it autograd keeps what the block
    computed, which is right only while the block's bytes stay where they are until backward is over. keeper: who keeps the
    inputs; autograd, unless another is given. make_runner: called with the module as it is before.
    """
    runner = make_runner(module)
    keeper = SavedInputs() if keeper is None else keeper
    anchor = torch.zeros((), requires_grad=True)  # asks autograd for a backward when no input does

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        skeleton = flatten((args, kwargs), tensors)
        if torch.is_grad_enabled() and recomputes:
            call: Callable[..., Any] = BlockCall.apply
            return call(bound, block, (runner, skeleton), keeper, anchor, *tensors)
        bound.acquire(block)
        out = runner.forward(skeleton, tuple(tensors))
        bound.release(block)
        return out

    module.forward = forward
    return runner
