"""A recipe as plain numbers: tokens, elements, pixels; everything an estimate needs, and nothing it must look up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from outsize.base.errors import RecipeError
from outsize.families.protocol import FAMILIES, BaseFamily, ImageCodec
from outsize.plan.names import OPTIMIZERS, check_names
from outsize.plan.sizes import ModelSizes, adapter_elements, model_sizes
from outsize.recipes.recipe import Recipe, rest_format

# Pictures smaller than this are sampled and decoded several at a time, as many as make up its pixels.
_PIXELS_TOGETHER = 512 * 512


@dataclass(frozen=True, slots=True)
class Conditioner:
    """A text encoder or image codec of the recipe's base."""

    slot: str
    kind: str
    family: str
    variant: str
    sizes: ModelSizes


@dataclass(frozen=True, slots=True)
class Work:
    """One recipe on one kind of machine. tokens: of one pass over the blocks, batch and text included."""

    has_gpu: bool
    base: ModelSizes
    conditioners: tuple[Conditioner, ...]
    tokens: int
    text_tokens: int
    sample_tokens: int
    pixels: int
    sample_pixels: int
    latent_elements: int
    condition_elements: int
    batch: int
    accumulate: int
    adapter_by_block: tuple[int, ...]
    optimizer: str
    optimizer_bytes: int
    num_checkpoints: int
    num_pictures: int | None

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
        """The adapter's fp32 masters and the optimiser's state."""
        return self.num_adapter_elements * 4 + self.optimizer_bytes

    @property
    def batch_bytes(self) -> int:
        """Clean latents, noise, their mixture and the prediction in fp32, and embeddings in the compute type."""
        each = 4 * 4 * self.latent_elements + self.condition_elements * self.compute_bytes
        return self.batch * each


def work_of(recipe: Recipe, *, has_gpu: bool, num_pictures: int | None = None) -> Work:
    """Resolve a recipe to numbers; no torch, nothing opened.

    Raises: RecipeError for names that do not exist, an adapter that matches nothing, or pictures smaller than a token.
    """
    check_names(recipe)
    family = cast("BaseFamily", FAMILIES.load(recipe.base.family))
    variant = recipe.base.variant
    conditioners = _conditioners(recipe, family)
    sizes = model_sizes(recipe.base.family, variant, recipe.base.format, rest_format("base"))
    conditions = family.condition_shapes(variant)
    text_tokens = sum(shape[0] for shape in conditions.values() if len(shape) == 2)
    side = recipe.data.resolution
    wide, high = recipe.compare.width or side, recipe.compare.height or side
    latent = _latent_shape(conditioners, height=side, width=side)
    sample_latent = _latent_shape(conditioners, height=high, width=wide)
    together = max(1, _PIXELS_TOGETHER // (wide * high))
    tensors = _adapter_tensors(recipe, family)
    return Work(
        has_gpu=has_gpu,
        base=sizes,
        conditioners=conditioners,
        tokens=recipe.train.batch * (family.num_tokens(variant, latent) + text_tokens),
        text_tokens=text_tokens,
        sample_tokens=together * (family.num_tokens(variant, sample_latent) + text_tokens),
        pixels=side * side,
        sample_pixels=together * wide * high,
        latent_elements=math.prod(latent),
        condition_elements=_elements(conditions),
        batch=recipe.train.batch,
        accumulate=recipe.train.accumulate,
        adapter_by_block=tuple(
            sum(size for block, size in tensors if block == number)
            for number in range(len(sizes.blocks))
        ),
        optimizer=recipe.train.optimizer,
        optimizer_bytes=sum(
            count * state_bytes(recipe.train.optimizer, size)
            for size, count in Counter(size for _, size in tensors).items()
        ),
        num_checkpoints=min(
            recipe.checkpoints.keep, math.ceil(recipe.train.steps / recipe.checkpoints.every)
        ),
        num_pictures=num_pictures,
    )


def state_bytes(optimizer: str, elements: int) -> int:
    """State of one adapter tensor, as the optimiser's plug-in tells."""
    return int(OPTIMIZERS.load(optimizer).state_bytes(elements))


def _conditioners(recipe: Recipe, family: BaseFamily) -> tuple[Conditioner, ...]:
    found = []
    for one in family.components(recipe.base.variant):
        choice = recipe.base.component_format(one.slot, one.kind)
        sizes = model_sizes(one.family, one.variant, choice, rest_format(one.kind))
        found.append(Conditioner(one.slot, one.kind, one.family, one.variant, sizes))
    return tuple(found)


def _latent_shape(
    conditioners: tuple[Conditioner, ...], *, height: int, width: int
) -> tuple[int, int, int]:
    """Latent of one picture, its sides cut to what the codec takes."""
    part = next(one for one in conditioners if one.kind == "image")
    codec = cast("ImageCodec", FAMILIES.load(part.family))
    multiple = codec.pixel_multiple(part.variant)
    if min(height, width) < multiple:
        raise RecipeError(
            f"pictures of {width} x {height} pixels are smaller than one token of {part.family} "
            f"({multiple} pixels); raise data.resolution, or compare.width and compare.height"
        )
    return codec.latent_shape(
        part.variant, height // multiple * multiple, width // multiple * multiple
    )


def _adapter_tensors(recipe: Recipe, family: BaseFamily) -> tuple[tuple[int, int], ...]:
    table = family.table(recipe.base.variant)
    tensors = adapter_elements(table, recipe.adapter.rank, recipe.adapter.roles)
    if not tensors:
        there = sorted({spec.role for spec in table.linears()})
        raise RecipeError(
            f"adapter.roles {list(recipe.adapter.roles)} match no linear inside the blocks of "
            f"{recipe.base.family}.{recipe.base.variant}, so nothing would be trained; "
            f"there are {', '.join(there)}"
        )
    return tensors


def _elements(conditions: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in conditions.values())
