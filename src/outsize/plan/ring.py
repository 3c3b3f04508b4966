"""A pass over the blocks, up and down, with copies beside the arithmetic: placement/stream.py on paper.

The host runs ahead, so every use that has a slot is queued, and a copy waits for nothing but the link and the last reader of
the slot that it fills. A slot that must be given up is the one whose block is needed last. What comes from disk or ordinary
memory is fed into a small pinned ring by threads, some blocks ahead, and leaves it piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Blocks that fit into the ring of pinned memory: 512 MiB over blocks of a quarter of a gibibyte.
FED_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that follows others: seconds in all; busy seconds of the link to the device, and of what feeds it."""

    seconds: float
    bus_s: float
    feed_s: float


def ring_pass(
    up: Sequence[float],
    down: Sequence[float],
    copies: Sequence[float | None],
    feeds: Sequence[float],
    *,
    slots: int,
    returns: Sequence[float] = (),
) -> Pass:
    """Simulate passes until they repeat.

    By block: up, down: seconds of arithmetic; copies: of the link, None for a block that stays on the device; feeds: of
    bringing it to where the link reads; returns: of the link for its inputs that come back on the way down.
    """
    first, last = (_run(up, down, copies, feeds, slots, returns, passes) for passes in (2, 3))
    return Pass(last.now - first.now, last.bus_s - first.bus_s, last.feed_s - first.feed_s)


def _run(  # noqa: PLR0917 - one pass's description, given on
    up: Sequence[float],
    down: Sequence[float],
    copies: Sequence[float | None],
    feeds: Sequence[float],
    slots: int,
    returns: Sequence[float],
    passes: int,
) -> _State:
    count = len(up)
    order = [*range(count), *reversed(range(count))]
    seconds = [*up, *reversed(down)]
    uses = [block for _ in range(passes) for block in order]
    copied = [at for at, block in enumerate(uses) if copies[block] is not None]
    state = _State(_next_uses(uses), slots)
    done = issued = 0
    for at, block in enumerate(uses):
        while issued < min(len(copied), done + slots):
            coming = copied[issued]
            if uses[coming] not in state.ready:
                awaited = {uses[one] for one in copied[done:issued]}
                bus_s = copies[uses[coming]] or 0.0
                state.copy(uses[coming], bus_s, feeds[uses[coming]], awaited)
            state.needed[uses[coming]] = state.next_use[coming]
            issued += 1
        place = at % len(order)
        if returns and place >= count:
            state.bring_back(block, returns[block])
        is_copied = copies[block] is not None
        state.compute(block, seconds[place], waits=is_copied)
        done += is_copied
    return state


@dataclass
class _State:
    """Where the simulation stands. Times: now, of arithmetic; bus_free, feed_free: when the link and its feeder are."""

    next_use: list[int]
    slots: int
    now: float = 0.0
    bus_free: float = 0.0
    feed_free: float = 0.0
    bus_s: float = 0.0
    feed_s: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)  # of each block's last use
    ready: dict[int, float] = field(default_factory=dict)  # of each block in a slot
    needed: dict[int, int] = field(default_factory=dict)  # position of its next use
    fed: list[float] = field(default_factory=list)  # when each fed copy was done

    def copy(self, block: int, bus_s: float, feed_s: float, awaited: set[int]) -> None:
        """Bring a block into a slot."""
        slot_free = 0.0
        if len(self.ready) == self.slots:
            given_up = max(
                (one for one in self.ready if one not in awaited), key=lambda one: self.needed[one]
            )
            del self.ready[given_up]
            slot_free = self.ends.get(given_up, 0.0)
        self.bus_free = max(self.bus_free, slot_free) + bus_s
        self.bus_s += bus_s
        self.ready[block] = self.bus_free
        if feed_s:
            ring_free = self.fed[-FED_AHEAD] if len(self.fed) >= FED_AHEAD else 0.0
            self.feed_free = max(self.feed_free, ring_free) + feed_s
            self.feed_s += feed_s
            self.ready[block] = max(self.bus_free, self.feed_free)
            self.fed.append(self.ready[block])

    def bring_back(self, block: int, bus_s: float) -> None:
        """Inputs of a block, ahead of their use, on the link that blocks come by."""
        self.bus_free += bus_s
        self.bus_s += bus_s
        self.ends.setdefault(block, 0.0)

    def compute(self, block: int, seconds: float, *, waits: bool) -> None:
        """Run a block, after its copy."""
        begin = max(self.now, self.ready[block]) if waits else self.now
        self.now = self.ends[block] = begin + seconds


def _next_uses(uses: list[int]) -> list[int]:
    """For each use, the position of the same block's next one; beyond the end where there is none."""
    coming: dict[int, int] = {}
    found = [0] * len(uses)
    for at in range(len(uses) - 1, -1, -1):
        found[at] = coming.get(uses[at], len(uses) + uses[at])
        coming[uses[at]] = at
    return found
