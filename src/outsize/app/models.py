"""One model of a recipe as it runs: upstream's module, its frozen linears, and the placement that holds its blocks.

Both who loads a store (`app/site.py`) and who measures without one (`app/bench.py`) build through here, so that what is
measured is what trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from outsize.layers.model import FrozenModel
from outsize.placement.protocol import PLACEMENTS, Placement, PlacementSettings

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.devices.protocol import Device
    from outsize.families.protocol import ModelFamily
    from outsize.formats._packing import Packing
    from outsize.plan.estimate import Holding
    from outsize.weights.packet import Packet

_WITHOUT_BLOCKS = "resident"  # a model without blocks has nothing to place
Read = Callable[[int, "Tensor"], None]


class ModelParts(Protocol):
    """What is known of a model before its weights; `app.parts.Part` is one."""

    @property
    def family(self) -> ModelFamily: ...

    @property
    def variant(self) -> str: ...

    @property
    def packing(self) -> Packing: ...


def build_model(
    parts: ModelParts,
    packets: Sequence[Packet],
    *,
    holding: Holding | None,
    device: Device,
    read: Read | None = None,
) -> FrozenModel:
    """The model without weights, to be filled through its placement.

    packets: of the blocks, in running order. holding: where the plan puts the blocks; None for a model that has none.
    read: gives a block's streamed bytes again, for blocks that a placement does not keep.
    """
    table = parts.family.table(parts.variant)
    return FrozenModel(
        parts.family.build(parts.variant),
        table=table,
        block_paths=parts.family.block_paths(parts.variant),
        packing=parts.packing.formats,
        packets=packets,
        placement=_placement(holding, [one.streamed_bytes for one in packets], device, read),
        device=device.torch_device,
        compute=device.compute_dtype,
        recomputes=holding is None or not holding.keeps_activations,
    )


def _placement(
    holding: Holding | None, sizes: Sequence[int], device: Device, read: Read | None
) -> Placement:
    """The placement that the plan chose."""
    kind = _WITHOUT_BLOCKS if holding is None else holding.kind
    make: Callable[[PlacementSettings], Placement] = PLACEMENTS.load(kind)
    if holding is None:
        return make(PlacementSettings(device, sizes))
    return make(PlacementSettings(device, sizes, holding.tiers, holding.slots, read))
