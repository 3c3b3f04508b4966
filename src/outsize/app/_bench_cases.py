"""The cases of a bench: recipes, made from a recipe file or from nothing but a family's name, one for each combination.

A case is a Recipe like any other, so that it is planned, held and computed as a training of it would be. Torch is not
imported here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.base.errors import RecipeError
from outsize.plan.names import TASKS, check_variant
from outsize.recipes.load import load_recipe, recipe_from_json

if TYPE_CHECKING:
    from outsize.plan.tasks.protocol import PlanTask
    from outsize.recipes.recipe import Recipe

NO_FILES = "synthetic"  # stands where a recipe names weights that nobody opens


def case_recipes(
    target: str, fixed: Mapping[str, Any], varied: Mapping[str, Sequence[Any]]
) -> list[Recipe]:
    """One recipe for each combination of the varied values, the last named one changing fastest.

    target: a recipe file, or FAMILY.VARIANT. fixed, varied: by dotted key of a recipe, as in "data.resolution"; a key that
    varies over nothing keeps the target's value.
    Raises: RecipeError for a target or a value that does not exist.
    """
    base = _base_values(target)
    for key, value in fixed.items():
        _set(base, key, value)
    axes = {key: values for key, values in varied.items() if values}
    recipes = []
    for chosen in itertools.product(*axes.values()):
        values = recipe_from_json(base, origin="bench").to_json()
        for key, value in zip(axes, chosen, strict=True):
            _set(values, key, value)
        recipes.append(recipe_from_json(values, origin="bench"))
    return recipes


def _base_values(target: str) -> dict[str, Any]:
    if Path(target).is_file():
        return load_recipe(Path(target)).to_json()
    family, dot, variant = target.partition(".")
    if not dot or target.endswith((".yaml", ".yml")):
        raise RecipeError(
            f"{target!r} is neither a recipe file nor FAMILY.VARIANT; write a path, or a name as in 'flux2.dev'"
        )
    task: PlanTask = TASKS.load(check_variant(family, variant).objective)
    return {
        "name": "bench",
        "base": {"family": family, "variant": variant, "source": NO_FILES},
        "data": dict(task.synthetic),
    }


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *path, leaf = key.split(".")
    section = values
    for name in path:
        section = section.setdefault(name, {})
    section[leaf] = value
