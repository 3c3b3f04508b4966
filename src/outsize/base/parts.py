"""Parts: the plain tensors in which a frozen matrix is stored, sized without torch.

dtype codes are those of safetensors: "F32", "F16", "BF16", "U8" and so on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of an encoded matrix. name is "" when the matrix is stored as itself."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def part_key(tensor: str, part: str) -> str:
    """Key of a part in a safetensors file: "x.weight.codes", or "x.weight" for the unnamed part."""
    return f"{tensor}.{part}" if part else tensor
