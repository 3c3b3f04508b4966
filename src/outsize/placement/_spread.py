"""Which blocks stay on the device when not all can: as many as the bytes allow, spread evenly between the streamed.

Evenly, so that the copy of a streamed block always has resident blocks' arithmetic to hide behind. Pure Python: the
planner asks the same question.
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
