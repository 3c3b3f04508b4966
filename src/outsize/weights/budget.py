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
from pathlib import Path
from typing import Self

from outsize.base.errors import DoesNotFit
from outsize.base.parts import Part
from outsize.base.table import TensorSpec
from outsize.base.units import format_bytes

# Reading in larger windows gains nothing measurable, and a smaller slab leaves room for large tensors.
MAX_SLAB_BYTES = 64 * 2**20
# Of a budget, for what is neither slab nor parts: temporaries of an encoder's chunk, threads, allocator slack.
OVERHEAD_BYTES = 64 * 2**20

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


def slab_rows(row_bytes: int, budget_bytes: int) -> int:
    """Rows of row_bytes that fit into the budget; 0 when not even one does."""
    return budget_bytes // max(row_bytes, 1)


def is_stored_as_itself(shape: tuple[int, ...], parts: Sequence[Part]) -> bool:
    """Whether a tensor is stored as one tensor of its own shape: then rows are written as they are encoded."""
    return len(parts) == 1 and parts[0].name == "" and parts[0].shape == shape


def smallest_budget(specs: Iterable[TensorSpec], parts: Mapping[str, Sequence[Part]]) -> int:
    """The least host memory, in bytes above what the process holds, in which these tensors can be prepared.

    Known from the table alone: a source's elements are counted at four bytes, the most they take in practice.
    """
    specs = tuple(specs)
    row_bytes = max((4 * spec.num_elements // (spec.shape or (1,))[0] for spec in specs), default=0)
    return OVERHEAD_BYTES + _held_bytes(specs, parts)[0] + 2 * row_bytes


def slab_bytes(
    specs: Iterable[TensorSpec],
    parts: Mapping[str, Sequence[Part]],
    *,
    row_bytes: int,
    budget_bytes: int,
) -> int:
    """Bytes of the slab into which rows are read: half of what the budget leaves, the rest being for copies of them.

    row_bytes: of the longest row in the source.
    Raises: DoesNotFit naming the smallest budget.
    """
    specs = tuple(specs)
    held_bytes, culprit = _held_bytes(specs, parts)
    left_bytes = (budget_bytes - OVERHEAD_BYTES - held_bytes) // 2
    if left_bytes < row_bytes:
        smallest = smallest_budget(specs, parts)
        share = (
            f", {format_bytes(held_bytes)} of it for the encoded parts of {culprit}"
            if culprit
            else ""
        )
        raise DoesNotFit(
            f"preparing needs {format_bytes(smallest)} of host memory{share}; the budget is "
            f"{format_bytes(budget_bytes)}. Smallest change that fits: `--ram {-(-smallest // 2**20)}MiB`"
        )
    return max(1, min(MAX_SLAB_BYTES, left_bytes))


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
