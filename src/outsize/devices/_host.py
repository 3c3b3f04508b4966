"""Host memory in large pieces, as copies to a card want it.

First touch is what a large buffer costs: the system zeroes every page. Huge pages make it cheap where the system has
them, several threads share it, and memory that is touched already is pinned in a fraction of the time that allocating
pinned memory takes. So memory is mapped, touched and registered, in this order; torch's own pinned allocator, which
rounds up to powers of two, is the second choice.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

PAGE_BYTES = 4096  # a page, and a multiple of every disk's sector: direct reads need both
# Touched at a time: few enough elements that torch keeps the work in the calling thread (its grain is 32,768).
_TOUCH_BYTES = 64 << 20


def _nothing() -> None:
    """There is nothing to undo."""


@dataclass(slots=True)
class HostBuffer:
    """One piece of host memory. tensor: uint8 (n,), beginning at a page.

    taken_bytes: what it takes of the host's memory. why_not_pinned: "" where copies run without the processor's help.
    """

    tensor: Tensor
    taken_bytes: int
    why_not_pinned: str = ""
    undo: Callable[[], None] = field(default=_nothing)

    def unpin(self, why: str) -> None:
        """Make it ordinary memory that can be paged out, its bytes kept; no copy from it may be under way."""
        if (
            self.undo is _nothing and not self.why_not_pinned
        ):  # the pinned allocator's own: cannot be turned
            self.tensor = pageable(self.tensor.numel()).copy_(self.tensor)
            self.taken_bytes = self.tensor.numel()
        self.undo()
        self.undo, self.why_not_pinned = _nothing, why

    def release(self) -> None:
        """Give the memory back; views of it keep it mapped, but no longer pinned."""
        self.undo()
        self.undo = _nothing
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.taken_bytes = 0


def pageable(num_bytes: int) -> Tensor:
    """Ordinary memory, uint8 (n,), beginning at a page; its pages come into being as they are written."""
    if num_bytes and hasattr(mmap, "MAP_ANONYMOUS"):
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Pinned pages would be copied for a forked process, which has no use for them. A kernel may lack either; only
        # speed is lost.
        for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, name):
                with contextlib.suppress(OSError):
                    region.madvise(getattr(mmap, name))
        return torch.frombuffer(region, dtype=torch.uint8)
    whole = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE_BYTES
    return whole[begin : begin + num_bytes]


def touch_(host_u8: Tensor) -> None:
    """Write one byte of every page, so that all exist; Python stays free for other threads."""
    for begin in range(0, host_u8.numel(), _TOUCH_BYTES):
        host_u8[begin : begin + _TOUCH_BYTES : PAGE_BYTES].zero_()
