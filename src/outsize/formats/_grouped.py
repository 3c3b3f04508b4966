"""What the 4-bit formats share without torch: matrices whose rows are whole groups, two codes to a byte."""

from __future__ import annotations

from outsize.base.errors import FormatError
from outsize.base.parts import Part


def is_grouped(shape: tuple[int, ...], group: int) -> bool:
    """Whether shape is a matrix (N, K) with K a multiple of the group."""
    return len(shape) == 2 and min(shape) > 0 and shape[1] % group == 0


def refuse_ungrouped(shape: tuple[int, ...], group: int, name: str) -> None:
    """Raise unless is_grouped.

    Raises: FormatError with the shape and the group.
    """
    if not is_grouped(shape, group):
        raise FormatError(
            f"{name} cannot hold a tensor of shape {shape}: it holds matrices whose columns are a multiple of "
            f"its group of {group}; leave this tensor plain or choose another group"
        )


def num_groups(shape: tuple[int, ...], group: int) -> int:
    """How many groups a matrix has."""
    return shape[0] * shape[1] // group


def codes_part(shape: tuple[int, ...]) -> Part:
    """Two codes to a byte, the first in the high nibble, over the flattened matrix."""
    return Part("codes", "U8", (shape[0] * shape[1] // 2,))
