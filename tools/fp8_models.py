"""A base with random weights in any format, and an adapter on all of it, for programs that compare ways to compute.

Every value depends on its tensor's name alone: two formats hold the same draw.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.adapters.adapter import Adapter, AdapterShape
from outsize.app._bench_weights import packets_of
from outsize.app.parts import Part
from outsize.arithmetic.protocol import Arithmetic
from outsize.devices.protocol import Device
from outsize.layers.model import FrozenModel
from outsize.placement.protocol import PLACEMENTS, PlacementSettings
from outsize.weights.packet import Packet, view

WEIGHT_DEVIATION = 0.02  # of matrices, as `outsize synth` draws them
B_DEVIATION = 0.01  # of the adapter's B: a delta of the size that training makes
_ROWS_PER_PUSH = 4096


@dataclass(frozen=True, slots=True)
class Adapted:
    """A base on a device with its adapter."""

    part: Part
    device: Device
    model: FrozenModel
    adapter: Adapter


@contextmanager
def opened(part: Part, device: Device, arithmetic: Arithmetic, *, rank: int) -> Iterator[Adapted]:
    """The base as the part packs it, computing in one arithmetic, for the time of the block."""
    packets = packets_of(part)
    table = part.family.table(part.variant)
    blocks = [packets[block] for block in range(table.num_blocks)]
    sizes = [one.streamed_bytes for one in blocks]
    model = FrozenModel(
        part.family.build(part.variant),
        table=table,
        block_paths=part.family.block_paths(part.variant),
        packing=part.packing.formats,
        packets=blocks,
        placement=PLACEMENTS.load("resident")(PlacementSettings(device, sizes)),
        device=device.torch_device,
        compute=device.compute_dtype,
        arithmetic=arithmetic,
    )
    rest = packets[None]
    model.load_small_(None, rest, _fill(part, rest, device))
    for number, packet in enumerate(blocks):
        filled = _fill(part, packet, device)
        model.load_small_(number, packet, filled)
        model.placement.put(number, filled[: packet.streamed_bytes])
    part.family.materialise_buffers(model.module, device.torch_device)
    try:
        yield Adapted(part, device, model, _attach(part, model, device, rank))
    finally:
        model.close()
        del model
        gc.collect()
        device.release_cached()


def _fill(part: Part, packet: Packet, device: Device) -> Tensor:
    """A packet's bytes; a tensor's values depend on its name alone, whatever its format."""
    specs = part.family.table(part.variant).by_name
    buffer = torch.zeros(packet.num_bytes, dtype=torch.uint8, device=device.torch_device)
    for name in packet.tensors():
        spec = specs[name]
        encoder = part.packing.formats[name].encoder(spec.shape)
        if len(spec.shape) < 2:
            is_scale = spec.role in ("norm", "buffer") and not name.endswith("bias")
            encoder.push(torch.full(spec.shape, float(is_scale), device=device.torch_device))
        else:
            generator = _generator(name, device)
            for first in range(0, spec.shape[0], _ROWS_PER_PUSH):
                shape = (min(_ROWS_PER_PUSH, spec.shape[0] - first), *spec.shape[1:])
                rows = torch.randn(shape, generator=generator, device=device.torch_device)
                encoder.push(rows.mul_(WEIGHT_DEVIATION).bfloat16())
        encoded = encoder.finish()
        for key, entry in packet.parts(name).items():
            view(entry, buffer).view(-1).copy_(encoded[key].reshape(-1))
    return buffer


def _attach(part: Part, model: FrozenModel, device: Device, rank: int) -> Adapter:
    """An adapter on every linear of the blocks, B away from zero; it depends on names alone."""
    table = part.family.table(part.variant)
    roles = tuple(sorted({spec.role for spec in table.linears()}))
    adapter = Adapter(model.module, table, AdapterShape(rank, float(rank), roles))
    adapter.materialise_(seed=0, device=device.torch_device, dtype=device.compute_dtype)
    with torch.no_grad():
        for name, one in adapter.parameters().items():
            if name.endswith("lora_B"):
                one.normal_(0, B_DEVIATION, generator=_generator(name, device))
    return adapter


def _generator(name: str, device: Device) -> torch.Generator:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    return torch.Generator(device.torch_device).manual_seed(number)
