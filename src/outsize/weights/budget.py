"""Host memory: what this process holds privately, the peak of it, and what preparing fits into a budget.

Private bytes are those no file backs: they cannot be dropped and read again, so they are what a machine runs out of.
Where they are read: Linux RssAnon of /proc/self/status; Windows the private (committed) bytes of the process; macOS and
others the unique set size psutil gives, which counts clean private file pages as well.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from outsize.base.errors import DoesNotFit
from outsize.base.parts import Part
from outsize.base.table import TensorSpec
from outsize.base.units import format_bytes
from outsize.weights.pieces import PIECE_BYTES

# Reading in larger windows gains nothing measurable, and smaller slabs leave room for more of them.
MAX_SLAB_BYTES = 32 * 2**20
# Of a budget, for what is neither slab nor parts: temporaries of an encoder's chunk, threads, allocator slack.
OVERHEAD_BYTES = 64 * 2**20

# Device memory that preparing may take in all, and what of it goes to the temporaries of one encoded chunk.
DEVICE_BYTES = 4 * 2**30
DEVICE_OVERHEAD_BYTES = 2**30

_STATUS = Path("/proc/self/status")


def private_bytes() -> int:
    """Bytes of memory that belong to this process alone and lie in RAM now."""
    if sys.platform.startswith("linux"):
        for line in _STATUS.read_bytes().splitlines():
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024  # the kernel writes kB and means KiB
    import psutil

    process = psutil.Process()
    if os.name == "nt":
        return process.memory_info().vms  # there psutil gives the private bytes under this name
    return int(process.memory_full_info().uss)


class MemoryWatch:
    """Samples private bytes in a thread while a `with` block runs, and keeps the highest.

    A peak shorter than the interval can be missed; buffers that matter live for seconds.
    """

    def __init__(self, interval_s: float = 0.02) -> None:
        self.baseline_bytes = 0
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-watch", daemon=True)

    @property
    def growth_bytes(self) -> int:
        """Peak above what the process held when the watch began."""
        return self.peak_bytes - self.baseline_bytes

    def __enter__(self) -> Self:
        self.baseline_bytes = self.peak_bytes = private_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._note()

    def _sample(self) -> None:
        while not self._done.wait(self._interval_s):
            self._note()

    def _note(self) -> None:
        self.peak_bytes = max(self.peak_bytes, private_bytes())


def is_stored_as_itself(shape: tuple[int, ...], parts: Sequence[Part]) -> bool:
    """Whether a tensor is stored as one tensor of its own shape: then rows are written as they are encoded."""
    return len(parts) == 1 and parts[0].name == "" and parts[0].shape == shape


def smallest_budget(specs: Iterable[TensorSpec], parts: Mapping[str, Sequence[Part]]) -> int:
    """The least host memory, in bytes above what the process holds, in which these tensors can be prepared.

    Known from the table alone: a source's elements are counted at four bytes, the most they take in practice.
    """
    specs = tuple(specs)
    row_bytes = max((4 * spec.num_elements // (spec.shape or (1,))[0] for spec in specs), default=0)
    return OVERHEAD_BYTES + _held_bytes(specs, parts)[0] + 2 * _least_slab_bytes(row_bytes)


@dataclass(frozen=True, slots=True)
class Shares:
    """How a budget is shared out: slabs into which rows are read, and what may wait to be written."""

    num_slabs: int
    slab_bytes: int
    queue_bytes: int


def share_out(
    specs: Iterable[TensorSpec],
    parts: Mapping[str, Sequence[Part]],
    *,
    row_bytes: int,
    budget_bytes: int,
    max_slabs: int,
    device_bytes: int | None = None,
) -> Shares:
    """Share out what a budget leaves: half for slabs, half for what was encoded and waits to be written.

    row_bytes: of the longest row in the source. device_bytes: the same on a card, which then holds both as well.
    Raises: DoesNotFit naming the smallest budget.
    """
    specs = tuple(specs)
    held_bytes, culprit = _held_bytes(specs, parts)
    least_bytes = _least_slab_bytes(row_bytes)
    left_bytes = budget_bytes - OVERHEAD_BYTES - held_bytes
    share = (
        f", {format_bytes(held_bytes)} of it for the encoded parts of {culprit}" if culprit else ""
    )
    if left_bytes < 2 * least_bytes:
        smallest = smallest_budget(specs, parts)
        raise DoesNotFit(
            f"preparing needs {format_bytes(smallest)} of host memory{share}; the budget is "
            f"{format_bytes(budget_bytes)}. Smallest change that fits: `--ram {-(-smallest // 2**20)}MiB`"
        )
    if device_bytes is not None:
        left_bytes = min(left_bytes, device_bytes - DEVICE_OVERHEAD_BYTES - held_bytes)
        if left_bytes < 2 * least_bytes:
            needed = DEVICE_OVERHEAD_BYTES + held_bytes + 2 * least_bytes
            raise DoesNotFit(
                f"preparing on the card needs {format_bytes(needed)}{share}, and takes {format_bytes(device_bytes)} at "
                "most; prepare with `--device cpu`"
            )
    slab_bytes = max(least_bytes, min(MAX_SLAB_BYTES, left_bytes // 8))
    num_slabs = max(1, min(max_slabs, left_bytes // 2 // slab_bytes))
    return Shares(num_slabs, slab_bytes, left_bytes - num_slabs * slab_bytes)


def _least_slab_bytes(row_bytes: int) -> int:
    """The smallest slab: one piece of the source's identity, which is one row at least."""
    return max(row_bytes, PIECE_BYTES)


def _held_bytes(
    specs: Iterable[TensorSpec], parts: Mapping[str, Sequence[Part]]
) -> tuple[int, str]:
    """The most that is held until a tensor's last row is encoded (its parts, and a copy on completion); which one."""
    held = [
        (2 * sum(part.num_bytes for part in parts[spec.name]), spec.name)
        for spec in specs
        if not is_stored_as_itself(spec.shape, parts[spec.name])
    ]
    return max(held, default=(0, ""))


def trim_heap() -> None:
    """Give freed memory back to the system where the C library keeps it (glibc); nothing to do elsewhere.

    glibc raises its own threshold for returning memory each time a large allocation is freed, so a loop over tensors of
    many sizes creeps to a multiple of what it uses (measured: 2.5 GB for 1.65 GB).
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from musl
        if trim is not None:
            trim(0)
