"""How bytes get into a slot and when: on streams of their own where the device has streams, else at once.

Two lanes, for copies in the order of their use and for those that a thread prepares: neither waits behind the other.
A copy begins after the slot's last reader and its last copy; a reader begins after the slot's copy. All of it is queued:
the host waits in `Fence.wait` alone, before it overwrites memory that a copy still reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from outsize.devices.protocol import Device

Lane = Literal["straight", "staged"]


class Fence(Protocol):
    """The end of what was queued on the staged lane."""

    def mark(self) -> None:
        """Stand behind all copies queued so far."""

    def wait(self) -> None:
        """Make the host wait for them."""


class Copier(Protocol):
    """Fills slots; keeps readers and writers of a slot apart."""

    def copy(self, slot: int, target: Tensor, source: Tensor, lane: Lane) -> None:
        """Queue a copy into a part of the slot, after the slot's last reader."""

    def mark_filled(self, slot: int, lane: Lane) -> None:
        """Say that all copies that fill the slot are queued."""

    def wait_filled(self, slot: int) -> None:
        """Let work queued from now on run after the slot's copies."""

    def mark_read(self, slot: int) -> None:
        """Say that all readers queued so far precede the slot's next copy."""

    def fence(self) -> Fence:
        """A fence of the staged lane, which waits for nothing until it is marked."""

    def finish(self) -> None:
        """Make the host wait until all copies are done."""


class DirectCopier:
    """Copies at once; nothing to wait for."""

    def copy(self, slot: int, target: Tensor, source: Tensor, lane: Lane) -> None:  # noqa: ARG002
        target.copy_(source)

    def mark_filled(self, slot: int, lane: Lane) -> None:
        """Copies are finished when they return."""

    def wait_filled(self, slot: int) -> None:
        """Copies are finished when they return."""

    def mark_read(self, slot: int) -> None:
        """Readers are finished when they return."""

    def fence(self) -> Fence:
        return _NoFence()

    def finish(self) -> None:
        """Copies are finished when they return."""


class _NoFence:
    def mark(self) -> None:
        """Copies are finished when they return."""

    def wait(self) -> None:
        """Copies are finished when they return."""


class StreamCopier:
    """Copies on two streams; an event pair per slot, nothing allocated per copy.

    A wait sees the event's last mark at the moment when it is queued, and nothing when there is none yet. Where one thread
    marks and another waits, both must therefore have agreed in Python that the mark was made.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._lanes = {"straight": make(device), "staged": make(device)}
        event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self._filled = [event() for _ in range(num_slots)]
        self._read = [event() for _ in range(num_slots)]
        for slot in range(num_slots):  # the slots' memory may have been read until a moment ago
            self.mark_read(slot)

    def copy(self, slot: int, target: Tensor, source: Tensor, lane: Lane) -> None:
        stream = self._lanes[lane]
        with torch.cuda.stream(stream):
            stream.wait_event(self._read[slot])
            stream.wait_event(
                self._filled[slot]
            )  # of a copy that was called off, on the other lane
            target.copy_(source, non_blocking=True)

    def mark_filled(self, slot: int, lane: Lane) -> None:
        self._filled[slot].record(self._lanes[lane])

    def wait_filled(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._filled[slot])

    def mark_read(self, slot: int) -> None:
        self._read[slot].record(torch.cuda.current_stream(self._device))

    def fence(self) -> Fence:
        return _EventFence(self._lanes["staged"])

    def finish(self) -> None:
        for stream in self._lanes.values():
            stream.synchronize()


class _EventFence:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        make: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self._stream = stream
        self._event = make(blocking=True)  # the waiting thread sleeps: the processor has other work

    def mark(self) -> None:
        self._event.record(self._stream)

    def wait(self) -> None:
        self._event.synchronize()


def make_copier(device: Device, num_slots: int) -> Copier:
    """The copier that suits a device."""
    if device.copies_asynchronously:
        return StreamCopier(device.torch_device, num_slots)
    return DirectCopier()
