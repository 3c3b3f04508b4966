"""The caching stage: encode what is missing, one encoder at a time, and never open one for nothing.

It knows no encoder. A caller hands over a factory: a context manager that opens the encoder and
gives a function. The factory is entered only when something is missing and left before the stage
returns, so that the next encoder finds the memory free. Every entry is on disk as soon as its batch
is encoded: a kill loses one batch at most. With batch 1 an entry's bits depend on nothing but its
key's inputs; larger batches are faster on a GPU, where a different batch may round differently.

Dimensions: B batch, C channels, H W height and width.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from outsize.base.errors import NotFinite, SourceError
from outsize.base.journal import Journal
from outsize.data import media
from outsize.data.buckets import CropPlan
from outsize.data.cache import ContentCache
from outsize.data.manifest import Manifest, Picture

if TYPE_CHECKING:
    from torch import Tensor

OpenImageEncoder = Callable[[], AbstractContextManager[Callable[["Tensor"], "Tensor"]]]
OpenTextEncoder = Callable[
    [], AbstractContextManager[Callable[[list[str]], Mapping[str, "Tensor"]]]
]
Progress = Callable[[int, int], None]  # done so far, to be done in all; nothing: never called

LATENT = "latent"  # name of the one tensor of a picture's entry
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a caching stage did; broken entries are among those encoded."""

    num_reused: int
    num_encoded: int


def latent_key(
    cache: ContentCache, picture: Picture, crop: CropPlan, inputs: Mapping[str, Any]
) -> str:
    """Key of a picture's latent: file content, crop, transform, and the encoder's own inputs."""
    return cache.key(
        kind="latent",
        picture=picture.digest,
        pixels=media.crop_fields(crop),
        encoder=dict(inputs),
    )


def text_key(cache: ContentCache, text: str, inputs: Mapping[str, Any]) -> str:
    """Key of a text's embeddings: its characters and the encoder's own inputs."""
    return cache.key(kind="text", text=text, encoder=dict(inputs))


def cache_latents(
    manifest: Manifest,
    crops: Sequence[CropPlan],
    cache: ContentCache,
    open_encoder: OpenImageEncoder,
    inputs: Mapping[str, Any],
    *,
    batch: int = 1,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> CacheReport:
    """Make sure that every picture's latent is cached.

    crops: one for each picture. inputs: what identifies encoder and settings. The encoder takes
    pixels (B, 3, H, W) fp32 in -1..1, all of one bucket, and gives latents (B, C, h, w).
    Raises: SourceError when a picture changed since it was scanned; NotFinite naming pictures.
    """
    jobs = {
        latent_key(cache, picture, crop, inputs): (picture, crop)
        for picture, crop in zip(manifest.pictures, crops, strict=True)
    }
    todo = _take_stock(cache, jobs, "latents", journal)
    counter = _Counter(len(todo), progress)
    if todo:
        by_bucket = defaultdict(list)
        for key in todo:
            by_bucket[jobs[key][1].bucket].append(key)
        batches = [part for keys in by_bucket.values() for part in _parts(keys, batch)]
        with open_encoder() as encode, ThreadPoolExecutor(min(4, batch + 1)) as pool:
            for length, pixels in _decoded_ahead(pool, batches, jobs, cache):
                if pixels:
                    _encode_pictures(cache, pixels, encode, jobs)
                counter.add(len(pixels), length)
    return counter.report(len(jobs))


def cache_texts(
    texts: Iterable[str],
    cache: ContentCache,
    open_encoder: OpenTextEncoder,
    inputs: Mapping[str, Any],
    *,
    batch: int = 1,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> CacheReport:
    """Make sure that the embeddings of every different text are cached; see training_texts.

    The encoder takes B texts and gives tensors by name, batch first.
    Raises: NotFinite naming the texts whose embeddings are not finite.
    """
    jobs = {text_key(cache, text, inputs): text for text in texts}
    todo = _take_stock(cache, jobs, "texts", journal)
    counter = _Counter(len(todo), progress)
    if todo:
        with open_encoder() as encode:
            for part in _parts(todo, batch):
                keys = cache.missing(part)  # another process may be caching the same
                if keys:
                    _encode_texts(cache, keys, encode, jobs)
                counter.add(len(keys), len(part))
    return counter.report(len(jobs))


def training_texts(manifest: Manifest, caption_dropout: float) -> tuple[str, ...]:
    """Every text that training may ask for: the captions, and "" when captions are dropped."""
    empty = ("",) if caption_dropout > 0 else ()
    return tuple(dict.fromkeys((*manifest.captions(), *empty)))


def _take_stock(
    cache: ContentCache, jobs: Mapping[str, Any], what: str, journal: Journal | None
) -> tuple[str, ...]:
    """Report and discard broken entries; the keys to encode."""
    cache.sweep()
    for key, fault in cache.broken(jobs).items():
        if journal is not None:
            journal.write("cache_entry_broken", what=what, key=key, fault=fault)
        cache.discard(key)
    todo = cache.missing(jobs)
    if journal is not None:
        journal.write("caching", what=what, num_wanted=len(jobs), num_missing=len(todo))
    return todo


@dataclass(slots=True)
class _Counter:
    """Counts what a stage encoded, and tells how far it is."""

    total: int
    progress: Progress | None
    num_done: int = 0
    num_encoded: int = 0

    def add(self, num_encoded: int, num_done: int) -> None:
        self.num_encoded += num_encoded
        self.num_done += num_done
        if self.progress is not None:
            self.progress(self.num_done, self.total)

    def report(self, num_wanted: int) -> CacheReport:
        return CacheReport(num_wanted - self.num_encoded, self.num_encoded)


def _parts(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    assert size >= 1, "a batch has at least one item"
    return [items[start : start + size] for start in range(0, len(items), size)]


def _decoded_ahead(
    pool: ThreadPoolExecutor,
    batches: Sequence[Sequence[str]],
    jobs: Mapping[str, tuple[Picture, CropPlan]],
    cache: ContentCache,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The length of each batch and its pixels by key; the next is decoded while one is encoded.

    What another process has cached meanwhile is left out.
    """

    def submit(keys: Sequence[str]) -> dict[str, Future[Tensor]]:
        return {key: pool.submit(_read, *jobs[key]) for key in cache.missing(keys)}

    ahead = submit(batches[0])
    for position, keys in enumerate(batches):
        pixels = {key: future.result() for key, future in ahead.items()}
        ahead = submit(batches[position + 1]) if position + 1 < len(batches) else {}
        yield len(keys), pixels


def _read(picture: Picture, crop: CropPlan) -> Tensor:
    try:
        content = picture.path.read_bytes()
    except OSError as error:
        raise SourceError(f"{picture.path} can no longer be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != picture.digest:
        raise SourceError(f"{picture.path} changed while the run was starting; start again")
    image = media.decode(content)
    if image.size != (picture.width, picture.height):
        raise SourceError(
            f"{picture.path} decodes to {image.size[0]} x {image.size[1]} px, where the scan found "
            f"{picture.width} x {picture.height}; delete the file of remembered sizes and start again"
        )
    return media.pixels_of(image, crop)


def _encode_pictures(
    cache: ContentCache,
    pixels: Mapping[str, Tensor],
    encode: Callable[[Tensor], Tensor],
    jobs: Mapping[str, tuple[Picture, CropPlan]],
) -> None:
    import torch

    latents_BCHW = encode(torch.stack(list(pixels.values()))).detach().to("cpu")
    assert len(latents_BCHW) == len(pixels), "an encoder gives one latent for each picture"
    culprits = []
    for key, latent_CHW in zip(pixels, latents_BCHW, strict=True):
        if bool(torch.isfinite(latent_CHW).all()):
            cache.put(key, {LATENT: latent_CHW})
        else:
            culprits.append(str(jobs[key][0].path))
    _refuse_non_finite(culprits, "latents of these pictures")


def _encode_texts(
    cache: ContentCache,
    keys: Sequence[str],
    encode: Callable[[list[str]], Mapping[str, Tensor]],
    jobs: Mapping[str, str],
) -> None:
    import torch

    outputs = encode([jobs[key] for key in keys])
    by_name = {name: tensor.detach().to("cpu") for name, tensor in outputs.items()}
    assert all(len(tensor) == len(keys) for tensor in by_name.values()), "one embedding a text"
    culprits = []
    for row, key in enumerate(keys):
        entry = {name: tensor[row] for name, tensor in by_name.items()}
        if all(bool(torch.isfinite(tensor).all()) for tensor in entry.values()):
            cache.put(key, entry)
        else:
            culprits.append(repr(jobs[key]))
    _refuse_non_finite(culprits, "embeddings of these texts")


def _refuse_non_finite(culprits: Sequence[str], what: str) -> None:
    if culprits:
        raise NotFinite(
            f"the {what} hold NaN or infinity and were not cached: {', '.join(culprits)}; "
            "run the encoder in a wider dtype (fp32)"
        )
