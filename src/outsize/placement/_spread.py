"""Which blocks are kept where: as many as the bytes allow in the fastest tier, and so on down to the disk.

Each tier's blocks are spread evenly between the slower ones', so that a slow fetch always has other blocks' arithmetic
to hide behind. Pure Python: the planner asks the same question.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outsize.base.tiers import Tier


def spread_evenly(num_blocks: int, num_resident: int) -> frozenset[int]:
    """num_resident of num_blocks indices, at even distances."""
    return frozenset(int((k + 0.5) * num_blocks / num_resident) for k in range(num_resident))


def choose_resident(sizes: Sequence[int], budget_bytes: int) -> frozenset[int]:
    """The largest evenly spread set of blocks whose packets fit into budget_bytes together."""
    for num_resident in range(len(sizes), 0, -1):
        chosen = spread_evenly(len(sizes), num_resident)
        if sum(sizes[block] for block in chosen) <= budget_bytes:
            return chosen
    return frozenset()


def as_tiers(
    num_blocks: int, resident: Collection[int], streamed: Tier = "pinned"
) -> tuple[Tier, ...]:
    """The tier of each block when some stay on the device and all others stream from one tier."""
    return tuple("device" if block in resident else streamed for block in range(num_blocks))


def choose_tiers(
    sizes: Sequence[int], device_bytes: int, pinned_bytes: int, pageable_bytes: int
) -> tuple[Tier, ...]:
    """A tier for each block: as many on the device as fit, then as many in host memory, the rest on disk.

    sizes, device_bytes, pinned_bytes, pageable_bytes: bytes of packets; what slots, staging and an allocator's rounding
    take beside them is not counted here. Fewest blocks on disk come before most blocks pinned.
    """
    streamed = _without(range(len(sizes)), choose_resident(sizes, device_bytes))
    for num_held in range(len(streamed), -1, -1):
        held = _picked(streamed, spread_evenly(len(streamed), num_held))
        if sum(sizes[block] for block in held) > pinned_bytes + pageable_bytes:
            continue
        pinned = _picked(held, choose_resident([sizes[block] for block in held], pinned_bytes))
        pageable = _without(held, pinned)
        if sum(sizes[block] for block in pageable) <= pageable_bytes:
            break
    tiers: list[Tier] = ["device"] * len(sizes)
    for block in streamed:
        tiers[block] = "pinned" if block in pinned else "pageable" if block in pageable else "disk"
    return tuple(tiers)


def _picked(blocks: Sequence[int], positions: Collection[int]) -> list[int]:
    return [blocks[position] for position in sorted(positions)]


def _without(blocks: Sequence[int], taken: Collection[int]) -> list[int]:
    return [block for block in blocks if block not in taken]
