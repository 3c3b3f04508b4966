"""In which pieces a matrix is decoded whose rows hold whole codes.

On a CPU the fp32 intermediate of a piece stays in the cache; on a card, and where torch.compile fuses, one piece is best.
"""

from __future__ import annotations

import torch

_CPU_ELEMENTS = 2**18


def row_spans(shape: tuple[int, ...], device_type: str) -> list[tuple[int, int]]:
    """Row ranges of a matrix (N, K): one, but on a CPU outside torch.compile many."""
    num_rows, num_columns = shape
    step = num_rows
    if device_type == "cpu" and not torch.compiler.is_compiling():
        step = max(1, _CPU_ELEMENTS // num_columns)
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
