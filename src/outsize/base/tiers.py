"""Where a block's packed bytes are kept between its uses; from the fastest to the most plentiful.

One plan may mix all of them. device: they never move. pinned: page-locked host memory, which the card reads by itself.
pageable: ordinary host memory, staged through a small pinned buffer. disk: the store's own files, staged likewise.
"""

from __future__ import annotations

from typing import Literal

Tier = Literal["device", "pinned", "pageable", "disk"]
TIERS: tuple[Tier, ...] = ("device", "pinned", "pageable", "disk")
