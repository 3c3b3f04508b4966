"""Bytes while the base runs, by owner: what is in memory at the same time, and why.

Memory is staged: one big thing at a time. So each phase is summed by itself and the peak is the largest sum, not the sum
of all. Every item says what it is and from what it was computed; figures without a formula carry their measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from outsize.devices._rates import operand_bytes
from outsize.plan.compute import Compute
from outsize.plan.pools import (
    Holding,
    Item,
    Phase,
    Pool,
    blocks,
    compute_pool,
    context,
    host,
    outside,
    rest,
)
from outsize.plan.work import Work

# Numbers that enter and leave a block's linears, times this, is what the block takes while it is recomputed and
# differentiated. Autograd keeps the inputs and outputs once, further q and k after their norms and the products of gates;
# gradients of the same sizes travel back. Measured on Flux.2-dev's blocks (one H200): between 512 and 1024 px the peak
# grew by 1.014 MB a token, of which 0.688 are block inputs; the rest is 26.5 of the single block's 15 widths.
BACKWARD_FACTOR = 1.75
# Without a graph a value lives until it is used: about half of the traffic at a time.
FORWARD_FACTOR = 0.5
# Names of phases that only a recipe with previews has.
PREVIEW, DECODE = "preview", "decode previews"
# Device buffers for block inputs that wait in host memory, and inputs that are still on their way there.
INPUT_SLOTS, INPUTS_IN_FLIGHT = 2, 2
# Of the product of an adapted linear with learned lengths: kept for their gradient, and its own gradient.
_DORA_COPIES = 2
# Bytes of a row while it becomes operands of fewer bits: as it is multiplied, and (unless that is compiled) in fp32 twice.
_EAGER_CONVERSION = 8


def training_step(work: Work, holding: Holding, compute: Compute | None = None) -> Phase:
    """The moment of backward at which most is alive.

    Then the inputs of blocks not yet differentiated, one block's working set and the gradients of the blocks already done
    are there together. compute: None: in the compute type, not compiled.
    """
    device = compute_pool(work)
    size = work.compute_bytes
    inputs, working, grads = _fullest_moment(work, offloads=holding.offloads_inputs)
    adapter = work.num_adapter_elements
    items = [
        *blocks(work.base, holding, device),
        *rest(work.base, size, device, compute, vocabulary=_away(work, holding)),
        *_inputs(work, holding, device, inputs),
        _working_set(work, holding, device, working),
        *_operands(work, device, compute),
        *_recorded(work, device, compute),
        *_adapter(work, device),
        *_lengths(work, device),
        Item("gradients", device, grads * size, "of blocks already done, while inputs remain"),
        *work.demand.training(work, holding),
        *context(work),
    ]
    if work.accumulate > 1:
        why = "summed over passes in fp32"
        items.append(Item("accumulated gradients", device, adapter * 4, why))
    return Phase("train step", (*items, *host(work, work.base)), holding)


def training_update(work: Work, holding: Holding) -> Phase:
    """The optimiser's moment: no activations, every gradient in fp32, and the copy a checkpoint makes on the host."""
    device = compute_pool(work)
    adapter = work.num_adapter_elements
    return Phase(
        "train update",
        (
            *blocks(work.base, holding, device),
            *outside(work.base, work.compute_bytes, device, vocabulary=_away(work, holding)),
            *_input_buffers(work, holding, device),
            *_adapter(work, device),
            *_shown(work, device),
            Item("gradients", device, adapter * 4, "of every adapter tensor, fp32"),
            *context(work),
            *host(work, work.base),
            Item("checkpoint", "private", work.checkpoint_bytes, "copied before it is written"),
        ),
        holding,
    )


def sampling(work: Work, holding: Holding) -> Phase:
    """One run of the blocks without a graph, base and adapter together; in the compute type, never compiled."""
    device = compute_pool(work)
    size = work.compute_bytes
    traffic = max((block.traffic for block in work.base.blocks), default=0)
    tokens = work.demand.sample_tokens
    working = math.ceil(tokens * traffic * FORWARD_FACTOR)
    return Phase(
        "sample",
        (
            *blocks(work.base, holding, device),
            *rest(work.base, size, device, vocabulary=_away(work, holding)),
            Item("working set", device, working * size, f"one block run, {tokens} tokens"),
            *work.demand.sampling(work),
            Item("adapter", device, work.num_adapter_elements * size, "in the compute type"),
            *context(work),
            *host(work, work.base),
        ),
        holding,
    )


def previewing(work: Work, holding: Holding, compute: Compute) -> Phase:
    """Sampling in the middle of a training, whose adapter, optimiser and buffers stay where they are; never compiled."""
    device, size = compute_pool(work), work.compute_bytes
    traffic = max((block.traffic for block in work.base.blocks), default=0)
    tokens = work.demand.preview_tokens
    working = math.ceil(tokens * traffic * FORWARD_FACTOR)
    eager = replace(compute, compiles=False, records=False)
    return Phase(
        PREVIEW,
        (
            *blocks(work.base, holding, device),
            *rest(work.base, size, device, eager, vocabulary=_away(work, holding)),
            Item("working set", device, working * size, f"one block run, {tokens} tokens"),
            *_operands(work, device, eager, tokens),
            *_beside(work, holding, device, compute),
        ),
        holding,
    )


def decoding_beside(work: Work, holding: Holding, compute: Compute) -> Phase:
    """The image codec beside a base that goes on training."""
    device, size = compute_pool(work), work.compute_bytes
    return Phase(
        DECODE,
        (
            *blocks(work.base, holding, device),
            *outside(work.base, size, device, vocabulary=_away(work, holding)),
            *work.demand.decoding(work),
            *_beside(work, holding, device, compute),
        ),
        holding,
    )


def decoding_after(work: Work) -> Phase:
    """The image codec alone, once the base is gone."""
    return Phase(DECODE, (*work.demand.decoding(work), *context(work), *host(work, work.base)))


def _beside(work: Work, holding: Holding, device: Pool, compute: Compute) -> Iterator[Item]:
    """What a training keeps between two steps, the base left out."""
    yield from _recorded(work, device, compute)
    yield from _input_buffers(work, holding, device)
    yield from _adapter(work, device)
    yield from work.demand.previewing(work)
    yield from context(work)
    yield from host(work, work.base)


def _away(work: Work, holding: Holding) -> int:
    """Numbers outside the blocks that stay in host memory."""
    return work.num_vocabulary_elements if holding.has_vocabulary_on_host else 0


def _inputs(work: Work, holding: Holding, device: Pool, inputs: int) -> Iterator[Item]:
    """What each block keeps for backward: on the device, or in host memory but for a few."""
    size = work.compute_bytes
    if not holding.offloads_inputs:
        why = f"of {work.tokens} tokens, kept by each block"
        yield Item("block inputs", device, inputs * size, why)
        return
    yield from _input_buffers(work, holding, device)
    flying = INPUTS_IN_FLIGHT * work.tokens * _widest(work)
    yield Item("block inputs", device, flying * size, "on their way to host memory")


def _input_buffers(work: Work, holding: Holding, device: Pool) -> Iterator[Item]:
    """Slots on the device and memory on the host that block inputs share from step to step."""
    if not holding.offloads_inputs:
        return
    size = work.compute_bytes
    slots = INPUT_SLOTS * work.tokens * _widest(work)
    yield Item("slots of block inputs", device, slots * size, f"{INPUT_SLOTS}, for backward")
    pinned: Pool = "pinned" if device == "device" else "private"
    waiting = work.tokens * sum(block.width for block in work.base.blocks[:-1])
    yield Item("waiting block inputs", pinned, waiting * size, "of all blocks, until backward")


def _working_set(work: Work, holding: Holding, device: Pool, working: int) -> Item:
    size = work.compute_bytes
    if not holding.keeps_activations:
        why = "one block recomputed and differentiated"
        return Item("working set", device, working * size, why)
    traffic = sum(block.traffic for block in work.base.blocks)
    kept = math.ceil(work.tokens * traffic * BACKWARD_FACTOR)
    return Item("activations", device, kept * size, "of all blocks, kept for backward")


def _operands(
    work: Work, device: Pool, compute: Compute | None, tokens: int | None = None
) -> Iterator[Item]:
    """Activations converted for a product in fewer bits than the compute type. tokens: None: those of training."""
    if compute is None or device != "device":
        return
    size = operand_bytes(compute.arithmetic)
    if size == work.compute_bytes:
        return
    widest = max((block.widest_input for block in work.base.blocks), default=0)
    each = size + (0 if compute.compiles else _EAGER_CONVERSION)
    why = f"one product's rows in {compute.arithmetic}"
    rows = work.tokens if tokens is None else tokens
    yield Item("operands", device, rows * widest * each, why)


def _recorded(work: Work, device: Pool, compute: Compute | None) -> Iterator[Item]:
    """Where recorded kernels find what changes from launch to launch: input and gradient of one block of each kind."""
    if compute is None or not compute.records:
        return
    kinds = {
        (block.width, block.num_linears): (block, adapter)
        for block, adapter in zip(work.base.blocks, work.adapter_by_block, strict=True)
    }
    numbers = sum(work.tokens * block.width + adapter for block, adapter in kinds.values())
    why = f"fixed places for {len(kinds)} kinds of blocks, in and out"
    yield Item("recorded kernels", device, 2 * numbers * work.compute_bytes, why)


def _adapter(work: Work, device: Pool) -> Iterator[Item]:
    elements = work.num_adapter_elements
    masters = 0 if work.compute_bytes == 4 else 4
    why = f"{elements} numbers, with fp32 masters" if masters else f"{elements} numbers, fp32"
    yield Item("adapter", device, elements * (work.compute_bytes + masters), why)
    yield Item("optimizer state", device, work.optimizer_bytes, work.optimizer)
    if work.averages == "kept":
        yield Item("average", device, elements * 4, "moving average of the masters, fp32")


def _shown(work: Work, device: Pool) -> Iterator[Item]:
    """Averaged weights while they are looked at or saved."""
    elements = work.num_adapter_elements
    sizes = (4 if work.averages == "derived" else 0) + (2 if work.compute_bytes == 2 else 0)
    if work.averages and sizes:
        yield Item("averaged weights", device, elements * sizes, "while they are looked at")


def _lengths(work: Work, device: Pool) -> Iterator[Item]:
    """What learned lengths of rows take in one block: products kept for their gradient, and one on its way."""
    rows = max(work.rows_by_block, default=0)
    if rows:
        why = "products of one block, kept for the lengths' gradients (DoRA)"
        kept = _DORA_COPIES * work.tokens * rows * work.compute_bytes
        yield Item("scaled products", device, kept, why)
        yield Item("row lengths", device, sum(work.rows_by_block) * 4, "of frozen rows, fp32")


def _widest(work: Work) -> int:
    return max((block.width for block in work.base.blocks), default=0)


def _fullest_moment(work: Work, *, offloads: bool) -> tuple[int, int, int]:
    """Numbers in block inputs, in the working set and in gradients when backward is at its fullest."""
    inputs = 0
    grads = sum(work.adapter_by_block)
    moments = []
    for block, in_block in zip(work.base.blocks, work.adapter_by_block, strict=True):
        inputs += 0 if offloads else work.tokens * block.width
        grads -= in_block
        working = math.ceil(work.tokens * block.traffic * BACKWARD_FACTOR)
        moments.append((inputs, working, grads))
    return max(moments, key=sum, default=(0, 0, 0))
