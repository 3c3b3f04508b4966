"""In which slot each coming use of a block finds it, and whether it must be copied there first.

Uses repeat in one order. A slot that must be given up is the one whose block is needed last, which makes the fewest
copies (Belady). Nothing here depends on time: the whole future can be asked for, so whoever needs a head start has it.
Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """The number-th use: of which block, in which slot. is_copy: the slot must be filled for it."""

    number: int
    block: int
    slot: int
    is_copy: bool


class Schedule:
    """Uses 0, 1, 2, ... of an order that repeats.

    Use n finds its slot free once use n - num_slots is over: the uses between keep their slots.
    """

    def __init__(self, uses: Sequence[int], holds: Sequence[int | None]) -> None:
        """uses: blocks in order. holds: the block that each slot already holds."""
        self._uses = list(uses)
        self._holds = list(holds)
        self._positions: dict[int, list[int]] = {}
        for position, block in enumerate(self._uses):
            self._positions.setdefault(block, []).append(position)
        self._planned: list[Use] = []
        self._first = 0  # number of the first use that is remembered

    def __len__(self) -> int:
        """Uses of one period."""
        return len(self._uses)

    def __getitem__(self, number: int) -> Use:
        """A use that was not forgotten."""
        while number >= self._first + len(self._planned):
            self._plan_next()
        return self._planned[number - self._first]

    def forget(self, before: int) -> None:
        """Drop uses below a number, which must be planned."""
        awaited = before - len(
            self._holds
        )  # what is planned next looks at as many uses as there are slots
        if awaited > self._first + len(self._uses):  # not one by one: a list is cut from the front
            del self._planned[: awaited - self._first]
            self._first = awaited

    def _plan_next(self) -> None:
        number = self._first + len(self._planned)
        block = self._uses[number % len(self._uses)]
        is_copy = block not in self._holds
        if is_copy:
            self._holds[self._slot_to_give_up(number)] = block
        self._planned.append(Use(number, block, self._holds.index(block), is_copy))

    def _slot_to_give_up(self, number: int) -> int:
        """An empty slot, or the one, not awaiting a use, whose block is needed last."""
        awaiting = self._planned[-(len(self._holds) - 1) :] if len(self._holds) > 1 else []
        awaited = {use.slot for use in awaiting}
        free = [slot for slot in range(len(self._holds)) if slot not in awaited]
        return max(free, key=lambda slot: self._distance(self._holds[slot], number))

    def _distance(self, block: int | None, number: int) -> float:
        """Uses between a number and the block's next one."""
        positions = [] if block is None else self._positions.get(block, [])
        period = len(self._uses)
        return min(((position - number) % period for position in positions), default=float("inf"))
