"""Blocks travel into a ring of device slots ahead of their use, from pinned memory, ordinary memory or disk.

The order of uses is known: up the blocks, and down again when training. Copies are queued as many uses ahead as there
are slots, across the turn (the last blocks are still in their slots when the way down begins) and across the step
boundary (the first block is still there when the next step begins). From pinned memory the computing thread queues them
itself; what lies elsewhere passes through a small pinned ring that threads fill, further ahead still. Nothing is
allocated after the start, and the host waits only for a disk or a memory that is slower than the computation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outsize.base.tiers import Tier
from outsize.devices._host import HostBuffer
from outsize.placement._copier import make_copier
from outsize.placement._feeder import Feeder
from outsize.placement._schedule import Schedule
from outsize.placement._slab import HostSlab
from outsize.placement._staging import staging_pieces
from outsize.placement.protocol import PlacementSettings, Sweep

_ONLY_TIER: Tier = "pinned"  # of a placement that is told of none
_NO_ROOM_TO_STAGE = "given up for the ring through which unpinned blocks pass"


class Stream:
    """A ring of slots over packets anywhere, beside blocks that stay. Without tiers every block is pinned."""

    def __init__(self, settings: PlacementSettings) -> None:
        self._settings = settings
        self._sizes = list(settings.sizes)
        stated = list(settings.tiers) or [_ONLY_TIER] * len(self._sizes)
        # a block without bytes has nothing to travel
        self._tiers: list[Tier] = [
            tier if size else "device" for tier, size in zip(stated, self._sizes, strict=True)
        ]
        self._order = [block for block, tier in enumerate(self._tiers) if tier != "device"]
        num_slots = min(max(settings.slots, 1), len(self._order))
        largest = max((self._sizes[block] for block in self._order), default=0)
        self._slots = [self._on_device(largest) for _ in range(num_slots)]
        self._kept = {block: self._on_device(self._sizes[block]) for block in self._in("device")}
        self._copier = make_copier(settings.device, num_slots)
        self._ring: HostBuffer | None = None
        self._feeder: Feeder | None = None
        self._staged: frozenset[int] = frozenset()
        self._segments: dict[int, list[Tensor]] = {}  # of pinned blocks
        staged = self._in("pageable", "disk")
        if staged:  # before the slab takes what may be pinned
            self._ring = settings.device.host_buffer(sum(self._pieces(staged)))
        self._pinned = self._slab("pinned")
        self._pageable = self._slab("pageable")
        self._is_settled = False
        self._holds: list[int | None] = [None] * num_slots
        self._sweep: Sweep | None = None
        self._schedule = Schedule([], self._holds)
        self._done = self._issued = self._ordered = 0
        self.num_copies = self.copied_bytes = 0

    # ------------------------------------------------------------ loading

    def targets(self, block: int) -> Sequence[Tensor]:
        """Where the block's bytes belong; nowhere when they stay on disk."""
        if block in self._kept:
            return [self._kept[block]]
        if self._tiers[block] == "disk":
            return []
        return self._slab_of(block).segments(block)

    def put(self, block: int, packet: Tensor) -> None:
        begin = 0
        for target in self.targets(block):
            target.copy_(packet[begin : begin + target.numel()])
            begin += target.numel()

    # ------------------------------------------------------------ running

    def begin(self, sweep: Sweep) -> None:
        self._settle()
        at_boundary = not len(self._schedule) or self._done % len(self._schedule) == 0
        if sweep != self._sweep or not at_boundary:
            self._restart(sweep)
        self._issue()

    def acquire(self, block: int) -> Tensor:
        if block in self._kept:
            return self._kept[block]
        use = self._schedule[self._done]
        assert block == use.block, f"block {block} was acquired, the schedule says {use.block}"
        if use.is_copy and block in self._staged:
            assert self._feeder is not None, "staged blocks have a feeder"
            self._feeder.wait(use.number)
        self._copier.wait_filled(use.slot)
        return self._slots[use.slot][: self._sizes[block]]

    def release(self, block: int) -> None:
        if block in self._kept:
            return
        self._copier.mark_read(self._schedule[self._done].slot)
        self._done += 1
        self._issue()

    # ------------------------------------------------------------ accounts

    def device_bytes(self) -> int:
        return sum(one.numel() for one in (*self._slots, *self._kept.values()))

    def host_bytes(self) -> int:
        ring = 0 if self._ring is None else self._ring.taken_bytes
        return self._pinned.num_bytes + self._pageable.num_bytes + ring

    def buffers(self) -> dict[str, Tensor]:
        """Slots, and the blocks that stay."""
        slots = {f"slot {slot}": one for slot, one in enumerate(self._slots)}
        return slots | {f"block {block}": one for block, one in self._kept.items()}

    def report(self) -> dict[str, Any]:
        """Where the blocks are held in fact, and what it took; waits until all memory is there."""
        self._settle()
        tiers = dict.fromkeys(("device", "pinned", "pageable", "disk"), 0)
        for block, size in enumerate(self._sizes):
            is_left_out = self._tiers[block] == "pinned" and block in self._staged
            tiers["pageable" if is_left_out else self._tiers[block]] += size
        ring = self._ring
        return {
            "tiers": tiers,
            "slots": len(self._slots),
            "slot_bytes": self._slots[0].numel() if self._slots else 0,
            "staging_bytes": 0 if ring is None else ring.taken_bytes,
            "not_pinned": self._pinned.why_not_pinned(),
            "staging_not_pinned": "" if ring is None else ring.why_not_pinned,
            "pinning_s": round(self._pinned.pinning_s, 3),
            "copies": self.num_copies,
            "copied_bytes": self.copied_bytes,
            "waited_s": 0.0 if self._feeder is None else round(self._feeder.waited_s, 3),
        }

    def close(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
        self._copier.finish()
        self._slots.clear()
        self._kept.clear()
        self._segments.clear()
        self._pinned.close()
        self._pageable.close()
        if self._ring is not None:
            self._ring.release()

    # ------------------------------------------------------------ the ring

    def _restart(self, sweep: Sweep) -> None:
        """Take another order; what the slots hold stays usable."""
        if self._feeder is not None:
            for slot in self._feeder.reset():
                self._holds[slot] = None
        self._sweep = sweep
        uses = self._order + (self._order[::-1] if sweep == "train" else [])
        self._schedule = Schedule(uses, self._holds)
        self._done = self._issued = self._ordered = 0

    def _issue(self) -> None:
        """Queue the copies of as many coming uses as there are slots, and order further ones from the feeder."""
        period = len(self._schedule)
        while period and self._issued < self._done + len(self._slots):
            use = self._schedule[self._issued]
            if use.is_copy:
                self._holds[use.slot] = (
                    None  # until its bytes are those of the block, whatever happens
                )
                if use.block not in self._staged:
                    self._copy(use.block, use.slot)
                self._holds[use.slot] = use.block
                self.num_copies += 1
                self.copied_bytes += self._sizes[use.block]
            self._issued += 1
        if self._feeder is not None:
            while self._ordered < self._done + period:
                use = self._schedule[self._ordered]
                if use.is_copy and use.block in self._staged:
                    self._feeder.add(use.number, use.block, use.slot, self._sizes[use.block])
                self._ordered += 1
            self._feeder.open_before(self._issued)
        self._schedule.forget(self._done)

    def _copy(self, block: int, slot: int) -> None:
        begin = 0
        for segment in self._segments[block]:
            target = self._slots[slot][begin : begin + segment.numel()]
            self._copier.copy(slot, target, segment, "straight")
            begin += segment.numel()
        self._copier.mark_filled(slot, "straight")

    # ------------------------------------------------------------ memory

    def _settle(self) -> None:
        """Learn what could be pinned, once the blocks are loaded, and stage the rest."""
        if self._is_settled:
            return
        self._is_settled = True
        staged = self._unpinned()
        if staged:
            pieces = self._pieces(staged)
            if self._ring is None or self._ring.tensor.numel() < sum(pieces):
                self._ring = self._make_ring(sum(pieces))
                staged = self._unpinned()
            ends = itertools.accumulate(pieces)
            buffers = [
                self._ring.tensor[end - size : end] for size, end in zip(pieces, ends, strict=True)
            ]
            self._feeder = Feeder(self._fill, self._copier, self._slots, buffers)
        self._staged = frozenset(staged)
        straight = [block for block in self._in("pinned") if block not in self._staged]
        self._segments = {block: self._pinned.segments(block) for block in straight}

    def _unpinned(self) -> list[int]:
        """The blocks that no copy can read where they are."""
        refused = (block for block in self._in("pinned") if not self._pinned.is_pinned(block))
        return [*refused, *self._in("pageable", "disk")]

    def _make_ring(self, num_bytes: int) -> HostBuffer:
        """The staging ring where the slab met a limit: pinned memory of the slab is given up for it."""
        if self._ring is not None:
            self._ring.release()
        ring = self._settings.device.host_buffer(num_bytes)
        while ring.why_not_pinned and self._pinned.unpin_last(_NO_ROOM_TO_STAGE):
            ring = self._settings.device.host_buffer(num_bytes)
        return ring

    def _fill(self, block: int, begin: int, into: Tensor) -> None:
        """Bytes of a staged block, in a thread of the feeder."""
        if self._tiers[block] == "disk":
            assert self._settings.read is not None, "blocks on disk need settings.read"
            self._settings.read(block, begin, into)
            return
        self._slab_of(block).read(block, begin, into)

    def _in(self, *tiers: Tier) -> list[int]:
        return [block for block, tier in enumerate(self._tiers) if tier in tiers]

    def _slab(self, tier: Tier) -> HostSlab:
        sizes = {block: self._sizes[block] for block in self._in(tier)}
        return HostSlab(self._settings.device, sizes, is_pinned=tier == "pinned")

    def _slab_of(self, block: int) -> HostSlab:
        return self._pinned if self._tiers[block] == "pinned" else self._pageable

    def _pieces(self, blocks: Sequence[int]) -> list[int]:
        return staging_pieces([self._sizes[block] for block in blocks])

    def _on_device(self, num_bytes: int) -> Tensor:
        device = self._settings.device.torch_device
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


plugin = Stream
