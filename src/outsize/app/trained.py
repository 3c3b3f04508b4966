"""What a run has trained: its newest checkpoint, believed only by a recipe whose adapter it holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.base.errors import RecipeError
from outsize.runs.checkpoint import Checkpoint, newest_checkpoint, read_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder


def adapter_identity(recipe: Recipe) -> dict[str, Any]:
    """What an adapter's matrices do not tell: by how much they are scaled, and what they are attached to."""
    choice = recipe.adapter
    return {
        "kind": choice.kind,
        "rank": choice.rank,
        "alpha": choice.effective_alpha,
        "scaling": choice.scaling,
        "roles": sorted(choice.roles),
        "ranks": [one.model_dump(mode="json") for one in choice.ranks],
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
        f"{key} is {value}, was {had.get(key)}"
        for key, value in adapter_identity(recipe).items()
        if had.get(key) != value
    ]
    if changed:
        raise RecipeError(
            f"{path} was trained with other settings than this recipe's: {'; '.join(changed)}. Undo the change, "
            f"or name the run folder {run.path} in place of the recipe"
        )
    return path


def weights_of(checkpoint: Checkpoint, recipe: Recipe) -> Mapping[str, Tensor]:
    """The weights that a recipe wants used: averaged ones, where the run has kept an average and nobody wants the raw ones."""
    which = "averaged" if recipe.checkpoints.weights == "averaged" else "adapter"
    return checkpoint.groups.get(which, checkpoint.groups["adapter"])
