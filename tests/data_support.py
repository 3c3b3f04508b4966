"""Folders of seeded pictures, and encoders that count, for the tests of outsize.data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import settings
from PIL import Image

from outsize.data.cache import ContentCache
from outsize.data.encode import CacheReport, cache_latents, cache_texts, training_texts
from outsize.data.found import PictureSet
from outsize.data.manifest import Manifest
from outsize.data.samples import samples_of
from outsize.data.scanning import scan

if TYPE_CHECKING:
    from torch import Tensor

# A busy machine is no fault of the code: the time of one example is not judged.
UNHURRIED = settings(deadline=None, max_examples=60)

RESOLUTION = 32
MULTIPLE = 8
LATENT_INPUTS = {"encoder": "codec-store-1", "format": "plain"}
TEXT_INPUTS = {"encoder": "text-store-1", "format": "plain"}


def write_picture(path: Path, size: tuple[int, int] = (40, 40), seed: int = 0) -> Path:
    """Save smooth seeded colours in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path)
    return path


def write_captioned(folder: Path, count: int, sizes: Sequence[tuple[int, int]]) -> Path:
    """Write pictures 00.png ... with captions, sizes taken in turn."""
    for index in range(count):
        path = write_picture(folder / f"{index:02}.png", sizes[index % len(sizes)], index)
        path.with_suffix(".txt").write_text(f"picture number {index}", encoding="utf-8")
    return folder


class CountingEncoders:
    """Encoders whose outputs are closed forms of their inputs, and a record of what they did."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.num_pictures = 0
        self.texts: list[str] = []
        self.events: list[str] = []

    @contextlib.contextmanager
    def open_image(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Latents are 8 x 8 means of pixels, in fp32."""
        self.events.append("image opened")
        yield self._encode_image
        self.events.append("image closed")

    @contextlib.contextmanager
    def open_text(self) -> Iterator[Callable[[list[str]], dict[str, Tensor]]]:
        """Embeddings repeat the text's characters."""
        self.events.append("text opened")
        yield self._encode_text
        self.events.append("text closed")

    def _encode_image(self, pixels_BCHW: Tensor) -> Tensor:
        import torch

        self.num_pictures += len(pixels_BCHW)
        time.sleep(self.pause_s)
        return torch.nn.functional.avg_pool2d(pixels_BCHW, MULTIPLE)

    def _encode_text(self, texts: list[str]) -> dict[str, Tensor]:
        import torch

        self.texts += texts
        time.sleep(self.pause_s)
        rows = [[float(ord(c)) for c in text.ljust(24)[:24]] for text in texts]
        text_BTD = torch.tensor(rows).to(torch.bfloat16).reshape(len(texts), 12, 2)
        return {"text": text_BTD, "pooled": text_BTD.float().mean(1)}


def keys_in(cache: ContentCache) -> list[str]:
    """Keys of all entries on disk, temporaries left out."""
    return [path.stem for path in cache.folder.glob("??/[!.]*.safetensors")]


def cache_folder(
    folder: Path, cache: ContentCache, encoders: CountingEncoders, **changes: Any
) -> tuple[CacheReport, CacheReport, Manifest]:
    """Cache one folder as a run would; changes: resolution, latent_inputs, text_inputs."""
    manifest = scan([PictureSet(folder=folder)])
    samples = samples_of(manifest, [changes.pop("resolution", RESOLUTION)], MULTIPLE)
    latent_inputs = changes.pop("latent_inputs", LATENT_INPUTS)
    text_inputs = changes.pop("text_inputs", TEXT_INPUTS)
    texts = training_texts(manifest, 0.1)
    return (
        cache_latents(manifest, samples, cache, encoders.open_image, latent_inputs, **changes),
        cache_texts(texts, cache, encoders.open_text, text_inputs, **changes),
        manifest,
    )


def cache_as_a_child(folder: Path, cache_folder_path: Path, ready: Event) -> None:
    """What the kill tests kill: caching, slowed down, after saying that it begins."""
    cache = ContentCache(cache_folder_path)
    ready.set()
    cache_folder(folder, cache, CountingEncoders(0.002))
