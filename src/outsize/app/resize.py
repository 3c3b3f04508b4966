"""An adapter of lower rank, of a run or of a file: in the same client's words unless another is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.app.adapter_files import Found, read_adapter, recognised_adapter
from outsize.app.export import TrainedAdapter, give, let_out, trained_adapter
from outsize.app.people import People, requester_of
from outsize.app.tasks.protocol import task_of
from outsize.base.errors import RecipeError
from outsize.base.layout import Layout
from outsize.export.combine import Lowered, lowered
from outsize.export.export import Exported
from outsize.families.protocol import FAMILIES

if TYPE_CHECKING:
    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for; see `lowered`. dialect: None for that of the file, or what most programs read."""

    rank: int | None
    energy: float | None
    dialect: str | None
    path: Path


@dataclass(frozen=True, slots=True)
class Resized:
    """What was written, in which dialect, and what was lost of each module."""

    exported: Exported
    dialect: str
    told: Mapping[str, Lowered]


def resize_run(recipe: Recipe, run: RunFolder, target: Target) -> Resized:
    """A run's adapter at a lower rank.

    Raises: as `trained_adapter`, `lowered` and `export_adapter`.
    """
    trained = trained_adapter(recipe, run)
    weights, told = lowered(trained.weights, rank=target.rank, energy=target.energy)
    dialect = target.dialect or task_of(recipe).dialect
    given = give(recipe, TrainedAdapter(weights, trained.metadata), dialect, target.path)
    return Resized(given.exported, dialect, told)


def resize_file(path: Path, base: str | None, target: Target) -> Resized:
    """A file's adapter at a lower rank. base: family.variant that it is of; None to find out.

    Raises: AdapterError when it is of no base, and as `lowered` and `export_adapter`.
    """
    found = _found(path, base)
    people = People(tuple(sorted(found.weights.subjects)), requester_of(None))
    people.begin("export", into=str(target.path))
    weights, told = lowered(found.weights, rank=target.rank, energy=target.energy)
    dialect = target.dialect or found.dialect
    family, _, variant = found.base.partition(".")
    layouts = FAMILIES.load(family).layouts(variant)
    if any(ours != theirs for ours, theirs in found.names.items()):
        # the class that opens the base calls its modules so
        pairs = {found.names[module]: pair for module, pair in weights.pairs.items()}
        weights, layouts = replace(weights, pairs=pairs), (Layout("client"),)
    made = let_out(
        weights, dialect, layouts, target.path, metadata={"base": found.base}, people=people
    )
    return Resized(made, dialect, told)


def _found(path: Path, base: str | None) -> Found:
    if base is None:
        return recognised_adapter(path)
    family, _, variant = base.partition(".")
    if not variant:
        raise RecipeError(f"{base!r} names no variant; write FAMILY.VARIANT, as in flux2.dev")
    return read_adapter(path, family, variant)
