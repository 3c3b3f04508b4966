"""What a placement is: a block's packed bytes are on the device while the block runs, within stated bytes.

It never changes a number. A sweep runs blocks 0..n-1; a training step is one sweep up and one down again, each block
acquired once per direction (recompute and backward share the second acquisition).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from outsize.base.catalogue import Catalogue

if TYPE_CHECKING:
    from torch import Tensor

PLACEMENTS = Catalogue("outsize.placement", "placement")
Sweep = Literal["forward", "train"]


class Placement(Protocol):
    """Holds the packets of all blocks."""

    def begin(self, sweep: Sweep) -> None:
        """Say in which order blocks will be acquired from now on; repeated until the next call."""

    def acquire(self, block: int) -> Tensor:
        """The block's packet, uint8 on the device, valid for work queued on the current stream until release."""

    def release(self, block: int) -> None:
        """Say that all work reading the packet is queued."""

    def close(self) -> None:
        """Give all memory back."""
