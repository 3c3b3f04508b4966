"""The corpus: manifest, cache and schedule joined. It gives the batch of a step and runs no encoder.

Dimensions: B batch, C channels, H W latent height and width; conditions are batch first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import RecipeError, StoreBroken
from outsize.data.cache import ContentCache
from outsize.data.encode import LATENT, latent_key, text_key
from outsize.data.held_out import level_seed
from outsize.data.manifest import Manifest, Picture
from outsize.data.masks import MASK, mask_key, weights_of
from outsize.data.samples import Sample, flips_of
from outsize.data.schedule import Item, Schedule


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, on the CPU, as the encoders gave it. seeds: of each sample's noise.

    cell_weight_B1HW: factor on the loss in each latent cell; None where no sample has a mask.
    """

    latents_BCHW: Tensor
    conditions: dict[str, Tensor]
    loss_weight_B: Tensor
    seeds: tuple[int, ...]
    cell_weight_B1HW: Tensor | None = None


class Corpus:
    """The batch of step n."""

    def __init__(
        self,
        manifest: Manifest,
        samples: Sequence[Sample],
        schedule: Schedule,
        cache: ContentCache,
        *,
        latent_inputs: Mapping[str, Any],
        text_inputs: Sequence[Mapping[str, Any]],
        held_out: Sequence[int] = (),
        memory_bytes: int = 256 << 20,
    ) -> None:
        """Join what the caching stages were called with.

        held_out: places in the samples of what is measured, in order.
        latent_inputs, text_inputs: the key inputs of the image encoder and of each text encoder.
        memory_bytes: how much of the cache is kept in memory (the most recently used).
        """
        self.manifest = manifest
        self.schedule = schedule
        self._cache = cache
        self._samples = tuple(samples)
        self._latent_inputs = latent_inputs
        self._text_inputs = tuple(text_inputs)
        self._held_out = tuple(held_out)
        self._memory = _Memory(memory_bytes)

    @property
    def num_held_out(self) -> int:
        """Pictures that are measured, each counted at each resolution."""
        return len(self._held_out)

    def held_out(self, number: int, level: int) -> Batch:
        """A picture that is measured, alone, with the noise that belongs to it at a level; never mirrored if it can be helped.

        Raises: StoreBroken as `batch`.
        """
        place = self._held_out[number]
        sample = self._samples[place]
        picture = self.manifest.pictures[sample.picture]
        seed = level_seed(picture.digest, level)
        is_flipped = flips_of(self.manifest, sample)[0]
        return self._batch((Item(place, False, seed, picture.set_index, 0, is_flipped),))

    def batch(self, step: int, place: int) -> Batch:
        """The micro-batch `place` of a step, counted from 0.

        Raises: StoreBroken naming picture or caption when its cache entry is absent or broken; a
        broken one is discarded, so that starting again encodes exactly that one anew.
        """
        return self._batch(self.schedule.micro_batch(step, place).items)

    def _batch(self, items: Sequence[Item]) -> Batch:
        pictures = [self._picture(item) for item in items]
        captions = tuple(self._caption(item) for item in items)
        latents_BCHW = torch.stack([self._latent(item) for item in items])
        weights = [self.manifest.set_of(one).loss_weight * one.weight for one in pictures]
        return Batch(
            latents_BCHW=latents_BCHW,
            conditions=_stack([self._embeddings(caption) for caption in captions], captions),
            loss_weight_B=torch.tensor(weights, dtype=torch.float32),
            seeds=tuple(item.noise_seed for item in items),
            cell_weight_B1HW=self._cell_weights(items, latents_BCHW),
        )

    def pictures_of(self, step: int) -> list[str]:
        """Files of the pictures that a step draws, in order; reads nothing."""
        places = range(self.schedule.accumulate)
        items = [item for place in places for item in self.schedule.micro_batch(step, place).items]
        return [str(self._picture(item).origin) for item in items]

    def resolutions_of(self, step: int) -> tuple[int, ...]:
        """The resolution of each of a step's micro-batches, the smallest first; reads nothing."""
        places = range(self.schedule.accumulate)
        first = (self.schedule.micro_batch(step, place).items[0] for place in places)
        return tuple(sorted(self._samples[one.picture].resolution for one in first))

    def cached(self) -> Iterator[Path]:
        """Entries of all latents that there are, mirrored ones among them."""
        for sample in self._samples:
            for is_flipped in (False, True):
                path = self._cache.path(self._latent_key(sample, is_flipped=is_flipped))
                if path.exists():
                    yield path

    def _latent_key(self, sample: Sample, *, is_flipped: bool) -> str:
        picture = self.manifest.pictures[sample.picture]
        return latent_key(
            self._cache,
            picture,
            sample.crop,
            self._latent_inputs,
            background=self.manifest.set_of(picture).background,
            is_flipped=is_flipped,
        )

    def _picture(self, item: Item) -> Picture:
        return self.manifest.pictures[self._samples[item.picture].picture]

    def _caption(self, item: Item) -> str:
        return "" if item.drops_caption else self._picture(item).caption

    def _latent(self, item: Item) -> Tensor:
        key = self._latent_key(self._samples[item.picture], is_flipped=item.is_flipped)
        return self._entry(key, f"the picture {self._picture(item).origin}")[LATENT]

    def _cell_weights(self, items: Sequence[Item], latents_BCHW: Tensor) -> Tensor | None:
        """Weights (B, 1, H, W), ones for samples without a mask; None where none has one."""
        if all(self._picture(item).mask is None for item in items):
            return None
        grid = (int(latents_BCHW.shape[2]), int(latents_BCHW.shape[3]))
        return torch.stack([self._cells(item, grid) for item in items])[:, None]

    def _cells(self, item: Item, grid: tuple[int, int]) -> Tensor:
        picture = self._picture(item)
        if picture.mask is None:
            return torch.ones(grid)
        key = mask_key(self._cache, picture.mask, self._samples[item.picture].crop, grid)
        mask_HW = self._entry(key, f"the mask {picture.mask.origin}")[MASK]
        shown_HW = mask_HW.flip(-1) if item.is_flipped else mask_HW
        return weights_of(shown_HW, self.manifest.set_of(picture))

    def _embeddings(self, text: str) -> dict[str, Tensor]:
        """Tensors of all text encoders; no two give the same name."""
        merged: dict[str, Tensor] = {}
        for inputs in self._text_inputs:
            entry = self._entry(text_key(self._cache, text, inputs), f"the caption {text!r}")
            assert not merged.keys() & entry.keys(), "text encoders give different names"
            merged.update(entry)
        return merged

    def _entry(self, key: str, owner: str) -> dict[str, Tensor]:
        held = self._memory.get(key)
        if held is not None:
            return held
        try:
            entry = self._cache.get(key)
        except StoreBroken as error:
            self._cache.discard(key)
            raise StoreBroken(
                f"{owner} cannot be trained on: {error}. The entry was discarded; start again and "
                "only it is encoded anew"
            ) from error
        if entry is None:
            raise StoreBroken(
                f"{owner} is not in the cache ({self._cache.path(key)}); start again and only "
                "what is missing is encoded"
            )
        self._memory.put(key, entry)
        return entry


class _Memory:
    """The most recently used entries, up to a number of bytes; any thread may ask."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> dict[str, Tensor] | None:
        with self._lock:
            entry = self._held.get(key)
            if entry is not None:
                self._held.move_to_end(key)
            return entry

    def put(self, key: str, entry: dict[str, Tensor]) -> None:
        with self._lock:
            if key in self._held:
                return
            self._held[key] = entry
            self._num_bytes += _num_bytes(entry)
            while self._num_bytes > self._limit_bytes:
                self._num_bytes -= _num_bytes(self._held.popitem(last=False)[1])


def _num_bytes(entry: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in entry.values())


def _stack(rows: Sequence[Mapping[str, Tensor]], texts: Sequence[str]) -> dict[str, Tensor]:
    """Stack embeddings by name. Raises: RecipeError when texts of a batch differ in shape."""
    stacked = {}
    for name in rows[0]:
        shapes = {tuple(row[name].shape) for row in rows}
        if len(shapes) > 1:
            raise RecipeError(
                f"embeddings {name!r} of one batch have the shapes {sorted(shapes)}, so they cannot "
                f"be stacked ({', '.join(map(repr, texts))}); train with batch 1"
            )
        stacked[name] = torch.stack([row[name] for row in rows])
    return stacked
