"""Names in a recipe that only the catalogues can judge: family, variant, formats, slots, optimizer, placement.

Recipes rank below the plug-ins, so they cannot know these names; plan can. Nothing here imports torch: catalogues list
files, and families and formats import without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from outsize.base.catalogue import Catalogue, nearest
from outsize.base.errors import RecipeError
from outsize.families.protocol import FAMILIES, BaseFamily, Component, without_depth
from outsize.formats.protocol import make_format
from outsize.placement.protocol import PLACEMENTS
from outsize.recipes.load import raise_faults
from outsize.recipes.recipe import Recipe
from outsize.recipes.yaml_tree import Fault

# Names only: train is of plan's own rank, and its plug-ins import torch.
_OPTIMIZERS = Catalogue("outsize.train.optimizers", "optimizer")
AUTO = "auto"  # the planner chooses among the placements


def base_family(name: str) -> BaseFamily:
    """A family that can be trained.

    Raises: RecipeError when there is none of that name, or it is a text encoder or codec.
    """
    family = FAMILIES.load(name)
    if not hasattr(family, "components"):
        raise RecipeError(f"{name!r} is a part of other models and cannot be trained by itself")
    return cast("BaseFamily", family)


def check_variant(family: str, variant: str) -> BaseFamily:
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
    """Check every name of a plug-in that a recipe uses.

    Raises: RecipeError that lists all faults at once, each with the nearest real name.
    """
    raise_faults(_faults(recipe), origin=origin)


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
    variant_faults = list(_fault("base.family", check_variant, base.family, base.variant))
    yield from variant_faults
    if not variant_faults:
        slots = {component.slot for component in components_of(recipe)}
        for slot in sorted(base.components.keys() - slots):
            yield Fault(None, f"base.components.{slot}", f"no such part; {nearest(slot, slots)}")
    if recipe.train.optimizer not in _OPTIMIZERS.names():
        hint = nearest(recipe.train.optimizer, _OPTIMIZERS.names())
        yield Fault(
            None, "train.optimizer", f"no optimizer is called {recipe.train.optimizer!r}; {hint}"
        )
    kinds = {AUTO, *PLACEMENTS.names()}
    if recipe.placement.kind not in kinds:
        hint = nearest(recipe.placement.kind, kinds)
        yield Fault(
            None, "placement.kind", f"no placement is called {recipe.placement.kind!r}; {hint}"
        )


def _fault(where: str, check: Callable[..., object], *arguments: object) -> Iterator[Fault]:
    """The fault that a check finds, if any."""
    try:
        check(*arguments)
    except RecipeError as error:
        yield Fault(None, where, str(error))
