"""What a placement is: a block's packed bytes are on the device while the block runs, within stated bytes.

It never changes a number. A forward sweep runs blocks 0..n-1; a training sweep goes up and down again, each block
acquired once per direction (recompute and backward share the second acquisition). A plug-in binds `plugin` to a
factory `(settings: PlacementSettings) -> Placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from outsize.base.catalogue import Catalogue
from outsize.base.tiers import Tier

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.devices.protocol import Device

PLACEMENTS = Catalogue("outsize.placement", "placement")
Sweep = Literal["forward", "train"]
Read = Callable[[int, int, "Tensor"], None]


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """What every placement is made from.

    sizes: streamed bytes of each block's packet. tiers: where each block is kept, () for a placement that has but one
    place. slots: device buffers that streamed blocks share. read(block, begin, into): fills a uint8 host tensor with the
    block's streamed bytes from `begin` on, from the store; needed by blocks on disk, called from several threads.
    """

    device: Device
    sizes: Sequence[int]
    tiers: Sequence[Tier] = ()
    slots: int = 3
    read: Read | None = None

    def blocks_in(self, tier: Tier) -> list[int]:
        """The blocks that a tier keeps, in running order."""
        return [block for block, one in enumerate(self.tiers) if one == tier]


class Placement(Protocol):
    """Holds the packets of all blocks."""

    def put(self, block: int, packet: Tensor) -> None:
        """Take a block's bytes (uint8, host, only lent) while loading; called by a thread, one packet at a time."""

    def begin(self, sweep: Sweep) -> None:
        """Say in which order blocks will be acquired from now on, over and over."""

    def acquire(self, block: int) -> Tensor:
        """The packet, uint8 on the device, valid for work queued on the current stream until release.

        It lies in one of a fixed set of buffers: the reader keeps its views of every buffer that it was ever given.
        Raises: what reading it from disk raised, StoreBroken with the file's name.
        """

    def release(self, block: int) -> None:
        """Say that all work reading the packet is queued."""

    def device_bytes(self) -> int:
        """Device memory held for blocks."""

    def host_bytes(self) -> int:
        """Host memory held for blocks."""

    def close(self) -> None:
        """Give all memory back."""


@runtime_checkable
class TakesInPlace(Protocol):
    """What a placement may also be: its memory is written by the loader itself, instead of by `put`."""

    def targets(self, block: int) -> Sequence[Tensor]:
        """uint8 tensors, on the host or the device, that make up the packet in order.

        Empty for a block that is not held: it is not loaded. Called by several threads while loading.
        """


@runtime_checkable
class Reports(Protocol):
    """What a placement may also be: it says where its blocks are in fact held."""

    def report(self) -> dict[str, Any]:
        """JSON values for the journal, among them whatever was not done as ordered."""


@runtime_checkable
class Lists(Protocol):
    """What a placement may also be: it names the device memory that it holds, so that it can be proved to be there."""

    def buffers(self) -> dict[str, Tensor]:
        """Tensors by name: "block 7", "slot 2". Work may be queued on them."""


def report_of(placement: Placement) -> dict[str, Any]:
    """What a placement says of itself; one that says nothing states its bytes."""
    stated = {"device_bytes": placement.device_bytes(), "host_bytes": placement.host_bytes()}
    return stated | (placement.report() if isinstance(placement, Reports) else {})
