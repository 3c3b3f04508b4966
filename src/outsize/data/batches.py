"""The corpus: manifest, cache and schedule joined. It gives the batch of a step and runs no encoder.

Dimensions: B batch, C channels, H W latent height and width; conditions are batch first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import RecipeError, StoreBroken
from outsize.data.buckets import CropPlan
from outsize.data.cache import ContentCache
from outsize.data.encode import LATENT, latent_key, text_key
from outsize.data.manifest import Manifest
from outsize.data.schedule import Entry, Item, Schedule


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, on the CPU, as the encoders gave it. seeds: of each sample's noise."""

    latents_BCHW: Tensor
    conditions: dict[str, Tensor]
    loss_weight_B: Tensor
    seeds: tuple[int, ...]


def make_schedule(
    manifest: Manifest,
    crops: Sequence[CropPlan],
    *,
    seed: int,
    batch: int = 1,
    accumulate: int = 1,
    caption_dropout: float = 0.0,
) -> Schedule:
    """The schedule over a manifest's pictures, in its order, with its sets' shares."""
    entries = [
        Entry(picture.set_index, crop.bucket)
        for picture, crop in zip(manifest.pictures, crops, strict=True)
    ]
    return Schedule(
        seed,
        entries,
        batch=batch,
        accumulate=accumulate,
        caption_dropout=caption_dropout,
        shares=[item.share for item in manifest.sets],
    )


class Corpus:
    """The batch of step n."""

    def __init__(
        self,
        manifest: Manifest,
        crops: Sequence[CropPlan],
        schedule: Schedule,
        cache: ContentCache,
        *,
        latent_inputs: Mapping[str, Any],
        text_inputs: Sequence[Mapping[str, Any]],
        memory_bytes: int = 256 << 20,
    ) -> None:
        """Join what the caching stages were called with.

        latent_inputs, text_inputs: the key inputs of the image encoder and of each text encoder.
        memory_bytes: how much of the cache is kept in memory (the most recently used).
        """
        self.manifest = manifest
        self.schedule = schedule
        self._cache = cache
        self._latent_keys = tuple(
            latent_key(cache, picture, crop, latent_inputs)
            for picture, crop in zip(manifest.pictures, crops, strict=True)
        )
        self._text_inputs = tuple(text_inputs)
        self._memory = _Memory(memory_bytes)

    def batch(self, step: int, place: int) -> Batch:
        """The micro-batch `place` of a step, counted from 0.

        Raises: StoreBroken naming picture or caption when its cache entry is absent or broken; a
        broken one is discarded, so that starting again encodes exactly that one anew.
        """
        micro = self.schedule.micro_batch(step, place)
        pictures = [self.manifest.pictures[item.picture] for item in micro.items]
        captions = tuple(self._caption(item) for item in micro.items)
        latents = [self._latent(item.picture) for item in micro.items]
        weights = [self.manifest.set_of(picture).loss_weight for picture in pictures]
        return Batch(
            latents_BCHW=torch.stack(latents),
            conditions=_stack([self._embeddings(caption) for caption in captions], captions),
            loss_weight_B=torch.tensor(weights, dtype=torch.float32),
            seeds=tuple(item.noise_seed for item in micro.items),
        )

    def pictures_of(self, step: int) -> list[str]:
        """Files of the pictures that a step draws, in order; reads nothing."""
        places = range(self.schedule.accumulate)
        items = [item for place in places for item in self.schedule.micro_batch(step, place).items]
        return [str(self.manifest.pictures[item.picture].path) for item in items]

    def _caption(self, item: Item) -> str:
        return "" if item.drops_caption else self.manifest.pictures[item.picture].caption

    def _latent(self, picture: int) -> Tensor:
        owner = f"the picture {self.manifest.pictures[picture].path}"
        return self._entry(self._latent_keys[picture], owner)[LATENT]

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
