"""A packet: the bytes of one block as they lie in the store's file and in the device's buffer.

The parts of linears come first: these are what streams while training (`streamed_bytes`). The small rest (norms,
biases) follows. Every entry begins at a multiple of 256 bytes, because a view of a buffer must be aligned for every
dtype and the kernels read in vectors; since safetensors allows no holes, the padding is made of named entries of its own.
Nothing here needs torch except `view`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outsize.base.parts import DTYPE_BYTES, Part, part_key
from outsize.base.table import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256  # bytes; what CUDA's allocator gives, and a multiple of every vector load


@dataclass(frozen=True, slots=True)
class Entry:
    """One part of one tensor at [offset, offset + num_bytes) of its packet."""

    tensor: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def key(self) -> str:
        """Its key in the store's file."""
        return part_key(self.tensor, self.part)

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class Packet:
    """All entries in the order of their offsets. num_bytes and streamed_bytes are multiples of 256."""

    entries: tuple[Entry, ...]
    num_bytes: int
    streamed_bytes: int

    @cached_property
    def _by_tensor(self) -> dict[str, dict[str, Entry]]:
        grouped: dict[str, dict[str, Entry]] = {}
        for entry in self.entries:
            grouped.setdefault(entry.tensor, {})[entry.part] = entry
        return grouped

    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors held, in the order of their offsets."""
        return tuple(self._by_tensor)

    def parts(self, tensor: str) -> dict[str, Entry]:
        """The entries of one tensor by part name.

        Raises: KeyError when the packet does not hold it.
        """
        return self._by_tensor[tensor]

    def pads(self) -> tuple[Entry, ...]:
        """U8 entries that fill the gaps between entries and after the last."""
        pads = []
        ends = [entry.end for entry in self.entries]
        nexts = [*(entry.offset for entry in self.entries[1:]), self.num_bytes]
        for number, (end, following) in enumerate(zip(ends, nexts, strict=False)):
            if following > end:
                size = following - end
                pads.append(Entry(f"__pad__.{number:04d}", "", "U8", (size,), end, size))
        return tuple(pads)

    def as_json(self) -> dict[str, Any]:
        """The packet as JSON values."""
        rows = [[e.tensor, e.part, e.dtype, list(e.shape), e.offset] for e in self.entries]
        return {
            "num_bytes": self.num_bytes,
            "streamed_bytes": self.streamed_bytes,
            "entries": rows,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Packet:
        """The packet that `as_json` wrote."""
        entries = [
            Entry(tensor, part, dtype, tuple(shape), offset, math.prod(shape) * DTYPE_BYTES[dtype])
            for tensor, part, dtype, shape, offset in value["entries"]
        ]
        return Packet(tuple(entries), value["num_bytes"], value["streamed_bytes"])


def aligned(count: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is not below count."""
    return -(-count // alignment) * alignment


def plan_packet(specs: Iterable[TensorSpec], parts: Mapping[str, Sequence[Part]]) -> Packet:
    """Lay out the parts of one block's tensors (or of those outside all blocks).

    parts: for each tensor name, what its format stores of it. Linears keep the order of `specs`, and so does the rest.
    """
    specs = tuple(specs)
    entries: list[Entry] = []
    position = 0
    streamed_bytes = 0
    for is_linear in (True, False):
        for spec in specs:
            if spec.is_linear != is_linear:
                continue
            for part in parts[spec.name]:
                entry = Entry(
                    spec.name, part.name, part.dtype, part.shape, position, part.num_bytes
                )
                entries.append(entry)
                position = aligned(entry.end)
        if is_linear:
            streamed_bytes = position
    return Packet(tuple(entries), position, streamed_bytes)


def view(entry: Entry, buffer_u8: Tensor) -> Tensor:
    """The entry as a tensor of its dtype and shape that shares memory with the packet's buffer (uint8, any device)."""
    from outsize.weights.dtypes import torch_dtype

    raw = buffer_u8[entry.offset : entry.end]
    return raw.view(torch_dtype(entry.dtype)).view(entry.shape)
