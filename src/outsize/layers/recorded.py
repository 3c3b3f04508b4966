"""A compiled graph whose kernels are launched together, with tensors at fixed addresses.

A recording reads and writes where the tensors lay when it was made. What is large and stays where it is, a block's packed
parts, is read in place: there is one recording for each place. Everything else (inputs, gradients, the adapter) is copied
to an arena before a launch, and results are copied out of it after; all graphs share the arena, since only one runs at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outsize.devices.protocol import Recorder

# Recordings of one graph; each keeps some of the driver's memory. Beyond, kernels are launched one by one.
MOST_RECORDINGS = 128


class Arena:
    """Tensors that stay. The n-th tensor of a layout, within one call, always gets the same one."""

    def __init__(self) -> None:
        self._held: defaultdict[object, list[Tensor]] = defaultdict(list)

    def places(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """A place for each of these, laid out like it."""
        taken: defaultdict[object, int] = defaultdict(int)
        found = []
        for one in tensors:
            layout = (one.shape, one.stride(), one.dtype, one.device)
            held = self._held[layout]
            if taken[layout] == len(held):
                held.append(_like(one))
            found.append(held[taken[layout]])
            taken[layout] += 1
        return found

    def num_bytes(self) -> int:
        """All of it."""
        return sum(one.untyped_storage().nbytes() for held in self._held.values() for one in held)

    def clear(self) -> None:
        """Give all back."""
        self._held.clear()


class RecordedGraph:
    """Launches a graph as one. run: arguments in, results out; called itself the first time, which may compile and load."""

    def __init__(
        self, run: Callable[..., Sequence[Tensor]], recorder: Recorder, arena: Arena
    ) -> None:
        self._run, self._recorder, self._arena = run, recorder, arena
        self._recordings: dict[tuple[int, ...], _Recording] = {}
        self._has_run = False

    def __call__(self, args: Sequence[Tensor], is_fixed: Sequence[bool]) -> Sequence[Tensor]:
        """Results, in tensors of their own. is_fixed: which arguments stay where they are."""
        if not self._has_run:
            self._has_run = True
            return self._run(*args)
        key = tuple(one.data_ptr() for one, stays in zip(args, is_fixed, strict=True) if stays)
        recording = self._recordings.get(key)
        if recording is None:
            if len(self._recordings) >= MOST_RECORDINGS:
                return self._run(*args)
            if not self._recordings:
                self._recorder.make_room()
            recording = _Recording(self._run, args, is_fixed, self._recorder, self._arena)
            self._recordings[key] = recording
        return recording.launch(args)


class _Recording:
    """One graph over tensors at certain addresses."""

    def __init__(
        self,
        run: Callable[..., Sequence[Tensor]],
        args: Sequence[Tensor],
        is_fixed: Sequence[bool],
        recorder: Recorder,
        arena: Arena,
    ) -> None:
        self._moving = [number for number, stays in enumerate(is_fixed) if not stays]
        self._places = arena.places(args[number] for number in self._moving)
        given = list(args)
        for number, place in zip(self._moving, self._places, strict=True):
            given[number] = place
        self._results: list[Tensor] = []
        inputs = {one.untyped_storage().data_ptr() for one in self._places}

        def record() -> None:
            # a result that is an argument itself would be overwritten by one that is copied out before it
            found = [
                one.clone() if one.untyped_storage().data_ptr() in inputs else _dense(one)
                for one in run(*given)
            ]
            self._results = arena.places(found)
            _copy(self._results, found)

        self._replay = recorder.record(record)

    def launch(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Results for other values of the arguments that move."""
        _copy(self._places, [args[number] for number in self._moving])
        self._replay()
        found = [torch.empty_like(one) for one in self._results]
        _copy(found, self._results)
        return found


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each into its own, with few launches."""
    by_type: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(
        lambda: ([], [])
    )
    for target, source in zip(targets, sources, strict=True):
        into, of = by_type[target.dtype]
        is_dense = _is_dense(target)
        into.append(target if is_dense else _span(target))
        of.append(source if is_dense else _span(source))
    with torch.no_grad():
        for into, of in by_type.values():
            torch._foreach_copy_(into, of)


def _is_dense(tensor: Tensor) -> bool:
    """Without gaps, and without elements that share their memory (as expanded tensors have)."""
    if tensor.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _dense(tensor: Tensor) -> Tensor:
    return tensor if _is_dense(tensor) else tensor.contiguous()


def _reach(tensor: Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _span(tensor: Tensor) -> Tensor:
    return tensor.as_strided((_reach(tensor),), (1,))


def _like(tensor: Tensor) -> Tensor:
    """Without values: same shape, strides, type and device."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
