"""Upstream's modules as we use them: frozen, in eval mode, without memory until weights are put in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from outsize.base.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn

Row = TypeVar("Row")


def row_of(family: str, rows: Mapping[str, Row], variant: str) -> Row:
    """The data row of a variant.

    Raises: RecipeError listing the variants when there is none of that name.
    """
    if variant not in rows:
        raise RecipeError(
            f"{family} has no variant {variant!r}; there are {', '.join(sorted(rows))}"
        )
    return rows[variant]


def build_on_meta(make: Callable[[], Any]) -> nn.Module:
    """Call a constructor on the meta device; the module is frozen and in eval mode."""
    import torch

    with torch.device("meta"):
        module: nn.Module = make()
    return module.eval().requires_grad_(False)
