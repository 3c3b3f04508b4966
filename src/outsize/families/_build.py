"""Upstream's modules as we use them: frozen, in eval mode, without memory until weights are put in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from outsize.base.errors import RecipeError
from outsize.families.protocol import DEPTH_MARK

if TYPE_CHECKING:
    from torch import nn

Row = TypeVar("Row")


class Stacked(Protocol):
    """A data row whose number of blocks may be reduced; its widths stay."""

    @property
    def depth(self) -> dict[str, int]:
        """Blocks by kind, in running order."""

    def at_depth(self, counts: tuple[int, ...], conditioners: str) -> Self:
        """The same row with fewer blocks.

        conditioners: depth of its text encoder, "" to leave that whole.
        Raises: ValueError when it has no text encoder to reduce.
        """


def row_of(family: str, rows: Mapping[str, Row], variant: str) -> Row:
    """The data row of a variant, at reduced depth where its name says so: "dev@2+6", "dev@2+6@4", "small-24b@4".

    After the mark stand the blocks of each kind, joined by "+", and after a second mark those of the text encoder.
    Raises: RecipeError listing the variants when there is none of that name, or stating the depth that it has.
    """
    name, mark, depth = variant.partition(DEPTH_MARK)
    if name not in rows:
        raise RecipeError(
            f"{family} has no variant {variant!r}; there are {', '.join(sorted(rows))}"
        )
    return _reduced(f"{family}.{name}", rows[name], depth) if mark else rows[name]


def _reduced(label: str, row: Row, depth: str) -> Row:
    if not hasattr(row, "at_depth"):
        raise RecipeError(f"{label} has no depth to reduce; leave out {DEPTH_MARK + depth!r}")
    stacked = cast("Stacked", row)
    own, mark, conditioners = depth.partition(DEPTH_MARK)
    counts = tuple(int(text) if text.isdecimal() else 0 for text in own.split("+"))
    full = stacked.depth
    fits = len(counts) == len(full) and all(
        1 <= count <= limit for count, limit in zip(counts, full.values(), strict=True)
    )
    if not fits or bool(mark) != bool(conditioners):
        has = " and ".join(f"{count} {kind} blocks" for kind, count in full.items())
        raise RecipeError(
            f"{label} has {has}; a reduced depth names one number from 1 on for each kind, as in "
            f"{label + DEPTH_MARK + '+'.join('1' for _ in full)!r}, not {DEPTH_MARK + depth!r}"
        )
    try:
        return cast("Row", stacked.at_depth(counts, conditioners))
    except ValueError as error:
        raise RecipeError(f"{label}{DEPTH_MARK}{depth}: {error}") from error


def build_on_meta(make: Callable[[], Any]) -> nn.Module:
    """Call a constructor on the meta device; the module is frozen and in eval mode."""
    import torch

    with torch.device("meta"):
        module: nn.Module = make()
    return module.eval().requires_grad_(False)
