"""Names in a recipe that only the catalogues can judge: of families, variants, slots, formats and other plug-ins.

Recipes rank below the plug-ins, so they cannot know these names; plan can. Nothing here imports torch: catalogues list
files, and families and formats import without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

from outsize.arithmetic.protocol import ARITHMETICS
from outsize.base.catalogue import Catalogue, nearest
from outsize.base.errors import RecipeError
from outsize.base.options import build_with_options
from outsize.families.protocol import FAMILIES, Component, TrainedFamily, without_depth
from outsize.formats.protocol import make_format
from outsize.placement.protocol import PLACEMENTS
from outsize.recipes.load import raise_faults
from outsize.recipes.recipe import Recipe
from outsize.recipes.yaml_tree import Fault, parse_tree

# By name, since train is of plan's own rank; asked for names and for the size of their state, which need no torch.
OPTIMIZERS = Catalogue("outsize.train.optimizers", "optimizer")
TASKS = Catalogue("outsize.plan.tasks", "task")  # by the objective of the base's family
TRACKERS = Catalogue("outsize.runs.trackers", "tracker")
AUTO = "auto"  # the planner chooses


def base_family(name: str) -> TrainedFamily:
    """A family that can be trained.

    Raises: RecipeError when there is none of that name, or it is a text encoder or codec.
    """
    family = FAMILIES.load(name)
    if not hasattr(family, "objective"):
        raise RecipeError(
            f"{name!r} is a part of other models and cannot be trained by itself; there are {', '.join(_bases())}"
        )
    return cast("TrainedFamily", family)


def _bases() -> list[str]:
    """Names of the families that can be trained."""
    return [name for name in FAMILIES.names() if hasattr(FAMILIES.load(name), "objective")]


class StatedOptimizer(Protocol):
    """What plans ask of an optimiser's plug-in; see train/optimizers/protocol.py, which is of plan's own rank."""

    def state_bytes(self, elements: int) -> int:
        """Bytes of state for one tensor of that many numbers."""


def optimizer_of(recipe: Recipe) -> StatedOptimizer:
    """The recipe's optimiser with its options.

    Raises: RecipeError for a name, option or value that does not exist.
    """
    name, options = recipe.train.optimizer, recipe.train.optimizer_options
    made: StatedOptimizer = build_with_options(
        f"optimizer {name!r}", OPTIMIZERS.load(name), options
    )
    return made


def check_variant(family: str, variant: str) -> TrainedFamily:
    """The family, when it has that variant.

    Raises: RecipeError with the nearest name when the family or the variant does not exist.
    """
    found = base_family(family)
    if without_depth(variant) not in found.variants:
        raise RecipeError(
            f"{family} has no variant {variant!r}; {nearest(variant, found.variants)}"
        )
    for part in found.components(variant):
        FAMILIES.load(part.family).block_paths(
            part.variant
        )  # refuses a depth that it does not have
    return found


def check_names(recipe: Recipe, *, origin: str = "recipe") -> None:
    """Check every name of a plug-in that a recipe uses. origin: the recipe's file, whose lines are then named.

    Raises: RecipeError that lists all faults at once, each with the nearest real name.
    """
    faults = list(_faults(recipe))
    raise_faults(_with_lines(faults, Path(origin)) if faults else (), origin=origin)


def components_of(recipe: Recipe) -> tuple[Component, ...]:
    """The conditioners of the recipe's base, in order of use."""
    return base_family(recipe.base.family).components(recipe.base.variant)


def _faults(recipe: Recipe) -> Iterator[Fault]:
    base = recipe.base
    yield from _fault("base.format", make_format, base.format.name, base.format.options)
    for slot, choice in base.components.items():
        if choice.format is not None:
            where = f"base.components.{slot}.format"
            yield from _fault(where, make_format, choice.format.name, choice.format.options)
    family_faults = list(_fault("base.family", base_family, base.family))
    yield from family_faults
    variant_faults = (
        []
        if family_faults
        else list(_fault("base.variant", check_variant, base.family, base.variant))
    )
    yield from variant_faults
    if not family_faults and not variant_faults:
        slots = {component.slot for component in components_of(recipe)}
        for slot in sorted(base.components.keys() - slots):
            yield Fault(None, f"base.components.{slot}", _no_such_part(slot, slots))
        yield from TASKS.load(base_family(base.family).objective).faults(recipe)
    yield from _optimizer_faults(recipe)
    yield from _unknown("train.arithmetic", ARITHMETICS, recipe.train.arithmetic, AUTO)
    yield from _unknown("placement.kind", PLACEMENTS, recipe.placement.kind, AUTO)
    for name in recipe.track:
        yield from _unknown("track", TRACKERS, name)


def _optimizer_faults(recipe: Recipe) -> Iterator[Fault]:
    """A name or option that does not exist, and settings that do not go with the optimiser."""
    unknown = list(_unknown("train.optimizer", OPTIMIZERS, recipe.train.optimizer))
    yield from unknown
    if unknown:
        return
    faults = list(_fault("train.optimizer_options", optimizer_of, recipe))
    yield from faults
    find = None if faults else getattr(optimizer_of(recipe), "fault", None)
    found = None if find is None else find(recipe.train)
    if found is not None:
        yield Fault(None, f"train.{found[0]}", found[1])


def _no_such_part(slot: str, slots: Collection[str]) -> str:
    return f"no such part; {nearest(slot, slots)}" if slots else "this base has no other parts"


def _unknown(where: str, catalogue: Catalogue, name: str, *others: str) -> Iterator[Fault]:
    """The fault of a name that no plug-in has; it is not loaded. others: words that are no plug-in's, and are allowed."""
    known = {*catalogue.names(), *others}
    if name not in known:
        yield Fault(None, where, f"no {catalogue.noun} is called {name!r}; {nearest(name, known)}")


def _with_lines(faults: list[Fault], file: Path) -> list[Fault]:
    """The faults with the lines at which a recipe's file speaks of them, if there is such a file."""
    try:
        tree = parse_tree(file.read_bytes().decode("utf-8-sig"), file=str(file))
    except OSError:
        return faults
    return [replace(fault, line=tree.line_of(tuple(fault.where.split(".")))) for fault in faults]


def _fault(where: str, check: Callable[..., object], *arguments: object) -> Iterator[Fault]:
    """The fault that a check finds, if any."""
    try:
        check(*arguments)
    except RecipeError as error:
        yield Fault(None, where, str(error))
