"""One model of a recipe as it runs: upstream's module, its frozen linears, and the placement that holds its blocks.

Both who loads a store (`app/site.py`) and who measures without one (`app/bench.py`) build through here, so that what is
measured is what trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outsize.layers.model import FrozenModel
from outsize.placement.protocol import PLACEMENTS, Placement, PlacementSettings

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.app.parts import Part
    from outsize.devices.protocol import Device
    from outsize.plan.estimate import Holding
    from outsize.plan.plan import Plan
    from outsize.weights.packet import Packet

_WITHOUT_BLOCKS = "resident"  # a model without blocks has nothing to place
Read = Callable[[int, "Tensor"], None]


def build_model(
    part: Part,
    packets: Sequence[Packet],
    *,
    plan: Plan,
    device: Device,
    read: Read | None = None,
) -> FrozenModel:
    """The model without weights, to be filled through its placement.

    packets: of the blocks, in running order. plan: says where they are held and how they compute. read: gives a block's
    streamed bytes again, for blocks that a placement does not keep.
    """
    table = part.family.table(part.variant)
    holding = plan.holding_of(part.slot)
    return FrozenModel(
        part.family.build(part.variant),
        table=table,
        block_paths=part.family.block_paths(part.variant),
        packing=part.packing.formats,
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
