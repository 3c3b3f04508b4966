"""Block inputs in host memory between a block's forward and its backward.

Going up, the large inputs of a block are copied out beside the computation; going down they come back in reverse order
into a few slots, each copy ahead of its use. Only bytes move, so bits, strides and shared storage are as they were.

When device memory is free again. An input of block i is held by three: by the caller until it has its result (the
variable is assigned anew), by this keeper, and by whatever an operation between blocks saved for its own backward (in
Flux nothing: concatenation, slicing and addition save no tensors). BlockCall's graph holds none: only what `keep` hands
back. The keeper lets go as block i + 2 is kept, after it has queued a wait for the copy on the computing stream. Nobody
can be given that memory earlier, since one holder is left; whoever is given it later, on that stream, works after the
copy. So neither `record_stream` nor a wait on the host is needed, and at most two blocks' inputs are held on the way up.

What stays on the device: small tensors; parameters; and what a block shares with one of the two before it or with any
that was found shared (rotary tables, masks, text that is only read): it lives on anyway. A block's copy is therefore asked
for as the next block is kept, when that is known; its bytes were ready when the block began, so nothing is lost. The last
two blocks' inputs are still on the device when the way down begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize.devices._copies import Copies, make_copies
from outsize.layers._spans import HostMemory, Kept, may_travel, span_of, storage_of

if TYPE_CHECKING:
    from outsize.devices.protocol import Device
    from outsize.layers.inputs import Saved

MIN_BYTES = 1 << 20  # what is smaller costs more to move than it frees
CHUNK_BYTES = 1 << 27  # a power of two: torch's pinned allocator, a second choice, rounds up to one


class OffloadedInputs:
    """Keeps inputs in (pinned) host memory; see the module.

    num_slots: device buffers for the way down, each as large as the most that one block sent. min_bytes: spans below stay.
    copies: replaces the device's own kind of copies, on num_slots + 1 tracks.

    Memory, for n blocks that send b bytes each: on the host n * b - b, in whole chunks; on the device num_slots * b and, on
    the way up and where it turns, 2 * b, instead of n * b.
    Raises: MachineFault, from `keep`, when the system refuses to pin what is needed.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_slots: int = 2,
        min_bytes: int = MIN_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        copies: Copies | None = None,
    ) -> None:
        self._device = device.torch_device
        self._num_slots, self._min_bytes = max(num_slots, 2), min_bytes
        self._out = self._num_slots  # the track out of the device; those below are the slots'
        self._copies = make_copies(device, self._num_slots + 1) if copies is None else copies
        self._host = HostMemory(device, chunk_bytes)
        self._slots: list[Tensor] = []
        self._owners: list[Kept | None] = []
        self._kept: list[Kept] = []  # of all blocks whose backward has not come, in order
        self._recent: list[Kept] = []  # those of them whose spans are held on the device still
        self._shared: dict[int, Tensor] = {}  # by storage; held, so that the name stays theirs
        self._sent_bytes = 0  # where the next block's bytes go

    def begin(self) -> None:
        if self._recent:
            self._copies.wait(self._out)
        for slot, owner in enumerate(self._owners):
            if owner is not None:  # its reader may be queued
                self._free(slot)
        self._forget()
        self._kept.clear()
        self._recent.clear()

    def keep(self, block: int, tensors: tuple[Tensor, ...]) -> tuple[Saved, Kept]:
        groups: dict[int, list[int]] = {}
        for place, one in enumerate(tensors):
            if may_travel(one, self._device.type):
                groups.setdefault(storage_of(one), []).append(place)
        self._note_shared(groups)
        self._move_on()
        groups = {
            storage: places
            for storage, places in groups.items()
            if storage not in self._shared
            and span_of([tensors[place] for place in places], 0).num_bytes >= self._min_bytes
        }
        going = [place for places in groups.values() for place in places]
        # without their graph, which would keep the blocks before alive; the version counter stays common
        held = {place: tensors[place].detach() for place in going}
        versions = {place: one._version for place, one in held.items()}  # noqa: SLF001
        kept = Kept(block, held, versions, groups)
        self._copies.open_(self._out)  # what is queued so far made these inputs
        self._kept.append(kept)
        self._recent.append(kept)
        return tuple(None if i in held else one for i, one in enumerate(tensors)), kept

    def take(self, handle: Kept, saved: Saved) -> tuple[Tensor, ...]:
        if handle not in self._kept:
            raise RuntimeError(
                f"the inputs of block {handle.block} are gone: they are kept for one backward, within one step"
            )
        handle.is_taken = True
        found = dict(handle.held)
        if handle.is_away:
            if handle.slot is None:
                self._fetch(handle, self._slot_to_give_up())
            assert handle.slot is not None
            self._copies.wait(handle.slot)
            slot = self._slots[handle.slot]
            found |= {place: handle.views[place].of(slot) for place in handle.travelling}
        handle.check_unchanged()
        self._fetch_ahead(self._kept.index(handle))
        places = (found.get(place, one) for place, one in enumerate(saved))
        return tuple(one for one in places if one is not None)

    def release(self, handle: Kept) -> None:
        if handle.slot is not None:
            self._free(handle.slot)
        if handle in self._recent:
            self._let_go(handle)
        place = self._kept.index(handle)
        del self._kept[place]
        handle.held.clear()
        if self._kept:
            self._fetch_ahead(place)
        else:
            self._forget()

    def device_bytes(self) -> int:
        return sum(one.numel() for one in self._slots)

    def host_bytes(self) -> int:
        return self._host.num_bytes

    def close(self) -> None:
        self.begin()
        self._drop_slots()
        self._copies.finish()
        self._host.clear()

    def _note_shared(self, storages: Iterable[int]) -> None:
        """Leave on the device what a coming block shares with a recent one."""
        for storage in storages:
            for kept in self._recent:
                shared = kept.keep_here(storage)
                if shared is not None:
                    self._shared[storage] = shared

    def _move_on(self) -> None:
        """Let go of the block before the last one, whose copy was asked for; ask for the last one's."""
        for kept in list(self._recent):
            if kept.host_start is not None:
                self._let_go(kept)
        for kept in self._recent:
            self._send(kept)

    def _send(self, kept: Kept) -> None:
        """Queue the copy of a block's bytes to the host."""
        num_bytes = kept.pack()
        self._fit_slots(num_bytes)
        pairs: list[tuple[Tensor, Tensor]] = []
        for span in kept.spans:
            source = span.bytes_of(kept.held[kept.groups[span.storage][0]])
            pairs += self._host.pairs(self._sent_bytes + span.position, source)
        if pairs:
            self._copies.copy(self._out, pairs)
        kept.host_start = self._sent_bytes
        self._sent_bytes += num_bytes

    def _let_go(self, kept: Kept) -> None:
        """Drop what travels, for work that is queued from now on."""
        kept.check_unchanged()
        if kept.host_start is not None:
            self._copies.wait(self._out)
        for place in kept.travelling:
            del kept.held[place]
        self._recent.remove(kept)

    def _fetch_ahead(self, place: int) -> None:
        """Fill the free slots with what is needed next: the blocks below the one at this place."""
        free = [slot for slot, owner in enumerate(self._owners) if owner is None]
        for kept in reversed(self._kept[:place]):
            if not free:
                break
            if kept.is_away and kept.slot is None and not kept.is_taken:
                self._fetch(kept, free.pop())

    def _fetch(self, kept: Kept, slot: int) -> None:
        """Queue the copy of a block's spans into a slot."""
        assert kept.host_start is not None
        buffer = self._slots[slot]
        pairs: list[tuple[Tensor, Tensor]] = []
        for span in kept.spans:
            target = buffer[span.position : span.position + span.num_bytes]
            both = self._host.pairs(kept.host_start + span.position, target)
            pairs += ((device, host) for host, device in both)
        self._owners[slot], kept.slot = kept, slot
        self._copies.copy(slot, pairs)

    def _slot_to_give_up(self) -> int:
        """A free slot, or one that was filled for a block whose turn has not come (backward left the usual order)."""
        for slot, owner in enumerate(self._owners):
            if owner is None:
                return slot
        for slot, owner in enumerate(self._owners):
            if owner is not None and not owner.is_taken:
                owner.slot = None
                return slot
        raise AssertionError("every slot's block runs")

    def _free(self, slot: int) -> None:
        """Let a slot be filled again after all that is queued so far."""
        owner = self._owners[slot]
        if owner is not None:
            owner.slot, self._owners[slot] = None, None
        self._copies.open_(slot)

    def _fit_slots(self, num_bytes: int) -> None:
        """Make the slots large enough for what a block sends."""
        if self._slots and self._slots[0].numel() >= num_bytes:
            return
        self._drop_slots()
        self._slots = [
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            for _ in range(self._num_slots)
        ]
        self._owners = [None] * self._num_slots
        for slot in range(self._num_slots):
            self._free(slot)  # the allocator may have given memory whose last use is still queued

    def _drop_slots(self) -> None:
        for slot, owner in enumerate(self._owners):
            self._copies.wait(slot)
            if owner is not None:
                assert not owner.is_taken, "a slot cannot grow while its block runs"
                owner.slot = None
        self._owners, self._slots = [], []

    def _forget(self) -> None:
        """Begin anew with nothing kept: host memory is written from its start again."""
        self._shared.clear()
        self._sent_bytes = 0
