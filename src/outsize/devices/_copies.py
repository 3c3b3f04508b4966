"""Copies between host and device beside the computation, and the two waits that keep them apart.

A track is a buffer, or a succession of them, that computing and copying use in turns. `open_` says "what is queued so far
precedes the track's next copies", `wait` says "what is queued from now on follows its last ones". Both only order work on
the device; neither makes the host wait. All copies of all tracks run in the order in which they were asked for, in both
directions, so host memory that one copy reads and a later one overwrites needs no care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outsize.devices.protocol import Device


class Copies(Protocol):
    """Copies on numbered tracks."""

    def open_(self, track: int) -> None:
        """Let the track's next copies follow all work queued so far."""

    def copy(self, track: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Queue copies as (target, source); both must live until `wait` was called for the track."""

    def wait(self, track: int) -> None:
        """Let work queued from now on follow the track's last copies."""

    def finish(self) -> None:
        """Make the host wait until all copies are done: before their memory on the host is given back."""


class DirectCopies:
    """Copies at once; nothing to wait for."""

    def open_(self, track: int) -> None:
        """Work is finished when it returns."""

    def copy(self, track: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:  # noqa: ARG002
        for target, source in pairs:
            target.copy_(source)

    def wait(self, track: int) -> None:
        """Copies are finished when they return."""

    def finish(self) -> None:
        """Copies are finished when they return."""


class StreamCopies:
    """Copies on a stream of their own; an event pair per track, nothing allocated per copy.

    The stream that is current when `open_` or `wait` is called counts as the computing one; it must always be the same.
    """

    def __init__(self, device: torch.device, num_tracks: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's stub
        event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self._opened = [event() for _ in range(num_tracks)]
        self._copied = [event() for _ in range(num_tracks)]

    def open_(self, track: int) -> None:
        self._opened[track].record(torch.cuda.current_stream(self._device))

    def copy(self, track: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._opened[track])
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._copied[track].record(self._stream)

    def wait(self, track: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[track])

    def finish(self) -> None:
        self._stream.synchronize()


def make_copies(device: Device, num_tracks: int) -> Copies:
    """What suits a device."""
    if device.copies_asynchronously:
        return StreamCopies(device.torch_device, num_tracks)
    return DirectCopies()
