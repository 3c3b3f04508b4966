"""The caching stage: encode what is missing, one encoder at a time, and never open one for nothing.

It knows no encoder. A caller hands over a factory: a context manager that opens the encoder and
gives a function. The factory is entered only when something is missing and left before the stage
returns, so that the next encoder finds the memory free. Entries are encoded one by one, so that an
entry's bits depend on nothing but its key's inputs (a different batch may round differently), and
each is on disk before the next begins: a kill loses one.

Dimensions: B batch, always 1 here; C channels, H W height and width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outsize.base.errors import NotFinite, SourceError
from outsize.base.journal import Journal
from outsize.base.progress import OnProgress
from outsize.data import media
from outsize.data._colour import RGB, WHITE
from outsize.data.buckets import CropPlan
from outsize.data.cache import ContentCache
from outsize.data.manifest import Manifest, Picture
from outsize.data.samples import Sample, flips_of

if TYPE_CHECKING:
    from torch import Tensor

OpenImageEncoder = Callable[[], AbstractContextManager[Callable[["Tensor"], "Tensor"]]]
OpenTextEncoder = Callable[
    [], AbstractContextManager[Callable[[list[str]], Mapping[str, "Tensor"]]]
]

LATENT = "latent"  # name of the one tensor of a picture's entry


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a caching stage did; broken entries are among those encoded."""

    num_reused: int
    num_encoded: int


def latent_key(
    cache: ContentCache,
    picture: Picture,
    crop: CropPlan,
    inputs: Mapping[str, Any],
    *,
    background: RGB = WHITE,
    is_flipped: bool = False,
) -> str:
    """Key of a picture's latent: file content, crop, transform, mirrored or not, and the encoder's own inputs."""
    return cache.key(
        kind="latent",
        picture=picture.digest,
        pixels=media.crop_fields(crop, picture.look, background, is_flipped=is_flipped),
        encoder=dict(inputs),
    )


def text_key(cache: ContentCache, text: str, inputs: Mapping[str, Any]) -> str:
    """Key of a text's embeddings: its characters and the encoder's own inputs."""
    return cache.key(kind="text", text=text, encoder=dict(inputs))


@dataclass(frozen=True, slots=True)
class _Job:
    """A latent to encode."""

    picture: Picture
    crop: CropPlan
    background: RGB
    is_flipped: bool


def cache_latents(
    manifest: Manifest,
    samples: Sequence[Sample],
    cache: ContentCache,
    open_encoder: OpenImageEncoder,
    inputs: Mapping[str, Any],
    *,
    progress: OnProgress | None = None,
    journal: Journal | None = None,
) -> CacheReport:
    """Make sure that the latents of all samples are cached, mirrored ones too where they may be drawn.

    inputs: what identifies encoder and settings. The encoder takes
    pixels (B, 3, H, W) fp32 in -1..1 and gives latents (B, C, h, w).
    Raises: SourceError when a picture changed since it was scanned; NotFinite naming the picture.
    """
    jobs = _latent_jobs(manifest, samples, cache, inputs)
    todo = _take_stock(cache, jobs, "latents", journal)
    counter = _Counter(len(todo), progress)
    if todo:
        with open_encoder() as encode, ThreadPoolExecutor(1) as pool:
            for key, pixels_CHW in _decoded_ahead(pool, todo, jobs, cache):
                if pixels_CHW is not None:
                    (latent_CHW,) = encode(pixels_CHW[None])
                    _put(cache, key, {LATENT: latent_CHW}, f"picture {jobs[key].picture.origin}")
                counter.add(is_encoded=pixels_CHW is not None)
    return counter.report(len(jobs))


def cache_texts(
    texts: Iterable[str],
    cache: ContentCache,
    open_encoder: OpenTextEncoder,
    inputs: Mapping[str, Any],
    *,
    progress: OnProgress | None = None,
    journal: Journal | None = None,
) -> CacheReport:
    """Make sure that the embeddings of every different text are cached; see training_texts.

    The encoder takes B texts and gives tensors by name, batch first.
    Raises: NotFinite naming the text.
    """
    jobs = {text_key(cache, text, inputs): text for text in texts}
    todo = _take_stock(cache, jobs, "texts", journal)
    counter = _Counter(len(todo), progress)
    if todo:
        with open_encoder() as encode:
            for key in todo:
                is_missing = bool(cache.missing([key]))  # another process may be caching the same
                if is_missing:
                    rows = encode([jobs[key]])
                    entry = {name: one for name, (one,) in rows.items()}
                    _put(cache, key, entry, f"text {jobs[key]!r}")
                counter.add(is_encoded=is_missing)
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
    progress: OnProgress | None
    num_done: int = 0
    num_encoded: int = 0

    def add(self, *, is_encoded: bool) -> None:
        self.num_encoded += is_encoded
        self.num_done += 1
        if self.progress is not None:
            self.progress(self.num_done, self.total)

    def report(self, num_wanted: int) -> CacheReport:
        return CacheReport(num_wanted - self.num_encoded, self.num_encoded)


def _latent_jobs(
    manifest: Manifest, samples: Sequence[Sample], cache: ContentCache, inputs: Mapping[str, Any]
) -> dict[str, _Job]:
    """All latents that may be drawn, by key, in order."""
    jobs = {}
    for sample in samples:
        picture = manifest.pictures[sample.picture]
        background = manifest.set_of(picture).background
        for is_flipped in flips_of(manifest, sample):
            job = _Job(picture, sample.crop, background, is_flipped)
            key = latent_key(
                cache, picture, sample.crop, inputs, background=background, is_flipped=is_flipped
            )
            jobs[key] = job
    return jobs


def _decoded_ahead(
    pool: ThreadPoolExecutor,
    keys: Sequence[str],
    jobs: Mapping[str, _Job],
    cache: ContentCache,
) -> Iterator[tuple[str, Tensor | None]]:
    """Each key with its pixels, or None where another process cached it meanwhile.

    The next picture is decoded while one is encoded.
    """

    def submit(key: str) -> Future[Tensor] | None:
        return pool.submit(_read, jobs[key]) if cache.missing([key]) else None

    ahead = submit(keys[0])
    for position, key in enumerate(keys):
        pixels_CHW = None if ahead is None else ahead.result()
        ahead = submit(keys[position + 1]) if position + 1 < len(keys) else None
        yield key, pixels_CHW


def _read(job: _Job) -> Tensor:
    picture = job.picture
    try:
        content = picture.origin.read()
    except OSError as error:
        raise SourceError(f"{picture.origin} can no longer be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != picture.digest:
        raise SourceError(f"{picture.origin} changed while the run was starting; start again")
    image = media.decode(content, job.background)
    if image.size != (picture.width, picture.height):
        raise SourceError(
            f"{picture.origin} decodes to {image.size[0]} x {image.size[1]} px, where the scan found "
            f"{picture.width} x {picture.height}; delete the file of remembered sizes and start again"
        )
    return media.pixels_of(image, job.crop, is_flipped=job.is_flipped)


def _put(cache: ContentCache, key: str, entry: Mapping[str, Tensor], what: str) -> None:
    """Cache an entry whose numbers are finite."""
    if not all(bool(tensor.isfinite().all()) for tensor in entry.values()):
        raise NotFinite(
            f"what the encoder gave for the {what} holds NaN or infinity and was not cached; "
            "run the encoder in a wider dtype (fp32)"
        )
    cache.put(key, {name: tensor.detach().to("cpu") for name, tensor in entry.items()})
