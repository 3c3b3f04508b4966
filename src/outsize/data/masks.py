"""Masks: which part of a picture is learned, as a weight of the loss in every latent cell.

A mask is averaged over the pixels that each cell is made of, at the crop of its picture, and cached by content. Weights
are made of it when a batch is asked for: floor + (1 - floor) x mask, by default divided by their mean, so that a picture
counts as much as one without a mask, however small its subject is.

Dimensions: H W height and width of a picture or of its latent, h w of one of them; B batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outsize.base.errors import SourceError
from outsize.data import media
from outsize.data.buckets import Bucket, CropPlan
from outsize.data.cache import ContentCache
from outsize.data.found import PictureSet
from outsize.data.manifest import Manifest, Mask, Picture
from outsize.data.samples import Sample

if TYPE_CHECKING:
    from torch import Tensor

MASK = "mask"  # name of the one tensor of a mask's entry
_VERSION = 1  # raise it when the same mask must lead to other cells

GridOf = Callable[[Bucket], tuple[int, int]]  # height and width of a bucket's latent


def mask_key(cache: ContentCache, mask: Mask, crop: CropPlan, grid: tuple[int, int]) -> str:
    """Key of a mask on a latent's grid: file content, crop, and the grid."""
    return cache.key(
        kind="mask",
        mask=mask.digest,
        is_alpha=mask.is_alpha,
        crop=crop.describe(),
        grid=list(grid),
        version=_VERSION,
    )


def cache_masks(
    manifest: Manifest, samples: Sequence[Sample], grid_of: GridOf, cache: ContentCache
) -> int:
    """Make sure that every sample's mask is cached; how many were made.

    Raises: SourceError when a mask changed since it was scanned, and for masks that are black wherever their picture is
    shown though nothing else of it is learned: all of them at once.
    """
    jobs: dict[str, tuple[Picture, Mask, CropPlan, tuple[int, int]]] = {}
    for sample in samples:
        picture = manifest.pictures[sample.picture]
        if picture.mask is not None:
            grid = grid_of(sample.crop.bucket)
            key = mask_key(cache, picture.mask, sample.crop, grid)
            jobs[key] = (picture, picture.mask, sample.crop, grid)
    todo = [*cache.missing(jobs), *cache.broken(jobs)]
    for key in todo:
        _, mask, crop, grid = jobs[key]
        cache.put(key, {MASK: _tensor(on_grid(_pixels(mask), crop, grid))})
    _require_something(manifest, jobs, cache)
    return len(todo)


def on_grid(
    mask_HW: NDArray[np.float32], crop: CropPlan, grid: tuple[int, int]
) -> NDArray[np.float32]:
    """The mean of a mask over the area of each latent cell, (h, w), of the part that the crop shows.

    Exact to rounding: pixels that lie in a cell in part count by that part. The mask may have another size than its picture.
    """
    height, width = mask_HW.shape
    rows = _shares(height, crop.top, crop.bucket.height, crop.scaled_height, grid[0])
    columns = _shares(width, crop.left, crop.bucket.width, crop.scaled_width, grid[1])
    mean: NDArray[np.float32] = (rows @ mask_HW.astype(np.float64) @ columns.T).astype(np.float32)
    return mean.clip(0, 1)


def weights_of(mask_hw: Tensor, item: PictureSet) -> Tensor:
    """Weights of the loss by cell, fp32, as the set says."""
    weights = item.mask_floor + (1 - item.mask_floor) * mask_hw
    return weights / weights.mean() if item.mask_normalised else weights


def _shares(
    num_pixels: int, first: int, length: int, scaled: int, num_cells: int
) -> NDArray[np.float64]:
    """Which share of each cell each pixel makes up, (num_cells, num_pixels), along one side; rows add up to 1.

    first, length: of the crop, in pixels of the scaled picture, which has `scaled`.
    """
    edges = (first + np.arange(num_cells + 1) * (length / num_cells)) * (num_pixels / scaled)
    pixels = np.arange(num_pixels)
    begin = np.maximum(edges[:-1, None], pixels)
    end = np.minimum(edges[1:, None], pixels + 1)
    covered = np.maximum(end - begin, 0)
    shares: NDArray[np.float64] = covered / covered.sum(axis=1, keepdims=True)
    return shares


def _pixels(mask: Mask) -> NDArray[np.float32]:
    content = mask.origin.read()
    if hashlib.sha256(content).hexdigest() != mask.digest:
        raise SourceError(f"{mask.origin} changed while the run was starting; start again")
    return media.decode_mask(content, is_alpha=mask.is_alpha)


def _tensor(cells_hw: NDArray[np.float32]) -> Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(cells_hw))


def _require_something(
    manifest: Manifest,
    jobs: Mapping[str, tuple[Picture, Mask, CropPlan, Any]],
    cache: ContentCache,
) -> None:
    """Raises: SourceError naming all pictures of which nothing would be learned."""
    black = []
    for key, (picture, mask, crop, _) in jobs.items():
        entry = cache.get(key)
        assert entry is not None, "it was just cached"
        if manifest.set_of(picture).mask_floor == 0 and not bool(entry[MASK].any()):
            bucket = f"{crop.bucket.width} x {crop.bucket.height}"
            black.append(
                f"  {picture.origin}: its mask {mask.origin} is black all over at {bucket} px"
            )
    if black:
        lines = "\n".join(black)
        raise SourceError(
            f"nothing would be learned of {len(black)} pictures; correct their masks, or set mask_floor:\n{lines}"
        )
