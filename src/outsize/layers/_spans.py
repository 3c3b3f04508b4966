"""A block's inputs as bytes: what travels is a span of a storage, what comes back are the same views of it.

Two inputs may be views of one storage (Flux.1's single blocks get text and image as slices of the block before's output).
The span that holds both travels once, in one plain copy, and strides survive.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize.base.errors import MachineFault
from outsize.base.units import format_bytes

if TYPE_CHECKING:
    from outsize.devices._host import HostBuffer
    from outsize.devices.protocol import Device

ALIGNMENT = 256  # bytes; kernels choose by the address modulo 16 or less, the allocator gives 512


@dataclass(frozen=True, slots=True)
class View:
    """A tensor within the bytes that travel; offset in its own elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor over a whole buffer (uint8); it shares the buffer's version counter."""
        return buffer.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes start to stop of one storage, travelling at `position` among the bytes of their block."""

    storage: int
    start: int
    stop: int
    position: int

    @property
    def num_bytes(self) -> int:
        """How many."""
        return self.stop - self.start

    def view(self, tensor: Tensor) -> View:
        """Where a tensor of the storage lies once the span has travelled."""
        size = tensor.element_size()
        shift = (self.position - self.start) // size  # both are multiples of ALIGNMENT
        return View(
            tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()) + shift
        )

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """The span, by any tensor of its storage."""
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return whole.set_(tensor.untyped_storage(), self.start, (self.num_bytes,), (1,))


def may_travel(tensor: Tensor, device_type: str) -> bool:
    """Whether a tensor is plain bytes on the device, made by the step: a parameter stays where it is anyway."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == device_type
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not (tensor.is_leaf and tensor.requires_grad)
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def storage_of(tensor: Tensor) -> int:
    """The storage's name, as long as somebody holds it."""
    return tensor.untyped_storage().data_ptr()


def span_of(tensors: Sequence[Tensor], position: int) -> Span:
    """The bytes of one storage that these tensors reach."""
    starts, stops = [], []
    for one in tensors:
        first, size = int(one.storage_offset()), one.element_size()
        reach = sum((n - 1) * step for n, step in zip(one.shape, one.stride(), strict=True))
        starts.append(first * size)
        stops.append((first + reach + 1) * size)
    start = min(starts) // ALIGNMENT * ALIGNMENT
    return Span(storage_of(tensors[0]), start, max(stops), position)


def aligned(num_bytes: int) -> int:
    """Rounded up, so that what comes next is aligned."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False, slots=True)
class Kept:
    """One block's inputs, by place among its flattened arguments.

    held: on the device. groups: places by the storage that travels. spans, views: how these lie in the block's bytes, once
    they were sent to host_start.
    """

    block: int
    held: dict[int, Tensor]
    versions: dict[int, int]
    groups: dict[int, list[int]]
    spans: list[Span] = field(default_factory=list)
    views: dict[int, View] = field(default_factory=dict)
    host_start: int | None = None
    slot: int | None = None
    is_taken: bool = False

    @property
    def travelling(self) -> Iterator[int]:
        """Places of what is on the device only while the block is recent, and while it runs again."""
        return itertools.chain.from_iterable(self.groups.values())

    @property
    def is_away(self) -> bool:
        """Whether something is in host memory alone."""
        return any(place not in self.held for place in self.travelling)

    def keep_here(self, storage: int) -> Tensor | None:
        """Let a storage stay on the device, if it is one of those that would have gone; a tensor of it."""
        places = self.groups.pop(storage, None)
        if places is None:
            return None
        self.spans = [one for one in self.spans if one.storage != storage]
        return self.held[places[0]]

    def pack(self) -> int:
        """Give every travelling storage its place in the block's bytes; how many these are."""
        num_bytes = 0
        self.spans, self.views = [], {}
        for storage, places in self.groups.items():
            span = span_of([self.held[place] for place in places], num_bytes)
            assert span.storage == storage
            self.spans.append(span)
            self.views |= {place: span.view(self.held[place]) for place in places}
            num_bytes = aligned(num_bytes + span.num_bytes)
        return num_bytes

    def check_unchanged(self) -> None:
        """Check what autograd would check for a tensor that it saved."""
        held = self.held.items()
        changed = [place for place, one in held if one._version != self.versions[place]]  # noqa: SLF001
        if changed:
            raise RuntimeError(
                f"inputs {changed} of block {self.block} (places among its flattened arguments) were changed in place after "
                "the block had run; its backward needs them"
            )


class HostMemory:
    """Host memory that grows by whole chunks and counts as one: what is copied may lie across two of them."""

    def __init__(self, device: Device, chunk_bytes: int) -> None:
        self._device, self._chunk_bytes = device, chunk_bytes
        self._chunks: list[HostBuffer] = []

    @property
    def num_bytes(self) -> int:
        """Taken of the host's memory."""
        return sum(one.taken_bytes for one in self._chunks)

    def pairs(self, start: int, device: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes from start on beside those of a device tensor (uint8, one dimension): (host, device).

        Raises: MachineFault when the system gives no more.
        """
        while len(self._chunks) * self._chunk_bytes < start + device.numel():
            self._chunks.append(self._another())
        done = 0
        while done < device.numel():
            number, first = divmod(start + done, self._chunk_bytes)
            size = min(self._chunk_bytes - first, device.numel() - done)
            host = self._chunks[number].tensor[first : first + size]
            yield host, device[done : done + size]
            done += size

    def clear(self) -> None:
        """Give the memory back; no copy may be under way."""
        while self._chunks:
            self._chunks.pop().release()

    def _another(self) -> HostBuffer:
        buffer = self._device.host_buffer(self._chunk_bytes)
        if buffer.why_not_pinned:
            buffer.release()
            raise MachineFault(
                f"{buffer.why_not_pinned}, with {format_bytes(self.num_bytes)} pinned for block inputs so far; a copy to "
                "ordinary memory would stop every block. Close what else pins memory, lower data.resolution, data.window or train.batch, "
                "or keep block inputs on the device"
            )
        return buffer
