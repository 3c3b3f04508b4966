"""Masks as weights of the loss: exact areas on the latent grid, stated normalisation, gradients against a plain reference."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_support import UNHURRIED, write_captioned, write_picture
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from outsize.base.errors import SourceError
from outsize.data.buckets import Bucket, crop_plan
from outsize.data.cache import ContentCache
from outsize.data.found import PictureSet
from outsize.data.masks import MASK, cache_masks, mask_key, on_grid, weights_of
from outsize.data.samples import samples_of
from outsize.data.scanning import scan
from outsize.objectives.flow_matching import FlowMatching

ANY = PictureSet(folder=Path("any"))


def area_by_hand(
    mask: np.ndarray[Any, Any], crop: Any, grid: tuple[int, int]
) -> np.ndarray[Any, Any]:
    """The mean over each cell's area, as whole-number fractions, pixel by pixel."""
    height, width = mask.shape
    out = np.zeros(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            top, bottom, left, right = (
                Fraction(first * count + place * length, count) * pixels / scaled
                for place, first, count, length, pixels, scaled in (
                    (i, crop.top, grid[0], crop.bucket.height, height, crop.scaled_height),
                    (i + 1, crop.top, grid[0], crop.bucket.height, height, crop.scaled_height),
                    (j, crop.left, grid[1], crop.bucket.width, width, crop.scaled_width),
                    (j + 1, crop.left, grid[1], crop.bucket.width, width, crop.scaled_width),
                )
            )
            total = Fraction(0)
            for y in range(height):
                for x in range(width):
                    tall = min(bottom, Fraction(y + 1)) - max(top, Fraction(y))
                    wide = min(right, Fraction(x + 1)) - max(left, Fraction(x))
                    if tall > 0 and wide > 0 and mask[y, x]:
                        total += tall * wide
            out[i, j] = total / ((bottom - top) * (right - left))
    return out


@UNHURRIED
@given(st.integers(3, 14), st.integers(3, 14), st.integers(0, 2**32 - 1), st.integers(1, 2))
def test_a_cell_weighs_the_exact_share_of_its_area(
    width: int, height: int, seed: int, times: int
) -> None:
    """Cropped and scaled by whatever ratio; the mask may be smaller or larger than the picture."""
    crop = crop_plan(width, height, Bucket(32, 24))
    mask = (
        np.random.default_rng(seed)
        .integers(0, 2, (height * times, width * times))
        .astype(np.float32)
    )
    grid = (3, 4)
    assert np.abs(on_grid(mask, crop, grid) - area_by_hand(mask, crop, grid)).max() < 1e-6


def test_weights_have_mean_one_unless_small_subjects_are_to_count_less() -> None:
    mask = torch.zeros(4, 4)
    mask[1, :2] = torch.tensor([1.0, 0.5])
    weights = weights_of(mask, ANY)
    assert weights.mean() == pytest.approx(1)
    assert weights[1, 0] == pytest.approx(16 / 1.5)
    raw = PictureSet(folder=Path("any"), mask_normalised=False, mask_floor=0.25)
    assert torch.equal(weights_of(mask, raw), 0.25 + 0.75 * mask)


def test_a_mask_without_black_equals_no_mask() -> None:
    assert torch.equal(weights_of(torch.ones(4, 4), ANY), torch.ones(4, 4))


def written(folder: Path, mask: np.ndarray[Any, Any], name: str = "00.png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(mask).save(folder / name)
    return folder


def left_half(shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    mask = np.zeros(shape, dtype=np.uint8)
    mask[:, : shape[1] // 2] = 255
    return mask


def test_cached_masks_are_found_by_content_and_grid(tmp_path: Path) -> None:
    folder = write_captioned(tmp_path / "p", 1, [(32, 32)])
    masks = written(tmp_path / "m", left_half((32, 32)))
    manifest = scan([PictureSet(folder=folder, masks=masks)])
    samples, cache = samples_of(manifest, [16, 32], 8), ContentCache(tmp_path / "cache")
    assert cache_masks(manifest, samples, lambda b: (b.height // 8, b.width // 8), cache) == 2
    assert cache_masks(manifest, samples, lambda b: (b.height // 8, b.width // 8), cache) == 0
    mask = manifest.pictures[0].mask
    assert mask is not None
    entry = cache.get(mask_key(cache, mask, samples[1].crop, (4, 4)))
    assert entry is not None
    assert entry[MASK].tolist() == [[1, 1, 0, 0]] * 4


def test_transparency_is_a_mask_when_asked_for(tmp_path: Path) -> None:
    rgba = np.dstack([np.full((32, 32, 3), 90, dtype=np.uint8), left_half((32, 32))])
    folder = written(tmp_path, rgba)
    (folder / "00.txt").write_text("a subject cut out")
    manifest = scan([PictureSet(folder=folder, alpha_as_mask=True)])
    samples, cache = samples_of(manifest, [32], 8), ContentCache(tmp_path / "cache")
    cache_masks(manifest, samples, lambda b: (b.height // 8, b.width // 8), cache)
    mask = manifest.pictures[0].mask
    assert mask is not None
    assert mask.is_alpha
    entry = cache.get(mask_key(cache, mask, samples[0].crop, (4, 4)))
    assert entry is not None
    assert entry[MASK].tolist() == [[1, 1, 0, 0]] * 4
    plain = scan([PictureSet(folder=folder)])
    assert plain.pictures[0].mask is None


def test_masks_of_which_nothing_is_learned_are_refused_together(tmp_path: Path) -> None:
    """The centre crop may cut off all that is white."""
    folder = write_captioned(tmp_path / "p", 2, [(90, 16)])
    edge = np.zeros((16, 90), dtype=np.uint8)
    edge[:, :4] = 255
    masks = written(tmp_path / "m", edge)
    written(masks, np.zeros((16, 90), dtype=np.uint8), "01.png")
    manifest = scan([PictureSet(folder=folder, masks=masks)])
    samples, cache = samples_of(manifest, [32], 8), ContentCache(tmp_path / "cache")
    with pytest.raises(SourceError, match=r"(?s)of 2 pictures.*00\.png.*black all over.*01\.png"):
        cache_masks(manifest, samples, lambda b: (b.height // 8, b.width // 8), cache)
    floored = scan([PictureSet(folder=folder, masks=masks, mask_floor=0.1)])
    cache_masks(floored, samples, lambda b: (b.height // 8, b.width // 8), cache)


def test_a_mask_that_changed_since_it_was_scanned_is_an_error(tmp_path: Path) -> None:
    folder = write_captioned(tmp_path / "p", 1, [(32, 32)])
    masks = written(tmp_path / "m", left_half((32, 32)))
    manifest = scan([PictureSet(folder=folder, masks=masks)])
    write_picture(masks / "00.png", (32, 32), seed=5)
    samples = samples_of(manifest, [32], 8)
    with pytest.raises(SourceError, match="changed while the run was starting"):
        cache_masks(manifest, samples, lambda _: (4, 4), ContentCache(tmp_path / "cache"))


def test_gradients_with_masks_equal_a_plain_reference_in_float64() -> None:
    """Loss and gradient of a batch of two samples, one masked, with different loss weights."""
    generator = torch.Generator().manual_seed(3)
    clean, noise = (torch.randn(2, 5, 4, 6, generator=generator) for _ in range(2))
    scale = torch.randn(5, 1, 1, generator=generator, requires_grad=True)
    sigma = torch.tensor([0.3, 0.8])
    cells = torch.rand(2, 1, 4, 6, generator=generator)
    weight = torch.tensor([1.0, 0.5]).view(-1, 1, 1, 1) * cells
    loss = FlowMatching().loss(
        lambda noisy, _: scale * noisy, clean, sigma, noise, weight, torch.float32
    )
    loss.backward()
    found = scale.grad
    wide = scale.detach().double().requires_grad_(True)
    mixed = (1 - sigma.double().view(2, 1, 1, 1)) * clean.double()
    mixed = mixed + sigma.double().view(2, 1, 1, 1) * noise.double()
    total = torch.zeros((), dtype=torch.float64)
    for sample in range(2):
        error = wide * mixed[sample] - (noise - clean)[sample].double()
        for y in range(4):
            for x in range(6):
                total = total + weight[sample, 0, y, x].double() * error[:, y, x].square().sum()
    expected = total / (2 * 5 * 4 * 6)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found is not None
    assert wide.grad is not None
    assert torch.allclose(found.double(), wide.grad, rtol=1e-5)
    ones = FlowMatching().loss(
        lambda noisy, _: scale * noisy, clean, sigma, noise, torch.ones(2, 1, 4, 6), torch.float32
    )
    none = FlowMatching().loss(
        lambda noisy, _: scale * noisy, clean, sigma, noise, torch.ones(2), torch.float32
    )
    assert torch.equal(ones, none), "white masks change no bit"
