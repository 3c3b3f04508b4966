"""A recipe as plain numbers: tokens, elements, bytes; everything an estimate needs, and nothing it must look up.

What depends on what is learned from, pictures or text, is the demand of the recipe's task (tasks/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from outsize.base.table import ShapeTable
from outsize.families.protocol import TrainedFamily
from outsize.plan.names import (
    TASKS,
    StatedOptimizer,
    base_family,
    check_names,
    components_of,
    optimizer_of,
)
from outsize.plan.pools import Holding, Item, Phase
from outsize.plan.sizes import (
    Found,
    ModelSizes,
    adapter_elements,
    model_sizes,
    vocabulary_tensors,
)
from outsize.recipes.adapter import AdapterChoice
from outsize.recipes.recipe import Recipe, rest_format

PreviewDecode = Literal["auto", "now", "end"]


@dataclass(frozen=True, slots=True)
class Conditioner:
    """A text encoder or image codec of the recipe's base."""

    slot: str
    kind: str
    family: str
    variant: str
    sizes: ModelSizes


class Demand(Protocol):
    """What a task asks of the machine: of the base in one pass, and around it. Numbers of one recipe.

    Every method is given the work that it belongs to.
    """

    @property
    def tokens(self) -> int:
        """Tokens of one pass over the blocks, all that goes through them, of the whole batch."""

    @property
    def others(self) -> Sequence[Demand]:
        """What else passes may be like, smaller and each as often; none: all are like this one."""

    @property
    def sample_tokens(self) -> int:
        """Tokens that go through the blocks at once while sampling."""

    @property
    def preview_tokens(self) -> int:
        """Tokens that go through the blocks at once for a preview while training; 0: none are made."""

    @property
    def preview_decode(self) -> PreviewDecode | None:
        """When previews are decoded; None: there is nothing to decode."""

    def mixing_flops(self, work: Work) -> Sequence[float]:
        """Operations of mixing tokens (attention, its projections left out) in each block, forward, in one pass."""

    def head_flops(self, work: Work) -> float:
        """Operations of one pass outside the blocks, forward and backward, where they are worth counting; else 0."""

    def training(self, work: Work, holding: Holding) -> Iterator[Item]:
        """What a training step holds beside the base: its batch, and what its loss takes."""

    def sampling(self, work: Work) -> Iterator[Item]:
        """What sampling holds beside the base."""

    def previewing(self, work: Work) -> Iterator[Item]:
        """What a preview holds beside the base and its training: the batch that comes next among it."""

    def decoding(self, work: Work) -> Iterator[Item]:
        """What decoding a preview takes, one picture at a time."""

    def before(self, work: Work, hold: Callable[[ModelSizes], Holding]) -> Iterator[Phase]:
        """Phases before training, after the stores are made. hold: how a conditioner's blocks are best held."""

    def after(self, work: Work) -> Iterator[Phase]:
        """Phases after sampling."""

    def disk(self, work: Work) -> Iterator[Item]:
        """What is written beside stores and checkpoints."""

    def notes(self, work: Work) -> Iterator[str]:
        """What a person should know of the plan."""


@dataclass(frozen=True, slots=True)
class Work:
    """One recipe on one kind of machine.

    averages: of the masters: kept on the device (a moving average), derived from the optimiser's state when they are looked
    at, or none. rows_by_block: rows of adapted matrices whose lengths are learned (DoRA); none: ().
    """

    has_gpu: bool
    base: ModelSizes
    conditioners: tuple[Conditioner, ...]
    demand: Demand
    batch: int
    accumulate: int
    adapter_by_block: tuple[int, ...]
    optimizer: str
    optimizer_bytes: int
    num_checkpoints: int
    num_vocabulary_elements: int
    averages: Literal["", "kept", "derived"] = ""
    rows_by_block: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of one pass over the blocks."""
        return self.demand.tokens

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation: bf16 on a GPU, fp32 on a CPU (bf16 is a hundred times slower on many)."""
        return 2 if self.has_gpu else 4

    def sizes_of(self, slot: str) -> ModelSizes:
        """Sizes of the base or of a conditioner."""
        if slot == "base":
            return self.base
        return next(part.sizes for part in self.conditioners if part.slot == slot)

    @property
    def num_adapter_elements(self) -> int:
        """Trainable numbers."""
        return sum(self.adapter_by_block)

    @property
    def checkpoint_bytes(self) -> int:
        """The adapter's fp32 masters, their average and the optimiser's state."""
        copies = 2 if self.averages else 1
        return self.num_adapter_elements * 4 * copies + self.optimizer_bytes


def work_of(
    recipe: Recipe,
    *,
    has_gpu: bool,
    num_samples: tuple[int, ...] | None = None,
    found: Mapping[str, Found] | None = None,
) -> Work:
    """Resolve a recipe to numbers; no torch, nothing opened.

    num_samples: of what there is to learn from, by set, where known. found: of sources that hold matrices in 4 bits, by slot.
    Raises: RecipeError for names that do not exist, an adapter that matches nothing, or data that the base cannot take.
    """
    check_names(recipe)
    family = base_family(recipe.base.family)
    conditioners = _conditioners(recipe, found or {})
    sizes = model_sizes(
        recipe.base.family,
        recipe.base.variant,
        recipe.base.format,
        rest_format("base"),
        (found or {}).get("base"),
    )
    table = family.table(recipe.base.variant)
    tensors = adapter_elements(table, recipe.adapter)
    optimizer = optimizer_of(recipe)
    return Work(
        has_gpu=has_gpu,
        base=sizes,
        conditioners=conditioners,
        demand=TASKS.load(family.objective).demand(recipe, conditioners, num_samples),
        batch=recipe.train.batch,
        accumulate=recipe.train.accumulate,
        adapter_by_block=tuple(
            sum(size for block, size in tensors if block == number)
            for number in range(len(sizes.blocks))
        ),
        optimizer=recipe.train.optimizer,
        # all masters lie in one tensor
        optimizer_bytes=optimizer.state_bytes(sum(size for _, size in tensors)),
        num_checkpoints=min(
            recipe.checkpoints.keep, math.ceil(recipe.train.steps / recipe.checkpoints.every)
        ),
        num_vocabulary_elements=_vocabulary_elements(recipe, family),
        averages=_averages(recipe, optimizer),
        rows_by_block=_learned_rows(table, recipe.adapter),
    )


def _averages(recipe: Recipe, optimizer: StatedOptimizer) -> Literal["", "kept", "derived"]:
    if recipe.train.ema is not None:
        return "kept"
    return "derived" if hasattr(optimizer, "averaged") else ""


def _learned_rows(table: ShapeTable, choice: AdapterChoice) -> tuple[int, ...]:
    if choice.kind != "dora":
        return ()
    ranks = choice.adapted(table)
    rows = [0] * table.num_blocks
    for spec in table.linears(choice.roles):
        if spec.module in ranks:
            rows[spec.block or 0] += spec.shape[0]
    return tuple(rows)


def _vocabulary_elements(recipe: Recipe, family: TrainedFamily) -> int:
    table = family.table(recipe.base.variant).by_name
    names = vocabulary_tensors(recipe.base.family, recipe.base.variant)
    return sum(table[name].num_elements for name in names)


def _conditioners(recipe: Recipe, known: Mapping[str, Found]) -> tuple[Conditioner, ...]:
    found = []
    for one in components_of(recipe):
        choice = recipe.base.component_format(one.slot, one.kind)
        sizes = model_sizes(
            one.family, one.variant, choice, rest_format(one.kind), known.get(one.slot)
        )
        found.append(Conditioner(one.slot, one.kind, one.family, one.variant, sizes))
    return tuple(found)
