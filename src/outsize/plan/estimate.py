"""Bytes by phase and owner: what is in memory at the same time, and why.

Memory is staged: one big thing at a time. So each phase is summed by itself and the peak is the largest sum, not the sum
of all. Every item says what it is and from what it was computed; figures without a formula carry their measurement.

On a machine without a GPU the host computes: the same items are counted against RAM, in fp32.

Pools: "device" is memory of the GPU; "pinned" and "private" are host memory; "disk" is disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from outsize.base.tiers import Tier
from outsize.placement._spread import as_tiers
from outsize.plan.sizes import ModelSizes
from outsize.plan.work import Conditioner, Work
from outsize.weights.budget import MAX_SLAB_BYTES

Pool = Literal["device", "pinned", "private", "disk"]
MIB = 2**20

# Numbers that enter and leave a block's linears, times this, is what the block takes while it is recomputed and
# differentiated. Autograd keeps the inputs and outputs once, further q and k after their norms and the products of gates;
# gradients of the same sizes travel back. Measured on Flux.2-dev's blocks (one H200): between 512 and 1024 px the peak
# grew by 1.014 MB a token, of which 0.688 are block inputs; the rest is 26.5 of the single block's 15 widths.
BACKWARD_FACTOR = 1.75
# Without a graph a value lives until it is used: about half of the traffic at a time.
FORWARD_FACTOR = 0.5
# CUDA 13 context with the kernels of matmul, attention and convolution loaded, on an H200; smaller cards take less.
CONTEXT_BYTES = 700 * MIB
# Private bytes of Python with torch, diffusers, transformers and peft; a CUDA context adds 200 MiB of its own.
BASELINE_BYTES = {True: 730 * MIB, False: 330 * MIB}
# Widest tensors of an image codec alive at once at full size, in units of its first convolution's output: a residual
# block holds input, normed, activated and convolved; the decoder runs the last level at twice the channels.
ENCODE_PLANES, DECODE_PLANES = 6, 10


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of one owner in one pool."""

    owner: str
    pool: Pool
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Holding:
    """How one model's blocks are held: kind names the placement, tiers where each block is kept.

    keeps_activations: blocks keep what they compute for backward, instead of running again there. offloads_inputs: the
    inputs of blocks wait in host memory for backward.
    """

    kind: str
    slots: int
    tiers: tuple[Tier, ...]
    keeps_activations: bool = False
    offloads_inputs: bool = False

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self.tiers)

    @property
    def resident(self) -> frozenset[int]:
        """The blocks that stay on the device."""
        return frozenset(block for block, tier in enumerate(self.tiers) if tier == "device")

    @property
    def num_streamed(self) -> int:
        """Blocks that are copied in."""
        return self.num_blocks - len(self.resident)


@dataclass(frozen=True, slots=True)
class Phase:
    """Everything that is in memory together. holding: of the model whose blocks run in it."""

    name: str
    items: tuple[Item, ...]
    holding: Holding | None = None

    def total(self, *pools: Pool) -> int:
        """Bytes in these pools together."""
        return sum(item.num_bytes for item in self.items if item.pool in pools)

    @property
    def device_bytes(self) -> int:
        """On the GPU."""
        return self.total("device")

    @property
    def host_bytes(self) -> int:
        """In RAM that nothing else can use meanwhile."""
        return self.total("pinned", "private")


def resident(model: ModelSizes, kind: str, slots: int) -> Holding:
    """Every block stays on the device."""
    count = len(model.blocks)
    return Holding(kind, slots, as_tiers(count, range(count)))


def training_step(work: Work, holding: Holding) -> Phase:
    """The moment of backward at which most is alive.

    Then the inputs of blocks not yet differentiated, one block's working set and the gradients of the blocks already done
    are there together.
    """
    device = _compute_pool(work)
    size = work.compute_bytes
    inputs, working, grads = _fullest_moment(work)
    adapter = work.num_adapter_elements
    items = [
        *_blocks(work.base, holding, device),
        *_rest(work.base, size, device),
        Item("block inputs", device, inputs * size, f"of {work.tokens} tokens, kept by each block"),
        _working_set(work, holding, device, working),
        *_adapter(work, device),
        Item("gradients", device, grads * size, "of blocks already done, while inputs remain"),
        Item("batch", device, work.batch_bytes, "latents, noise and embeddings"),
        *_context(work),
    ]
    if work.accumulate > 1:
        why = "summed over passes in fp32"
        items.append(Item("accumulated gradients", device, adapter * 4, why))
    return Phase("train step", (*items, *_host(work, work.base)), holding)


def _working_set(work: Work, holding: Holding, device: Pool, working: int) -> Item:
    size = work.compute_bytes
    if not holding.keeps_activations:
        why = "one block recomputed and differentiated"
        return Item("working set", device, working * size, why)
    traffic = sum(block.traffic for block in work.base.blocks)
    kept = math.ceil(work.tokens * traffic * BACKWARD_FACTOR)
    return Item("activations", device, kept * size, "of all blocks, kept for backward")


def training_update(work: Work, holding: Holding) -> Phase:
    """The optimiser's moment: no activations, every gradient in fp32, and the copy a checkpoint makes on the host."""
    device = _compute_pool(work)
    adapter = work.num_adapter_elements
    return Phase(
        "train update",
        (
            *_blocks(work.base, holding, device),
            _outside(work.base, work.compute_bytes, device),
            *_adapter(work, device),
            Item("gradients", device, adapter * 4, "of every adapter tensor, fp32"),
            *_context(work),
            *_host(work, work.base),
            Item("checkpoint", "private", work.checkpoint_bytes, "copied before it is written"),
        ),
        holding,
    )


def sampling(work: Work, holding: Holding) -> Phase:
    """One step of the flow schedule, base and adapter together."""
    device = _compute_pool(work)
    size = work.compute_bytes
    traffic = max((block.traffic for block in work.base.blocks), default=0)
    working = math.ceil(work.sample_tokens * traffic * FORWARD_FACTOR)
    return Phase(
        "sample",
        (
            *_blocks(work.base, holding, device),
            *_rest(work.base, size, device),
            Item(
                "working set", device, working * size, f"one block run, {work.sample_tokens} tokens"
            ),
            Item("adapter", device, work.num_adapter_elements * size, "in the compute type"),
            *_context(work),
            *_host(work, work.base),
        ),
        holding,
    )


def caching_text(work: Work, part: Conditioner, holding: Holding) -> Phase:
    """One text encoder over one caption."""
    device = _compute_pool(work)
    traffic = max((block.traffic for block in part.sizes.blocks), default=0)
    working = math.ceil(work.text_tokens * traffic * FORWARD_FACTOR) * work.compute_bytes
    return Phase(
        f"cache {part.slot}",
        (
            *_blocks(part.sizes, holding, device),
            *_rest(part.sizes, work.compute_bytes, device),
            Item("working set", device, working, f"one block run, {work.text_tokens} tokens"),
            *_context(work),
            *_host(work, part.sizes),
        ),
        holding,
    )


def running_codec(work: Work, part: Conditioner, *, name: str, pixels: int, planes: int) -> Phase:
    """The image codec over one picture of that many pixels."""
    device = _compute_pool(work)
    activations = pixels * part.sizes.first_channels * planes * work.compute_bytes
    why = f"{pixels} pixels x {part.sizes.first_channels} channels x {planes} planes"
    return Phase(
        name,
        (
            Item("codec", device, part.sizes.small_elements * work.compute_bytes, "all of it"),
            Item("working set", device, activations, why),
            *_context(work),
            *_host(work, part.sizes),
        ),
    )


def preparing(work: Work, slot: str) -> Phase:
    """A source read by row windows, encoded, and written block by block; less with a smaller --ram."""
    sizes = work.sizes_of(slot)
    slab_bytes = min(MAX_SLAB_BYTES, sizes.source_bytes)
    return Phase(
        f"prepare {slot}",
        (
            Item("program", "private", BASELINE_BYTES[work.has_gpu], "Python with torch"),
            Item("rows", "private", 2 * slab_bytes, "as read, and a copy being encoded"),
            Item("packed matrix", "private", sizes.largest_parts_bytes, "until its last row"),
        ),
    )


def disk_items(work: Work) -> Iterator[Item]:
    """What is written: stores, caches and checkpoints."""
    yield Item("store of the base", "disk", work.base.store_bytes, "packed blocks and the rest")
    for part in work.conditioners:
        yield Item(
            f"store of {part.slot}", "disk", part.sizes.store_bytes, f"{part.family}.{part.variant}"
        )
    per_picture = work.latent_elements * 4 + work.condition_elements * 2
    count = work.num_pictures
    named = "one picture" if count is None else f"{count} pictures"
    yield Item("cache", "disk", per_picture * (count or 1), f"latents and embeddings of {named}")
    saved = work.checkpoint_bytes * work.num_checkpoints
    yield Item("checkpoints", "disk", saved, f"{work.num_checkpoints} kept")


def _compute_pool(work: Work) -> Pool:
    return "device" if work.has_gpu else "private"


def _blocks(model: ModelSizes, holding: Holding, device: Pool) -> Iterator[Item]:
    kept = sum(model.blocks[block].streamed_bytes for block in holding.resident)
    if kept or not holding.num_streamed:
        yield Item("blocks kept", device, kept, f"{len(holding.resident)} packed blocks")
    streamed = [
        one.streamed_bytes for i, one in enumerate(model.blocks) if i not in holding.resident
    ]
    if streamed:
        slots = min(holding.slots, len(streamed))
        yield Item("ring", device, slots * max(streamed), f"{slots} slots of the largest block")
        host: Pool = "pinned" if device == "device" else "private"
        yield Item("streamed blocks", host, sum(streamed), f"{len(streamed)} packed blocks")


def _outside(model: ModelSizes, size: int, device: Pool) -> Item:
    why = "embedders, modulation, norms and head, in the compute type"
    return Item("outside the blocks", device, model.small_elements * size, why)


def _rest(model: ModelSizes, size: int, device: Pool) -> Iterator[Item]:
    yield _outside(model, size, device)
    yield Item("decode scratch", device, model.largest_matrix * size, "the largest matrix, decoded")


def _adapter(work: Work, device: Pool) -> Iterator[Item]:
    elements = work.num_adapter_elements
    masters = 0 if work.compute_bytes == 4 else 4
    why = f"{elements} numbers, with fp32 masters" if masters else f"{elements} numbers, fp32"
    yield Item("adapter", device, elements * (work.compute_bytes + masters), why)
    yield Item("optimizer state", device, work.optimizer_bytes, work.optimizer)


def _context(work: Work) -> Iterator[Item]:
    if work.has_gpu:
        yield Item("context", "device", CONTEXT_BYTES, "driver context and kernels; no tensor")


def _host(work: Work, model: ModelSizes) -> Iterator[Item]:
    yield Item("program", "private", BASELINE_BYTES[work.has_gpu], "Python with torch")
    yield Item("load buffer", "private", model.largest_packet_bytes, "one packet while loading")


def _fullest_moment(work: Work) -> tuple[int, int, int]:
    """Numbers in block inputs, in the working set and in gradients when backward is at its fullest."""
    inputs = 0
    grads = sum(work.adapter_by_block)
    moments = []
    for block, in_block in zip(work.base.blocks, work.adapter_by_block, strict=True):
        inputs += work.tokens * block.width
        grads -= in_block
        working = math.ceil(work.tokens * block.traffic * BACKWARD_FACTOR)
        moments.append((inputs, working, grads))
    return max(moments, key=sum, default=(0, 0, 0))
