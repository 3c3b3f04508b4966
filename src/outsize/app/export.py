"""Give a run's adapter to other programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.app.contents import SEPARATOR, items_of
from outsize.app.parts import BASE, parts_of
from outsize.app.people import People, people_in, shown_by_run
from outsize.app.tasks.protocol import task_of
from outsize.app.trained import trained_checkpoint, weights_of
from outsize.base.layout import Layout
from outsize.dialects._factors import scaled
from outsize.dialects.protocol import DIALECTS, AdapterWeights, LoraPair, plain_pairs
from outsize.export.export import Exported, export_adapter
from outsize.plan.names import base_family
from outsize.recipes.recipe import Recipe
from outsize.runs.checkpoint import read_checkpoint
from outsize.runs.folder import RunFolder
from outsize.weights.locate import parse_hub_id

if TYPE_CHECKING:
    from torch import Tensor


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


def trained_adapter(
    recipe: Recipe, run: RunFolder, *, takes_lengths: bool = False
) -> TrainedAdapter:
    """The adapter of a run's newest checkpoint, of averaged weights where the recipe wants these used.

    takes_lengths: the caller knows what to do with lengths of rows (DoRA).
    Raises: RecipeError when the run has no checkpoint, or one of another adapter than the recipe's; AdapterError for DoRA
    where it cannot be taken.
    """
    checkpoint = read_checkpoint(trained_checkpoint(recipe, run))
    shown = frozenset({*recipe.people.subjects, *shown_by_run(run)})
    weights = replace(adapter_weights(weights_of(checkpoint, recipe), recipe), subjects=shown)
    if not takes_lengths:
        plain_pairs(weights, "such adapters are only sampled and exported as they are")
    identity = checkpoint.values["identity"]
    metadata = {
        "base": f"{recipe.base.family}.{recipe.base.variant}",
        "base_key": identity["base"],
        "recipe": recipe.digest(),
        "data": identity["manifest"],
        "step": str(checkpoint.step),
    }
    if "provenance" in identity:
        metadata["provenance"] = identity["provenance"]
    hub_id = None if Path(recipe.base.source).exists() else parse_hub_id(recipe.base.source)
    if hub_id is not None:
        metadata["source"] = hub_id.repo
    return TrainedAdapter(weights, metadata)


def export_run(recipe: Recipe, run: RunFolder, dialect: str, target: Path) -> Given:
    """Write the newest checkpoint's adapter in a dialect, proved by reading it back.

    Raises: as `trained_adapter`; AdapterError as `export_adapter` says.
    """
    return give(recipe, trained_adapter(recipe, run, takes_lengths=True), dialect, target)


def give(recipe: Recipe, trained: TrainedAdapter, dialect: str, target: Path) -> Given:
    """Write an adapter of the recipe's base in a dialect, proved by reading it back.

    Raises: AdapterError as `export_adapter` says; ConsentMissing when somebody whom it shows has not agreed.
    """
    people = people_in(recipe, trained.weights.subjects)
    people.begin("export", into=str(target))
    naming, metadata = task_of(recipe).naming(recipe), dict(trained.metadata)
    pairs = {naming.path_of(module): pair for module, pair in trained.weights.pairs.items()}
    lengths = {naming.path_of(module): one for module, one in trained.weights.lengths.items()}
    adapter = AdapterWeights(pairs, trained.weights.rank, trained.weights.alpha, lengths)
    if naming.peft_task is not None:
        metadata["task"] = naming.peft_task
    base = parts_of(recipe)[BASE]
    # names that are those of a client already need no layout to find them
    layouts = base.family.layouts(base.variant) if naming.layout is None else (Layout("client"),)
    made = let_out(adapter, dialect, layouts, target, metadata=metadata, people=people)
    return Given(made, naming.named_for)


def let_out(
    adapter: AdapterWeights,
    dialect: str,
    layouts: Sequence[Layout],
    target: Path,
    *,
    metadata: Mapping[str, str],
    people: People,
) -> Exported:
    """Write an adapter that was asked for, which says whom it shows; asks again before it is there.

    Raises: AdapterError as `export_adapter` says; ConsentMissing.
    """
    stated = {"subjects": SEPARATOR.join(people.subjects)} if people.subjects else {}

    def release(written: Path) -> None:
        if people.subjects:
            people.release("export", "export", items_of(written, lies_at=target))

    return export_adapter(
        adapter, dialect, layouts, target, {**metadata, **stated}, release=release
    )


def adapter_weights(tensors: Mapping[str, Tensor], recipe: Recipe) -> AdapterWeights:
    """The adapter of trained tensors, with one scale for all modules.

    rsLoRA's root of the rank goes into alpha, which every client reads; a module whose own rule gives another scale has
    the quotient in its B, rounded once.
    """
    choice, base = recipe.adapter, recipe.base
    kept = choice.adapted(base_family(base.family).table(base.variant))
    scale = choice.scale_of(choice.rank, choice.effective_alpha)
    pairs = {
        module: scaled(
            LoraPair(tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]),
            _quotient(choice.scale_of(*ranked), scale),
        )
        for module, ranked in kept.items()
    }
    lengths = (
        {module: tensors[f"{module}.magnitude"] for module in kept} if choice.kind == "dora" else {}
    )
    return AdapterWeights(pairs, choice.rank, scale * choice.rank, lengths)


def _quotient(own: float, common: float) -> float:
    return 1.0 if math.isclose(own, common, rel_tol=1e-12) else own / common


def place_of(recipe: Recipe, run: RunFolder, dialect: str) -> Path:
    """Where an export goes when nobody says: a folder or file in the run folder, named by run and dialect."""
    is_folder = DIALECTS.load(dialect).is_folder
    name = f"{recipe.name}-{dialect}"
    return run.path / "export" / (name if is_folder else f"{name}.safetensors")
