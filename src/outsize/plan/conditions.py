"""Bytes while the base does not run: preparing stores, caching text and latents, decoding pictures, and on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator

from outsize.plan.estimate import FORWARD_FACTOR
from outsize.plan.pools import (
    BASELINE_BYTES,
    Holding,
    Item,
    Phase,
    blocks,
    compute_pool,
    context,
    host,
    rest,
)
from outsize.plan.work import Conditioner, Work
from outsize.weights.budget import MAX_SLAB_BYTES

# Widest tensors of an image codec alive at once at full size, in units of its first convolution's output: a residual
# block holds input, normed, activated and convolved; the decoder runs the last level at twice the channels.
ENCODE_PLANES, DECODE_PLANES = 6, 10
# Windows of rows in memory together at most: sixteen threads read, one is encoded, one waits.
PREPARING_SLABS = 18
# Of a card beside them: what encoding one window makes on the way, in fp32 and codes.
ENCODING_BYTES = 512 << 20


def caching_text(work: Work, part: Conditioner, holding: Holding) -> Phase:
    """One text encoder over one caption."""
    device = compute_pool(work)
    traffic = max((block.traffic for block in part.sizes.blocks), default=0)
    working = math.ceil(work.text_tokens * traffic * FORWARD_FACTOR) * work.compute_bytes
    return Phase(
        f"cache {part.slot}",
        (
            *blocks(part.sizes, holding, device),
            *rest(part.sizes, work.compute_bytes, device),
            Item("working set", device, working, f"one block run, {work.text_tokens} tokens"),
            *context(work),
            *host(work, part.sizes),
        ),
        holding,
    )


def encoding_pictures(work: Work, part: Conditioner) -> Phase:
    """The image codec over one picture of the training set."""
    return _codec("cache latents", work, part, work.pixels * ENCODE_PLANES)


def decoding_pictures(work: Work, part: Conditioner) -> Phase:
    """The image codec over the pictures that are sampled together."""
    return _codec("decode pictures", work, part, work.sample_pixels * DECODE_PLANES)


def _codec(name: str, work: Work, part: Conditioner, planes: int) -> Phase:
    """planes: numbers of all the widest tensors alive at once, for each of their channels."""
    device = compute_pool(work)
    activations = planes * part.sizes.first_channels * work.compute_bytes
    why = f"the widest tensors alive at once, {part.sizes.first_channels} channels"
    return Phase(
        name,
        (
            Item("codec", device, part.sizes.small_elements * work.compute_bytes, "all of it"),
            Item("working set", device, activations, why),
            *context(work),
            *host(work, part.sizes),
        ),
    )


def preparing(work: Work, slot: str) -> Phase:
    """A source read by row windows, encoded, and written block by block; less with a smaller --ram."""
    sizes = work.sizes_of(slot)
    rows = min(PREPARING_SLABS * MAX_SLAB_BYTES, sizes.source_bytes)
    parts = 2 * sizes.largest_parts_bytes
    device = compute_pool(work)
    on_device = [*context(work)]
    if work.has_gpu:
        on_device.append(Item("encoding", device, rows + parts, "rows, and what they become"))
        on_device.append(Item("between", device, ENCODING_BYTES, "one window's steps, in fp32"))
    return Phase(
        f"prepare {slot}",
        (
            Item("program", "private", BASELINE_BYTES[work.has_gpu], "Python with torch"),
            Item("rows", "private", rows, "read ahead, and being encoded"),
            Item("packed matrix", "private", parts, "until its last row, and to be written"),
            *on_device,
            Item("source files", "cached", sizes.source_bytes, "read once"),
            Item("store files", "cached", sizes.store_bytes, "written once"),
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
