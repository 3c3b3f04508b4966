"""How bytes get from the host into a slot: on a stream of their own where the device has streams, else at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from outsize.devices.protocol import Device

CHUNK_BYTES = (
    1 << 30
)  # the pinned allocator rounds each block up to a power of two: take powers of two


class Copier(Protocol):
    """Fills slots; keeps readers and writers of a slot apart."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory from which copies are fast."""

    def copy(self, slot: int, target: Tensor, source: Tensor) -> None:
        """Queue the copy, after the last reader of the slot."""

    def wait_filled(self, slot: int) -> None:
        """Let work queued from now on run after the slot's copy."""

    def mark_read(self, slot: int) -> None:
        """Say that all readers queued so far precede the slot's next copy."""


class DirectCopier:
    """Copies at once; nothing to wait for."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, slot: int, target: Tensor, source: Tensor) -> None:  # noqa: ARG002
        target.copy_(source)

    def wait_filled(self, slot: int) -> None:
        """Copies are finished when they return."""

    def mark_read(self, slot: int) -> None:
        """Readers are finished when they return."""


class StreamCopier:
    """Copies from pinned memory on a stream of its own; an event pair per slot, nothing allocated per copy."""

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's stub
        event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self._filled = [event() for _ in range(num_slots)]
        self._read = [event() for _ in range(num_slots)]

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, slot: int, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read[slot])
            target.copy_(source, non_blocking=True)
            self._filled[slot].record(self._stream)

    def wait_filled(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._filled[slot])

    def mark_read(self, slot: int) -> None:
        self._read[slot].record(torch.cuda.current_stream(self._device))


def make_copier(device: Device, num_slots: int) -> Copier:
    """The copier that suits a device."""
    if device.copies_asynchronously:
        return StreamCopier(device.torch_device, num_slots)
    return DirectCopier()


class HostSlab:
    """Packets in host memory, back to back in chunks of a gibibyte (or one chunk as large as all of them)."""

    def __init__(self, copier: Copier, sizes: dict[int, int]) -> None:
        self._places: dict[int, tuple[int, int, int]] = {}
        chunk_bytes = max(CHUNK_BYTES, max(sizes.values(), default=0))
        used: list[int] = []
        for block, size in sizes.items():
            if not used or used[-1] + size > chunk_bytes:
                used.append(0)
            self._places[block] = (len(used) - 1, used[-1], size)
            used[-1] += size
        self._chunks = [copier.host_buffer(size) for size in used]

    def __getitem__(self, block: int) -> Tensor:
        chunk, start, size = self._places[block]
        return self._chunks[chunk][start : start + size]

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() for one in self._chunks)

    def clear(self) -> None:
        """Give the memory back."""
        self._chunks.clear()
