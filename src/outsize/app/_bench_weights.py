"""Weights for measuring where there are no files: random, but as sane as real ones.

Matrices are normal with the deviation 1 / sqrt(columns), so that activations keep their size through the blocks; scales
of norms are one, the rest of the vectors zero. A packed matrix is encoded by its format from a few random rows, which
are repeated down the matrix: only decoding and multiplying cost time later, and these depend on no value. Blocks of one
shape have the same bytes. Made on the device, where it takes a moment; never the same as a trained model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize.base.files import json_digest
from outsize.base.table import TensorSpec
from outsize.families.protocol import FAMILIES, BaseFamily, ImageCodec
from outsize.placement.protocol import Read
from outsize.weights.packet import Packet, plan_packet, view
from outsize.weights.reading import StoreReader
from outsize.weights.store import MANIFEST, STORE_VERSION, Store, open_store
from outsize.weights.store_writer import StoreWriter

if TYPE_CHECKING:
    from outsize.app.parts import Part
    from outsize.devices.protocol import Device
    from outsize.layers.model import FrozenModel
    from outsize.plan.pools import Holding

_ENCODED_ROWS = 256  # of a matrix; the others repeat them
SEED = 7


def packets_of(part: Part) -> dict[int | None, Packet]:
    """The packets of a model's blocks, and of what lies outside them, as its store would have them."""
    table = part.family.table(part.variant)
    parts = {spec.name: part.packing.parts(spec.name) for spec in table}
    blocks: list[int | None] = [None, *range(table.num_blocks)]
    return {block: plan_packet(table.of_block(block), parts) for block in blocks}


class RandomWeights:
    """Packets of one model, filled at random on the device."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self._part, self._device = part, device
        self._table = part.family.table(part.variant).by_name
        self._generator = torch.Generator(device).manual_seed(SEED)
        self._made: dict[tuple[object, ...], Tensor] = {}

    def packet(self, packet: Packet) -> Tensor:
        """The packet's bytes, uint8 on the device; only lent: packets of one shape share them."""
        shape = tuple((one.part, one.shape, one.offset) for one in packet.entries)
        if shape not in self._made:
            self._made[shape] = self._fill(packet)
        return self._made[shape]

    def forget(self) -> None:
        """Give the memory back."""
        self._made.clear()

    def _fill(self, packet: Packet) -> Tensor:
        buffer = torch.zeros(packet.num_bytes, dtype=torch.uint8, device=self._device)
        for name in packet.tensors():
            encoded = self._encoded(self._table[name])
            for part, entry in packet.parts(name).items():
                target = view(entry, buffer).view(-1)
                few = encoded[part].reshape(-1)
                target.copy_(few.repeat(-(-len(target) // len(few)))[: len(target)])
        return buffer

    def _encoded(self, spec: TensorSpec) -> Mapping[str, Tensor]:
        """The parts of a tensor, or of its first rows where it has many."""
        values = self._values(spec)
        encoder = self._part.packing.formats[spec.name].encoder(tuple(values.shape))
        encoder.push(values)
        return encoder.finish()

    def _values(self, spec: TensorSpec) -> Tensor:
        if len(spec.shape) < 2:
            is_scale = spec.role in ("norm", "buffer") and not spec.name.endswith("bias")
            return torch.full(spec.shape, float(is_scale), device=self._device)
        shape = (min(spec.shape[0], _ENCODED_ROWS), *spec.shape[1:])
        deviation = (spec.num_elements // spec.shape[0]) ** -0.5
        drawn = torch.randn(shape, generator=self._generator, device=self._device)
        return drawn.mul_(deviation)


def fill_(model: FrozenModel, part: Part, device: Device, *, has_outside_on_host: bool) -> None:
    """Give a model random weights, in the order in which a store is loaded.

    has_outside_on_host: what lies outside the blocks is read from (pinned) host memory, as after loading.
    Memory on the device, until it returns: what lies outside the blocks once more, then one packet of each shape.
    """
    weights = RandomWeights(part, device.torch_device)
    rest = packets_of(part)[None]
    if has_outside_on_host:
        kept = device.host_buffer(rest.num_bytes)
        kept.tensor[: rest.num_bytes].copy_(weights.packet(rest))
        model.load_small_(None, rest, kept.tensor[: rest.num_bytes], is_given=True)
        model.keep_until_closed(kept)
    else:
        model.load_small_(None, rest, weights.packet(rest))
    weights.forget()
    for block, packet in enumerate(model.packets):
        filled = weights.packet(packet)
        model.load_small_(block, packet, filled)
        model.placement.put(block, filled[: packet.streamed_bytes])
    left = model.without_weights()
    assert not left, f"no weights for {left[:5]}"
    part.family.materialise_buffers(model.module, device.torch_device)
    device.synchronize()


def disk_reader(part: Part, holding: Holding | None, device: Device, cache: Path) -> Read | None:
    """Reads the streamed bytes of blocks on disk, from a random store that is written once; None when none are there."""
    blocks = [] if holding is None else [i for i, one in enumerate(holding.tiers) if one == "disk"]
    return StoreReader(_random_store(part, blocks, device, cache)).read_streamed if blocks else None


def _random_store(part: Part, blocks: Sequence[int], device: Device, cache: Path) -> Store:
    """A store of these blocks alone, filled at random."""
    packets = packets_of(part)
    wanted: dict[int | None, Packet] = {block: packets[block] for block in blocks}
    provenance = {
        "random": SEED,
        "packing": part.packing.describe(),
        "packets": json_digest([[block, one.as_json()] for block, one in wanted.items()]),
        "store_version": STORE_VERSION,
    }
    key = json_digest(provenance)
    folder = cache / f"random-{part.family_name}-{part.variant}-{key[:16]}"
    if (folder / MANIFEST).exists():
        return open_store(folder)
    weights = RandomWeights(part, device.torch_device)
    with StoreWriter(folder, maker=key, packets=wanted) as writer:
        kept = writer.keep_complete()
        for block, packet in wanted.items():
            if block in kept:
                continue
            filled = weights.packet(packet).cpu()
            with writer.block(block) as file:
                for entry in packet.entries:
                    file.append(entry, view(entry, filled))
        return writer.finish(key, provenance)


def latent_shape(base: BaseFamily, variant: str, side: int) -> tuple[int, int, int]:
    """(C, H, W) of a square picture's latent, its sides cut to what the codec takes."""
    (codec,) = (one for one in base.components(variant) if one.kind == "image")
    family: ImageCodec = FAMILIES.load(codec.family)
    cut = side // family.pixel_multiple(codec.variant) * family.pixel_multiple(codec.variant)
    return family.latent_shape(codec.variant, cut, cut)
