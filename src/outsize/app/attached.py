"""The recipe's adapter on its base: attached, filled with what was trained, and with what trains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from outsize.adapters.adapter import Adapter, AdapterShape
from outsize.app.parts import BASE
from outsize.app.trained import trained_checkpoint, weights_of
from outsize.plan.names import base_family
from outsize.runs.checkpoint import read_checkpoint
from outsize.train.optimizers.protocol import OptimizerSettings
from outsize.train.update import Update

if TYPE_CHECKING:
    from outsize.app.models import Training
    from outsize.app.site import Site
    from outsize.base.table import ShapeTable
    from outsize.devices.protocol import Device
    from outsize.layers.model import FrozenModel
    from outsize.recipes.adapter import AdapterChoice
    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder


@contextmanager
def adapted(
    site: Site, training: Training | None = None
) -> Iterator[tuple[FrozenModel, Adapter, dict[str, Tensor]]]:
    """The base with a fresh adapter of the recipe's shape, and that one's unrounded values, for the time of the block.

    training: as the plan says for it; without it the model computes as other programs will, which the adapter is for, and
    the adapter has the shape of what is worn, if anything is.
    """
    with site.opened(BASE, training) as model:
        shape = None if training is not None or site.worn is None else worn_shape(site)
        adapter, initial = attach_adapter(site.recipe, site.device, model, shape)
        site.waypoints.mark("adapter attached")
        site.journal.write(
            "adapter", modules=len(adapter.paths), parameters=adapter.num_parameters,
            rank=adapter.shape.rank, alpha=adapter.shape.alpha,
        )  # fmt: skip
        site.progress.say(
            f"adapter: {len(adapter.paths)} modules, {adapter.num_parameters:,} parameters, "
            f"rank {adapter.shape.rank}"
        )
        yield model, adapter, initial


def attach_adapter(
    recipe: Recipe, device: Device, model: FrozenModel, shape: AdapterShape | None = None
) -> tuple[Adapter, dict[str, Tensor]]:
    """A fresh adapter on the base, of the recipe's shape or another, and its unrounded values (fp32, on the host)."""
    base = recipe.base
    table = base_family(base.family).table(base.variant)
    adapter = Adapter(model.module, table, shape or adapter_shape(recipe.adapter, table))
    initial = adapter.materialise_(
        seed=recipe.train.seed,
        device=device.torch_device,
        dtype=device.compute_dtype,
        row_squares=model.row_squares(adapter.paths) if adapter.needs_row_squares else None,
    )
    return adapter, initial


def adapter_shape(choice: AdapterChoice, table: ShapeTable) -> AdapterShape:
    """The shape that a recipe's adapter has on a base."""
    kept = choice.adapted(table)
    ranks = {spec.module: kept.get(spec.module, (0, 1.0)) for spec in table.linears(choice.roles)}
    same = (choice.rank, choice.effective_alpha)
    return AdapterShape(
        *same,
        choice.roles,
        ranks={path: one for path, one in ranks.items() if one != same},
        scaling=choice.scaling,
        kind=choice.kind,
    )


def make_update(recipe: Recipe, adapter: Adapter, initial: Mapping[str, Tensor]) -> Update:
    """Masters and optimiser of an adapter, as the recipe says."""
    train = recipe.train
    settings = OptimizerSettings(
        learning_rate=train.learning_rate,
        betas=train.betas,
        epsilon=train.epsilon,
        weight_decay=train.weight_decay,
    )
    return Update(
        adapter.parameters(), initial, train.optimizer, settings, train.optimizer_options, train.ema
    )


def worn_shape(site: Site) -> AdapterShape:
    """The shape of the adapter that is worn: a rank of its own for every module, none for the others."""
    worn, base = site.worn, site.recipe.base
    assert worn is not None, "asked for where one is worn"
    specs = base_family(base.family).table(base.variant).linears()
    ranks = {spec.module: (0, 1.0) for spec in specs}
    ranks |= {module: (pair.rank, worn.scale * pair.rank) for module, pair in worn.pairs.items()}
    roles = tuple(dict.fromkeys(spec.role for spec in specs))
    return AdapterShape(worn.rank, worn.alpha, roles, ranks)


def require_adapter(site: Site, run: RunFolder) -> None:
    """Refuse to sample without an adapter, before any model is opened.

    Raises: RecipeError as `trained_checkpoint` says, where none is worn.
    """
    if site.worn is None:
        trained_checkpoint(site.recipe, run)


def put_on_(site: Site, run: RunFolder, adapter: Adapter) -> None:
    """Put values into the adapter: those that are worn, or the newest checkpoint's.

    Raises: RecipeError as `trained_checkpoint` says.
    """
    if site.worn is None:
        load_adapter_(site.recipe, run, adapter)
        return
    pairs = site.worn.pairs.items()
    values = {f"{module}.lora_A": pair.A.float() for module, pair in pairs}
    adapter.load_(values | {f"{module}.lora_B": pair.B.float() for module, pair in pairs})


def load_adapter_(recipe: Recipe, run: RunFolder, adapter: Adapter) -> int:
    """Put the newest checkpoint's values into the adapter; the step they are of.

    Raises: RecipeError as `trained_checkpoint` says.
    """
    checkpoint = read_checkpoint(trained_checkpoint(recipe, run))
    adapter.load_(dict(weights_of(checkpoint, recipe)))
    return checkpoint.step
