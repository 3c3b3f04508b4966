"""Packets in host memory, back to back in large pieces, which are pinned by several threads at once.

Pieces are powers of two except the last, since a pinned allocator may round each up to one; a packet may therefore lie
in two of them. A piece that the system refuses to pin, and all that come after it, are ordinary memory: their packets
must be staged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from outsize.devices._host import HostBuffer, pageable
from outsize.devices.protocol import Device

CHUNK_BYTES = 1 << 30
SMALLEST_CHUNK_BYTES = 16 << 20  # what rounding up the last piece may cost at most
_MAX_THREADS = 8


def chunk_sizes(num_bytes: int) -> list[int]:
    """Pieces that hold num_bytes: as many of the largest as are full, then ever smaller powers of two, then the rest."""
    sizes = [CHUNK_BYTES] * (num_bytes // CHUNK_BYTES)
    rest, size = num_bytes % CHUNK_BYTES, CHUNK_BYTES // 2
    while size >= SMALLEST_CHUNK_BYTES:
        if rest >= size:
            sizes.append(size)
            rest -= size
        size //= 2
    return [*sizes, rest] if rest else sizes


class HostSlab:
    """Packets by block. The memory is made in the background; `segments` waits for what it gives."""

    def __init__(self, device: Device, sizes: Mapping[int, int], *, is_pinned: bool) -> None:
        self._device, self._asks_pinned = device, is_pinned
        self._begins: dict[int, int] = {}
        self._sizes = dict(sizes)
        end = 0
        for block, size in sizes.items():
            self._begins[block] = end
            end += size
        self._why = ""
        self._lock = threading.Lock()
        self._started = time.perf_counter()
        self.pinning_s = 0.0  # from the start until the last piece was there
        self._chunk_sizes = chunk_sizes(end)
        num_threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, len(self._chunk_sizes)))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="host-memory")
        self._chunks = [self._pool.submit(self._make, size) for size in self._chunk_sizes]

    def segments(self, block: int) -> list[Tensor]:
        """The block's place: uint8 tensors that make up its packet, in order."""
        found = []
        begin, end, position = self._begins[block], self._begins[block] + self._sizes[block], 0
        for number, size in enumerate(self._chunk_sizes):
            low, high = max(begin - position, 0), min(end - position, size)
            if low < high:
                found.append(self._chunks[number].result().tensor[low:high])
            position += size
        return found

    def read(self, block: int, begin: int, into: Tensor) -> None:
        """Copy bytes of a block, from `begin` on, into host memory, in the calling thread alone."""
        done = 0
        for segment in self.segments(block):
            skipped = min(begin, segment.numel())
            begin -= skipped
            part = segment[skipped : skipped + into.numel() - done]
            into[done : done + part.numel()].numpy()[:] = part.numpy()
            done += part.numel()

    def is_pinned(self, block: int) -> bool:
        """Whether every byte of the block can be copied without being staged."""
        begin, end, position = self._begins[block], self._begins[block] + self._sizes[block], 0
        for number, size in enumerate(self._chunk_sizes):
            is_touched = position < end and begin < position + size
            if is_touched and self._chunks[number].result().why_not_pinned:
                return False
            position += size
        return self._asks_pinned

    def why_not_pinned(self) -> str:
        """What the system said when it refused; "" when it did not, or was not asked."""
        for chunk in self._chunks:
            chunk.result()
        return self._why

    def unpin_last(self, why: str) -> bool:
        """Give up the pinning of one piece; False when none is pinned. No copy may be under way."""
        for chunk in reversed(self._chunks):
            if self._asks_pinned and not chunk.result().why_not_pinned:
                chunk.result().unpin(why)
                self._why = self._why or why
                return True
        return False

    @property
    def num_bytes(self) -> int:
        """What the pieces take of the host's memory."""
        return sum(chunk.result().taken_bytes for chunk in self._chunks)

    def close(self) -> None:
        """Give the memory back; no copy may be under way."""
        self._pool.shutdown(cancel_futures=True)
        for chunk in self._chunks:
            if not chunk.cancelled() and chunk.exception() is None:
                chunk.result().release()
        self._chunks.clear()
        self._chunk_sizes.clear()

    def _make(self, size: int) -> HostBuffer:
        if not self._asks_pinned:
            made = HostBuffer(pageable(size), size, "not asked for")
        elif self._why:  # a limit was met; asking again for every piece is slow
            made = HostBuffer(pageable(size), size, self._why)
        else:
            made = self._device.host_buffer(size)
        with self._lock:
            if self._asks_pinned:
                self._why = self._why or made.why_not_pinned
            self.pinning_s = time.perf_counter() - self._started
        return made
