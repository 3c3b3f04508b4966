"""Where a step's seconds go: a placement with a stopwatch around every wait for a copy, and marks around a step's work.

`acquire` is where a placement makes computing wait for a copy. Marks before and after it lie on the computing queue, so
what passes between them is the time in which that queue had nothing to do but wait: copy time that was not hidden. On a
device that copies at once the copies themselves lie in `begin`, `acquire` and `release`, and nothing is hidden by
construction.

A mark is an event in the device's queue, a few microseconds each; none is waited for. They are read once the loop has
waited for the gradients anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from outsize.placement.protocol import Lists
from outsize.train.loop import Split
from outsize.weights.budget import private_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.base.journal import Journal
    from outsize.devices.protocol import Device, Mark
    from outsize.layers.model import FrozenModel, PacketHolder

_MEMORY_EVERY_S = 10.0  # between two looks at the memory
_COPIED = "copied_bytes"  # an attribute of placements that count
_Result = TypeVar("_Result")


class MeteredPlacement:
    """The same placement, timed while `is_on`."""

    def __init__(self, inner: PacketHolder, device: Device) -> None:
        self.inner, self._device = inner, device
        self.is_on = False
        self._waits: list[tuple[Mark, Mark]] = []

    def put(self, block: int, packet: Tensor) -> None:
        self.inner.put(block, packet)

    def begin(self, sweep: Literal["forward", "train"]) -> None:
        self._copying(lambda: self.inner.begin(sweep))

    def acquire(self, block: int) -> Tensor:
        return self._timed(lambda: self.inner.acquire(block))

    def release(self, block: int) -> None:
        self._copying(lambda: self.inner.release(block))

    def device_bytes(self) -> int:
        return self.inner.device_bytes()

    def host_bytes(self) -> int:
        return self.inner.host_bytes()

    def close(self) -> None:
        self.inner.close()

    def copied_bytes(self) -> int:
        """Bytes copied to the device so far, by a placement that counts them; 0 by one that copies nothing."""
        counted: int = getattr(self.inner, _COPIED, 0)
        return counted

    def buffers(self) -> dict[str, Tensor]:
        """Device memory by name, of a placement that names it."""
        return self.inner.buffers() if isinstance(self.inner, Lists) else {}

    def take_waited_s(self) -> float:
        """Seconds waited since the last call; the device must be synchronised."""
        waited_s = sum(after.seconds_after(before) for before, after in self._waits)
        self._waits.clear()
        return waited_s

    def _copying(self, act: Callable[[], None]) -> None:
        """What only queues copies, unless the device makes them at once."""
        if self._device.copies_asynchronously:
            act()
        else:
            self._timed(act)

    def _timed(self, act: Callable[[], _Result]) -> _Result:
        if not self.is_on:
            return act()
        before = self._device.mark()
        result = act()
        self._waits.append((before, self._device.mark()))
        return result


def copied_bytes_of(model: FrozenModel) -> Callable[[], int] | None:
    """What tells how many bytes a model's placement copied to the device so far; None where it does not count them."""
    placement = model.placement
    if isinstance(placement, MeteredPlacement):
        return placement.copied_bytes
    if not hasattr(placement, _COPIED):
        return None
    return lambda: int(getattr(placement, _COPIED))


class StepMeter:
    """Splits each step into computing, waiting for copies, and an empty queue; see `StepClock` in train/loop.py.

    What a card computes is what lies between marks: forward and backward of this step, and the update of the one before,
    which the card is still at when the step begins. The rest of the step it was without work. A processor that launches
    kernels more slowly than they run shows as computing: the queue is never seen empty then.
    """

    def __init__(self, device: Device, placement: MeteredPlacement | None) -> None:
        """placement: None where no block is ever copied."""
        self._device, self._placement = device, placement
        self._began = self._queued = device.mark()
        self._update: tuple[Mark, Mark] | None = None
        self._busy_s = self._waited_s = 0.0
        self._free = self._began

    def begin(self) -> None:
        self._began = self._device.mark()
        self._meter(is_on=True)

    def queued(self) -> None:
        self._queued = self._device.mark()

    def updating(self) -> None:
        self._busy_s = self._queued.seconds_after(self._began)
        if self._update is not None:
            self._busy_s += self._update[1].seconds_after(self._update[0])
        self._waited_s = 0.0 if self._placement is None else self._placement.take_waited_s()
        self._free = self._device.mark()

    def split(self, seconds: float) -> Split:
        self._update = (self._free, self._device.mark())
        self._meter(is_on=False)
        waited_s = min(self._waited_s, seconds)
        compute_s = min(max(0.0, self._busy_s - waited_s), seconds - waited_s)
        return Split(compute_s, waited_s, seconds - waited_s - compute_s)

    def _meter(self, *, is_on: bool) -> None:
        if self._placement is not None:
            self._placement.is_on = is_on


class MemoryMeter:
    """Writes the memory in use to the journal now and then, so that growth shows."""

    def __init__(self, device: Device, journal: Journal) -> None:
        self._device, self._journal = device, journal
        self._next_s = 0.0

    def see(self, step: int) -> None:
        """After a step."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _MEMORY_EVERY_S
        self._journal.write(
            "memory", step=step, device_bytes=self._device.peak_bytes(),
            reserved_bytes=self._device.peak_reserved_bytes(), host_bytes=private_bytes(),
        )  # fmt: skip
