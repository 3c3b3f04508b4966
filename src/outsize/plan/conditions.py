"""Bytes while no model runs: preparing stores, and on disk. What runs before and after the base is its task's (tasks/)."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.plan.pools import BASELINE_BYTES, Item, Phase, compute_pool, context
from outsize.plan.work import Work
from outsize.weights.budget import MAX_SLAB_BYTES

# Windows of rows in memory together at most: sixteen threads read, one is encoded, one waits.
PREPARING_SLABS = 18
# Of a card beside them: what encoding one window makes on the way, in fp32 and codes.
ENCODING_BYTES = 512 << 20


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
    yield from work.demand.disk(work)
    saved = work.checkpoint_bytes * work.num_checkpoints
    yield Item("checkpoints", "disk", saved, f"{work.num_checkpoints} kept")
