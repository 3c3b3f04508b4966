"""Blocks that no copy can read where they are: threads bring them, piece by piece, into a small ring of pinned memory.

Jobs come in the order of use and far ahead of it. A thread takes the next piece, waits until the copy out of the ring's
oldest free buffer is done, fills the buffer from disk or from ordinary memory, and leaves it ready. A ready piece is sent
as soon as the computing thread has said that its slot is free: by that thread, or by the one that filled it, whichever
comes last. So reading goes on while slots are taken, as far as the ring is long.

Pieces are taken in the order of jobs and each holds a buffer from then on; the first job not sent is therefore never
short of one, and its slot is free when somebody waits for it: the ring cannot lock itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outsize.placement._copier import Copier

NUM_THREADS = 4  # as many reads in flight as a fast disk needs for its rate
_JOIN_S = 10.0  # a read that a dead disk never answers must not keep the process from ending

Fill = Callable[[int, int, Tensor], None]


@dataclass(slots=True, eq=False)
class Job:
    """Bring a block into a slot for a numbered use. unsent: bytes whose copy is not queued yet."""

    number: int
    block: int
    slot: int
    num_bytes: int
    unsent: int


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Bytes [begin, end) of a job, in a buffer of the ring."""

    job: Job
    begin: int
    end: int
    buffer: int


class Feeder:
    """The threads and the ring. All methods are for the one thread that computes.

    fill(block, begin, into): writes bytes of a block, from `begin` on, into host memory. buffers: equal in size.
    """

    def __init__(
        self, fill: Fill, copier: Copier, slots: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> None:
        self._fill, self._copier = fill, copier
        self._slots, self._buffers = list(slots), list(buffers)
        self._fences = [copier.fence() for _ in buffers]
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()  # not wholly taken yet
        self._taken = 0  # bytes of the first of them that are taken
        self._unsent: deque[Job] = deque()  # not wholly sent yet
        self._ready: list[_Piece] = []
        self._free = deque(range(len(buffers)))  # the longest free first
        self._sent: set[int] = set()  # numbers of uses that nobody has waited for yet
        self._opened = 0
        self._generation = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self.waited_s = 0.0
        self._threads = [
            threading.Thread(target=self._run, name=f"feeder-{number}", daemon=True)
            for number in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, number: int, block: int, slot: int, num_bytes: int) -> None:
        """Order a block; orders come in the order of use."""
        with self._changed:
            job = Job(number, block, slot, num_bytes, num_bytes)
            self._jobs.append(job)
            self._unsent.append(job)
            self._changed.notify_all()

    def open_before(self, number: int) -> None:
        """Say that the slots of all uses below a number are free: their last readers are queued and marked."""
        with self._changed:
            self._opened = number
            if self._error is None:
                self._send()

    def wait(self, number: int) -> None:
        """Wait until all copies of a use are queued.

        Raises: what a thread met when it read or copied.
        """
        with self._changed:
            if number not in self._sent:
                started = time.perf_counter()
                while number not in self._sent and self._error is None:
                    self._changed.wait()
                self.waited_s += time.perf_counter() - started
            if number not in self._sent and self._error is not None:
                raise self._error
            self._sent.discard(number)

    def reset(self) -> set[int]:
        """Forget all orders; gives the slots whose bytes are no block's any more.

        A thread that is filling a buffer goes on; what it brings is dropped.
        """
        with self._changed:
            self._generation += 1
            broken = {job.slot for job in self._unsent if job.number < self._opened}
            for job in self._unsent:
                if job.unsent < job.num_bytes:  # the slot's next copy must wait for what was sent
                    self._copier.mark_filled(job.slot, "staged")
            self._free.extend(piece.buffer for piece in self._ready)
            self._ready.clear()
            self._jobs.clear()
            self._unsent.clear()
            self._sent.clear()
            self._taken = self._opened = 0
            self._changed.notify_all()
            return broken

    def close(self) -> None:
        """End the threads; afterwards the ring is no longer written to, unless a read never came back."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            while (taken := self._take()) is not None:
                piece, generation = taken
                self._fences[piece.buffer].wait()
                size = piece.end - piece.begin
                self._fill(piece.job.block, piece.begin, self._buffers[piece.buffer][:size])
                self._give(piece, generation)
        except BaseException as error:  # noqa: BLE001 - whoever waits must learn of it, whatever it is
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> tuple[_Piece, int] | None:
        """The next piece with a buffer for it; None when there is nothing to do ever again."""
        with self._changed:
            while not (self._jobs and self._free):
                if self._is_closed or self._error is not None:
                    return None
                self._changed.wait()
            if self._is_closed or self._error is not None:
                return None
            job, buffer = self._jobs[0], self._free.popleft()
            begin, end = self._taken, min(self._taken + len(self._buffers[buffer]), job.num_bytes)
            self._taken = end
            if end == job.num_bytes:
                self._jobs.popleft()
                self._taken = 0
            return _Piece(job, begin, end, buffer), self._generation

    def _give(self, piece: _Piece, generation: int) -> None:
        with self._changed:
            if generation != self._generation:
                self._free.append(piece.buffer)
                self._changed.notify_all()
                return
            self._ready.append(piece)
            self._send()

    def _send(self) -> None:
        """Queue the copies of ready pieces whose slots are free; the lock is held."""
        for piece in [one for one in self._ready if one.job.number < self._opened]:
            job = piece.job
            self._ready.remove(piece)
            target = self._slots[job.slot][piece.begin : piece.end]
            self._copier.copy(
                job.slot, target, self._buffers[piece.buffer][: len(target)], "staged"
            )
            self._fences[piece.buffer].mark()
            self._free.append(piece.buffer)
            job.unsent -= len(target)
            if job.unsent == 0:
                self._copier.mark_filled(job.slot, "staged")
                self._unsent.remove(job)
                self._sent.add(job.number)
            self._changed.notify_all()
