"""What a run has trained: its newest checkpoint, believed only by a recipe whose adapter it holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.base.errors import RecipeError
from outsize.runs.checkpoint import newest_checkpoint, read_values

if TYPE_CHECKING:
    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder


def adapter_identity(recipe: Recipe) -> dict[str, Any]:
    """What an adapter's matrices do not tell: by how much they are scaled, and what they are attached to."""
    choice = recipe.adapter
    return {
        "rank": choice.rank,
        "alpha": choice.effective_alpha,
        "roles": sorted(choice.roles),
        "family": recipe.base.family,
        "variant": recipe.base.variant,
    }


def trained_checkpoint(recipe: Recipe, run: RunFolder) -> Path:
    """The folder of the newest checkpoint that verifies; opens no model.

    Raises: RecipeError when there is none, or when it was trained with another adapter or base than the recipe says.
    """
    path, faults = newest_checkpoint(run.checkpoints)
    if path is None:
        more = f" that is whole ({'; '.join(faults)})" if faults else ""
        raise RecipeError(f"{run.path} has no checkpoint{more}; train first")
    identity = read_values(path)["identity"]
    had = identity["adapter"]
    changed = [
        f"{key} is {value}, was {had[key]}"
        for key, value in adapter_identity(recipe).items()
        if had[key] != value
    ]
    if changed:
        raise RecipeError(
            f"{path} was trained with other settings than this recipe's: {'; '.join(changed)}. Undo the change, "
            f"or name the run folder {run.path} in place of the recipe"
        )
    return path
