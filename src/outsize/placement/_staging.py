"""How large the ring is through which blocks pass that no copy can read where they are. Pure Python: the planner asks too."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.base.tiers import Tier

# A disk reaches its rate with a few reads of this size in flight, and a copy to a card with one.
PIECE_BYTES = 32 << 20
NUM_PIECES = (
    16  # 512 MiB: two of the larger blocks there are, so that a disk goes on while slots are taken
)
_PAGE_BYTES = 4096


def staging_pieces(sizes: Sequence[int]) -> list[int]:
    """Bytes of each buffer of the ring for blocks of these sizes; none for no blocks.

    Small blocks take small buffers: no more is held than NUM_PIECES of them.
    """
    largest = max(sizes, default=0)
    if not largest:
        return []
    piece_bytes = min(PIECE_BYTES, -(-largest // _PAGE_BYTES) * _PAGE_BYTES)
    return [piece_bytes] * NUM_PIECES


def staging_bytes(sizes: Sequence[int], tiers: Sequence[Tier]) -> int:
    """Bytes of the ring under these tiers."""
    staged = [size for size, tier in zip(sizes, tiers, strict=True) if tier in ("pageable", "disk")]
    return sum(staging_pieces(staged))
