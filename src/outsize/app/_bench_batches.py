"""Batches for measuring where there is nothing to learn from: random, of a recipe's shapes, a function of step and place."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from outsize.app._bench_weights import SEED, latent_shape
from outsize.data.batches import Batch
from outsize.data.text_corpus import TextBatch
from outsize.families.protocol import FAMILIES, BaseFamily, LanguageFamily

if TYPE_CHECKING:
    from outsize.devices.protocol import Device
    from outsize.recipes.recipe import Recipe

_NUM_BATCHES = 4  # different ones, used in turn
_DOCUMENTS = 8  # of a packed row, on average


class RandomBatches:
    """Latents and embeddings."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        base = cast("BaseFamily", FAMILIES.load(recipe.base.family))
        variant, batch = recipe.base.variant, recipe.train.batch
        latent = latent_shape(base, variant, recipe.pictures.largest)
        generator = torch.Generator().manual_seed(SEED)
        self._accumulate = recipe.train.accumulate
        self._batches = [
            Batch(
                latents_BCHW=torch.randn((batch, *latent), generator=generator),
                conditions={
                    name: torch.randn((batch, *shape), generator=generator).to(device.compute_dtype)
                    for name, shape in base.condition_shapes(variant).items()
                },
                loss_weight_B=torch.ones(batch),
                seeds=tuple(range(number * batch, (number + 1) * batch)),
            )
            for number in range(_NUM_BATCHES)
        ]

    def batch(self, step: int, place: int) -> Batch:
        """One of a few batches that are kept ready, as a corpus keeps its last ones."""
        return self._batches[(step * self._accumulate + place) % len(self._batches)]


class RandomTexts:
    """Packed rows, full to the window: documents of all lengths where the recipe packs, otherwise one a row.

    Every token but the first of a document is trained, as of plain text.
    """

    def __init__(self, recipe: Recipe) -> None:
        base = cast("LanguageFamily", FAMILIES.load(recipe.base.family))
        self._vocabulary = base.vocabulary(recipe.base.variant)
        self._window, self._is_packed = recipe.texts.window, recipe.texts.pack
        self._accumulate = recipe.train.accumulate
        generator = torch.Generator().manual_seed(SEED)
        self._batches = [self._draw(recipe.train.batch, generator) for _ in range(_NUM_BATCHES)]

    def batch(self, step: int, place: int) -> TextBatch:
        """One of a few batches."""
        return self._batches[(step * self._accumulate + place) % len(self._batches)]

    def num_trained(self, step: int) -> int:
        """Labels of a whole update."""
        places = range(self._accumulate)
        return sum(int((self.batch(step, place).labels >= 0).sum()) for place in places)

    def _draw(self, rows: int, generator: torch.Generator) -> TextBatch:
        shape = (rows, self._window)
        ids = torch.randint(0, self._vocabulary, shape, generator=generator)
        begins = torch.zeros(shape, dtype=torch.bool)
        if self._is_packed:
            begins = torch.rand(shape, generator=generator) < _DOCUMENTS / self._window
        begins[:, 0] = True
        places = torch.arange(self._window)
        starts = places.where(begins, 0).cummax(dim=1).values
        labels = torch.full(shape, -100)
        labels[:, :-1] = ids[:, 1:].masked_fill(begins[:, 1:], -100)
        return TextBatch(
            input_ids=ids,
            labels=labels,
            position_ids=places - starts,
            segments=(begins.cumsum(dim=1) - 1).int(),
            loss_weight_B=torch.ones(rows),
        )
