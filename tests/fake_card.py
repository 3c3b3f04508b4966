"""A card that is none: queues of work which run late, in a thread of their own, and wait for each other by marks alone.

What a real card may do, this one does on purpose: a queue named slow runs everything a while after it was queued, and only
when no other queue has anything to do. Released slots are filled with 0xFF, and get their bytes back only when the ring takes
a slot's block for its next use without a copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

POISON = 0xFF
COMPUTE = "compute"


@dataclass
class Mark:
    """An event: how often it was marked, and how many of these marks the card has passed."""

    marked: int = 0
    passed: int = 0


@dataclass
class _Work:
    act: Callable[[], None] | None
    mark: Mark
    count: int  # of the mark: what to wait for, or what to pass
    since: float = field(default_factory=time.perf_counter)


class Card:
    """The queues and the thread that runs them. faults: what work on the card found wrong."""

    def __init__(self, slow: str = "", pause_s: float = 0.001) -> None:
        self.faults: list[str] = []
        self._slow, self._pause_s = slow, pause_s
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Work]] = {
            name: deque()
            for name in sorted((COMPUTE, "straight", "staged"), key=lambda one: one == slow)
        }
        self._is_off = False
        self._thread = threading.Thread(target=self._run, name="card", daemon=True)
        self._thread.start()

    def run(self, queue: str, act: Callable[[], None]) -> None:
        self._queue(queue, _Work(act, Mark(), 0))

    def record(self, queue: str, mark: Mark) -> None:
        with self._changed:
            mark.marked += 1
            self._queue(queue, _Work(None, mark, -mark.marked))

    def wait(self, queue: str, mark: Mark) -> None:
        """What is queued from now on waits for the mark as it was last made."""
        self._queue(queue, _Work(None, mark, mark.marked))

    def host_waits(self, mark: Mark) -> None:
        with self._changed:
            wanted = mark.marked
            while mark.passed < wanted:
                self._changed.wait()

    def finish(self) -> None:
        with self._changed:
            while any(self._queues.values()):
                self._changed.wait()

    def off(self) -> None:
        self.finish()
        with self._changed:
            self._is_off = True
            self._changed.notify_all()
        self._thread.join()

    def _queue(self, queue: str, work: _Work) -> None:
        with self._changed:
            self._queues[queue].append(work)
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._is_off:
            with self._changed:
                found = self._next()
                if found is None:
                    self._changed.wait(self._pause_s / 2)
                    continue
            queue, work = found
            if work.act is not None:
                try:
                    work.act()
                except Exception as error:  # noqa: BLE001 - work on a slot that was never filled
                    self.faults.append(repr(error))
            with self._changed:
                if work.count < 0:
                    work.mark.passed = -work.count
                self._queues[queue].popleft()
                self._changed.notify_all()

    def _next(self) -> tuple[str, _Work] | None:
        now = time.perf_counter()
        for name, queue in self._queues.items():
            if not queue:
                continue
            work = queue[0]
            is_early = name == self._slow and now < work.since + self._pause_s
            if not is_early and work.mark.passed >= work.count:
                return name, work
        return None


class CardFence:
    """The end of what was queued on the staged queue."""

    def __init__(self, card: Card) -> None:
        self._card, self._mark = card, Mark()

    def mark(self) -> None:
        self._card.record("staged", self._mark)

    def wait(self) -> None:
        self._card.host_waits(self._mark)


class CardCopier:
    """What StreamCopier does with streams and events, on a Card."""

    def __init__(self, card: Card, num_slots: int) -> None:
        self.card = card
        self._filled = [Mark() for _ in range(num_slots)]
        self._read = [Mark() for _ in range(num_slots)]
        self._slots: dict[int, Tensor] = {}
        self._saved: dict[int, Tensor] = {}
        self._was_copied: set[int] = set()

    def copy(self, slot: int, target: Tensor, source: Tensor, lane: str) -> None:
        self._slots[slot] = torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage())
        self._was_copied.add(slot)
        self.wait_for_slot(slot, lane)
        self.card.run(lane, lambda: target.copy_(source))

    def wait_for_slot(self, slot: int, lane: str) -> None:
        self.card.wait(lane, self._read[slot])
        self.card.wait(lane, self._filled[slot])

    def mark_filled(self, slot: int, lane: str) -> None:
        self.card.record(lane, self._filled[slot])

    def wait_filled(self, slot: int) -> None:
        self.card.wait(COMPUTE, self._filled[slot])
        if slot not in self._was_copied:
            self.card.run(COMPUTE, lambda: self._slots[slot].copy_(self._saved[slot]))

    def mark_read(self, slot: int) -> None:
        self.card.run(COMPUTE, lambda: self._poison(slot))
        self.card.record(COMPUTE, self._read[slot])
        self._was_copied.discard(slot)

    def fence(self) -> CardFence:
        return CardFence(self.card)

    def finish(self) -> None:
        self.card.finish()

    def _poison(self, slot: int) -> None:
        self._saved[slot] = self._slots[slot].clone()
        self._slots[slot].fill_(POISON)
