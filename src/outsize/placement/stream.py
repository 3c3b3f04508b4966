"""Blocks travel from host memory into a ring of device slots, ahead of their use.

The order of uses is known: up the blocks, and down again when training. Copies are issued as many uses ahead as there
are slots, across the turn (the last blocks are still in their slots when the way down begins) and across the step
boundary (the first block is still there when the next step begins). Nothing is allocated after the start. A slot that
must be given up is the one whose block is needed last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.placement._copier import HostSlab, make_copier
from outsize.placement.protocol import PlacementSettings, Sweep


class Stream:
    """A ring of slots over packets in host memory, beside blocks that stay."""

    def __init__(self, settings: PlacementSettings) -> None:
        self._sizes = list(settings.sizes)
        self._resident = frozenset(settings.blocks_in("device"))
        self._order = [block for block in range(len(self._sizes)) if block not in self._resident]
        num_slots = min(max(settings.slots, 1), len(self._order)) if self._order else 0
        self._device = settings.device.torch_device
        self._copier = make_copier(settings.device, num_slots)
        self._slab = HostSlab(self._copier, {block: self._sizes[block] for block in self._order})
        largest = max((self._sizes[block] for block in self._order), default=0)
        self._slots = [
            torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(num_slots)
        ]
        self._kept: dict[int, Tensor] = {}
        self._owner: list[int | None] = [None] * num_slots
        self.num_copies = 0
        self._sweep: Sweep | None = None
        self._reset([])

    def put(self, block: int, packet: Tensor) -> None:
        if block in self._resident:
            self._kept[block] = packet.to(self._device, copy=True)
        else:
            self._slab[block].copy_(packet)

    def begin(self, sweep: Sweep) -> None:
        at_boundary = not self._uses or self._done % len(self._uses) == 0
        if sweep != self._sweep or not at_boundary:
            self._sweep = sweep
            self._reset(self._order + (self._order[::-1] if sweep == "train" else []))
        self._issue()

    def acquire(self, block: int) -> Tensor:
        if block in self._resident:
            return self._kept[block]
        expected = self._uses[self._done % len(self._uses)]
        assert block == expected, f"block {block} was acquired, the schedule says {expected}"
        slot = self._slot_of[self._done]
        self._copier.wait_filled(slot)
        return self._slots[slot][: self._sizes[block]]

    def release(self, block: int) -> None:
        if block in self._resident:
            return
        self._copier.mark_read(self._slot_of.pop(self._done))
        self._done += 1
        self._issue()

    def device_bytes(self) -> int:
        slots = sum(one.numel() for one in self._slots)
        return slots + sum(one.numel() for one in self._kept.values())

    def host_bytes(self) -> int:
        return self._slab.num_bytes

    def close(self) -> None:
        self._slots.clear()
        self._kept.clear()
        self._slab.clear()

    def _reset(self, uses: list[int]) -> None:
        """Start a new order; what the slots hold stays usable."""
        self._uses = uses
        self._positions: dict[int, list[int]] = {}
        for position, block in enumerate(uses):
            self._positions.setdefault(block, []).append(position)
        self._done = self._issued = 0
        self._slot_of: dict[int, int] = {}

    def _issue(self) -> None:
        """Issue copies for as many coming uses as there are slots."""
        while self._uses and self._issued < self._done + len(self._slots):
            block = self._uses[self._issued % len(self._uses)]
            if block not in self._owner:
                slot = self._slot_to_give_up()
                self._copier.copy(slot, self._slots[slot][: self._sizes[block]], self._slab[block])
                self._owner[slot] = block
                self.num_copies += 1
            self._slot_of[self._issued] = self._owner.index(block)
            self._issued += 1

    def _slot_to_give_up(self) -> int:
        """An empty slot, or the one, not awaiting a use, whose block is needed last."""
        awaited = set(self._slot_of.values())
        free = [slot for slot in range(len(self._slots)) if slot not in awaited]
        return max(free, key=lambda slot: self._distance(self._owner[slot]))

    def _distance(self, block: int | None) -> float:
        """Uses between the next one to issue and the block's next one."""
        if block is None:
            return float("inf")
        period = len(self._uses)
        here = self._issued % period
        return min((position - here) % period for position in self._positions[block])


plugin = Stream
