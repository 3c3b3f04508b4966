"""One model of a recipe as it runs: upstream's module, its frozen linears, and the placement that holds its blocks.

Both who loads a store (`app/site.py`) and who measures without one (`app/bench.py`) build through here, so that what is
measured is what trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.arithmetic.protocol import ARITHMETICS, Arithmetic
from outsize.base.errors import MachineFault
from outsize.base.garbage import collection_paused
from outsize.layers.block import BlockRunner, EagerRunner
from outsize.layers.compiled import BlockCompiler
from outsize.layers.model import FrozenModel
from outsize.layers.offload import OffloadedInputs
from outsize.placement.protocol import PLACEMENTS, Placement, PlacementSettings, Read
from outsize.plan.sizes import vocabulary_tensors

if TYPE_CHECKING:
    from torch import nn

    from outsize.app.parts import Part
    from outsize.devices.protocol import Device
    from outsize.plan.compute import Compute
    from outsize.plan.plan import Plan
    from outsize.plan.pools import Holding
    from outsize.weights.packet import Packet

_WITHOUT_BLOCKS = "resident"  # a model without blocks has nothing to place


@dataclass(frozen=True, slots=True)
class Training:
    """What a model that will be trained must know before. code_folder: keeps compiled code."""

    code_folder: Path


def build_model(
    part: Part,
    packets: Sequence[Packet],
    *,
    plan: Plan,
    device: Device,
    placement: Placement | None = None,
    training: Training | None = None,
) -> FrozenModel:
    """The model without weights, to be filled through its placement.

    packets: of the blocks, in running order. plan: says where they are held and how they compute. placement: one that was
    made before, by `place`. training: of a model that will be trained; only such a one computes in the plan's
    arithmetic, is compiled, keeps block inputs in host memory, and may use kernels that do not repeat their bits.
    Raises: MachineFault when the device cannot compute as the plan says.
    """
    table = part.family.table(part.variant)
    holding = plan.holding_of(part.slot)
    compute = plan.compute
    device.compute_exactly(is_wanted=training is None or compute.is_exact)
    is_offloading = training is not None and holding is not None and holding.offloads_inputs
    with collection_paused():  # upstream's library is imported here
        module = part.family.build(part.variant)
    return FrozenModel(
        module,
        table=table,
        block_paths=part.family.block_paths(part.variant),
        packing=part.packing.formats,
        packets=packets,
        placement=placement or place(packets, holding, device),
        device=device.torch_device,
        compute=device.compute_dtype,
        recomputes=holding is None or not holding.keeps_activations,
        keeper=OffloadedInputs(device) if is_offloading else None,
        arithmetic=None if training is None else _arithmetic(plan, device),
        make_runner=EagerRunner if training is None else _runners(training, compute, device),
        on_host=vocabulary_on_host(part, plan),
    )


def vocabulary_on_host(part: Part, plan: Plan) -> tuple[str, ...]:
    """Tensors outside the blocks that the plan leaves in host memory."""
    holding = plan.holding_of(part.slot)
    if holding is None or not holding.has_vocabulary_on_host:
        return ()
    return vocabulary_tensors(part.family_name, part.variant)


def _runners(
    training: Training, compute: Compute, device: Device
) -> Callable[[nn.Module], BlockRunner]:
    if not compute.compiles:
        return EagerRunner
    recorder = device.recorder() if compute.records else None
    return BlockCompiler(training.code_folder, recorder=recorder)


def _arithmetic(plan: Plan, device: Device) -> Arithmetic:
    name = plan.compute.arithmetic
    arithmetic: Arithmetic = ARITHMETICS.load(name)
    fault = arithmetic.fault(device.torch_device)
    if fault is not None:
        raise MachineFault(
            f"products in {name} were asked for, but {fault}; leave train.arithmetic out of the recipe"
        )
    return arithmetic


def place(
    packets: Sequence[Packet], holding: Holding | None, device: Device, read: Read | None = None
) -> Placement:
    """The placement that the plan chose, empty.

    read: gives a block's streamed bytes (block, first byte, target) again, for blocks that a placement does not keep.
    """
    sizes = [one.streamed_bytes for one in packets]
    kind = _WITHOUT_BLOCKS if holding is None else holding.kind
    make: Callable[[PlacementSettings], Placement] = PLACEMENTS.load(kind)
    if holding is None:
        return make(PlacementSettings(device, sizes))
    return make(PlacementSettings(device, sizes, holding.tiers, holding.slots, read))
