"""Give a run's adapter to other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outsize.app.parts import BASE, parts_of
from outsize.app.tasks.protocol import task_of
from outsize.app.trained import trained_checkpoint
from outsize.base.layout import Layout
from outsize.dialects.protocol import DIALECTS, AdapterWeights, LoraPair
from outsize.export.export import Exported, export_adapter
from outsize.recipes.recipe import Recipe
from outsize.runs.checkpoint import read_checkpoint
from outsize.runs.folder import RunFolder
from outsize.weights.locate import parse_hub_id


@dataclass(frozen=True, slots=True)
class Given:
    """What was given away. named_for: upstream's class whose module paths the files use, where there are several."""

    exported: Exported
    named_for: str | None


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """A run's adapter under our module paths. metadata: what its file may tell of it; see `export_adapter`."""

    weights: AdapterWeights
    metadata: dict[str, str]


def trained_adapter(recipe: Recipe, run: RunFolder) -> TrainedAdapter:
    """The adapter of a run's newest checkpoint.

    Raises: RecipeError when the run has no checkpoint, or one of another adapter than the recipe's.
    """
    checkpoint = read_checkpoint(trained_checkpoint(recipe, run))
    tensors, identity = checkpoint.groups["adapter"], checkpoint.values["identity"]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    pairs = {
        module: LoraPair(tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"])
        for module in modules
    }
    weights = AdapterWeights(pairs, recipe.adapter.rank, recipe.adapter.effective_alpha)
    metadata = {
        "base": f"{recipe.base.family}.{recipe.base.variant}",
        "base_key": identity["base"],
        "recipe": recipe.digest(),
        "data": identity["manifest"],
        "step": str(checkpoint.step),
    }
    hub_id = None if Path(recipe.base.source).exists() else parse_hub_id(recipe.base.source)
    if hub_id is not None:
        metadata["source"] = hub_id.repo
    return TrainedAdapter(weights, metadata)


def export_run(recipe: Recipe, run: RunFolder, dialect: str, target: Path) -> Given:
    """Write the newest checkpoint's adapter in a dialect, proved by reading it back.

    Raises: as `trained_adapter`; AdapterError as `export_adapter` says.
    """
    return give(recipe, trained_adapter(recipe, run), dialect, target)


def give(recipe: Recipe, trained: TrainedAdapter, dialect: str, target: Path) -> Given:
    """Write an adapter of the recipe's base in a dialect, proved by reading it back.

    Raises: AdapterError as `export_adapter` says.
    """
    naming, metadata = task_of(recipe).naming(recipe), dict(trained.metadata)
    pairs = {naming.path_of(module): pair for module, pair in trained.weights.pairs.items()}
    adapter = AdapterWeights(pairs, trained.weights.rank, trained.weights.alpha)
    if naming.peft_task is not None:
        metadata["task"] = naming.peft_task
    base = parts_of(recipe)[BASE]
    # names that are those of a client already need no layout to find them
    layouts = base.family.layouts(base.variant) if naming.layout is None else (Layout("client"),)
    made = export_adapter(adapter, dialect, layouts, target, metadata)
    return Given(made, naming.named_for)


def place_of(recipe: Recipe, run: RunFolder, dialect: str) -> Path:
    """Where an export goes when nobody says: a folder or file in the run folder, named by run and dialect."""
    is_folder = DIALECTS.load(dialect).is_folder
    name = f"{recipe.name}-{dialect}"
    return run.path / "export" / (name if is_folder else f"{name}.safetensors")
