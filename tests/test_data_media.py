"""Decoding, turning, flattening, scaling: odd pictures against closed forms and plain Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from data_support import UNHURRIED
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from outsize.base.errors import SourceError
from outsize.data import media
from outsize.data.buckets import Bucket, crop_plan
from outsize.data.media import Look

RNG = np.random.default_rng(7)
COLOURS = RNG.integers(0, 256, (6, 10, 3), dtype=np.uint8)
SAMPLE = np.kron(COLOURS, np.ones((8, 8, 1), dtype=np.uint8))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_lossless_files_decode_to_the_pixels_that_were_saved(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved(Image.fromarray(SAMPLE), kind, **options)
    assert np.array_equal(np.asarray(media.decode(content)), SAMPLE)


def test_transparency_is_laid_on_white() -> None:
    pixels = np.array([[[200, 100, 0, 255], [200, 100, 0, 0], [200, 100, 0, 128]]], dtype=np.uint8)
    out = np.asarray(media.decode(saved(Image.fromarray(pixels), "PNG")))[0]
    assert out[0].tolist() == [200, 100, 0]
    assert out[1].tolist() == [255, 255, 255]
    expected = 255 + (pixels[0, 2, :3].astype(float) - 255) * 128 / 255
    assert np.abs(out[2] - expected).max() <= 1, "one step of 8-bit rounding"


def test_a_palette_with_a_transparent_entry_is_laid_on_white() -> None:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    out = np.asarray(media.decode(saved(image, "PNG", transparency=1)))
    assert out.tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_grey_with_alpha_is_laid_on_white() -> None:
    image = Image.merge("LA", [Image.new("L", (2, 2), 100), Image.new("L", (2, 2), 0)])
    assert np.asarray(media.decode(saved(image, "PNG"))).min() == 255


def test_a_cmyk_jpeg_becomes_rgb_of_about_the_right_colour() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta and yellow make red
    red, green, blue = np.asarray(media.decode(saved(image, "JPEG", quality=95)))[8, 8]
    assert red > 240
    assert max(green, blue) < 15


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    wide = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    out = np.asarray(media.decode(saved(Image.fromarray(wide), "PNG")))
    # 65535 / 255 = 257 sixteen-bit steps make one eight-bit step.
    assert out[0, :, 0].tolist() == [0, 1, 128, 255]


def test_one_bit_pictures_become_black_and_white() -> None:
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    assert np.asarray(media.decode(saved(image, "PNG"))).tolist() == [[[0] * 3, [255] * 3]]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_orientations_show_the_same_upright_picture(kind: str, orientation: int) -> None:
    """A camera writes the sensor's picture and a tag; the tag undoes the turn applied here."""
    undone = {
        1: SAMPLE,
        2: SAMPLE[:, ::-1],
        3: SAMPLE[::-1, ::-1],
        4: SAMPLE[::-1],
        5: SAMPLE.transpose(1, 0, 2),
        6: np.rot90(SAMPLE, 1),
        7: SAMPLE[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(SAMPLE, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    by_kind: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 95, "subsampling": 0},
        "PNG": {},
        "WEBP": {"lossless": True},
    }
    stored = Image.fromarray(np.ascontiguousarray(undone))
    content = saved(stored, kind, exif=exif, **by_kind[kind])
    upright = np.asarray(media.decode(content)).astype(int)
    assert upright.shape == SAMPLE.shape
    limit = 8 if kind == "JPEG" else 0  # a wrong turn gives about 85, quality 95 below 4
    assert np.abs(upright - SAMPLE).mean() <= limit
    assert media.inspect(content) == Look(SAMPLE.shape[1], SAMPLE.shape[0])


def test_pixels_are_chw_fp32_from_minus_one_to_one() -> None:
    bw = np.zeros((16, 16, 3), dtype=np.uint8)
    bw[:, 8:] = 255
    crop = crop_plan(16, 16, Bucket(16, 16))
    pixels = media.pixels_of(media.decode(saved(Image.fromarray(bw), "PNG")), crop)
    assert pixels.shape == (3, 16, 16)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous()
    assert torch.equal(pixels[:, :, :8], torch.full((3, 16, 8), -1.0))
    assert torch.equal(pixels[:, :, 8:], torch.ones(3, 16, 8))


def test_the_crop_is_the_centre_of_the_scaled_picture() -> None:
    crop = crop_plan(80, 48, Bucket(32, 32))
    pixels = media.pixels_of(Image.fromarray(SAMPLE), crop)
    scaled = Image.fromarray(SAMPLE).resize((53, 32), Image.Resampling.LANCZOS)
    expected = np.asarray(scaled)[:, 10:42].astype(np.float32) / 127.5 - 1
    # reducing_gap may differ by rounding steps of 1 / 127.5; here it does not reduce at all.
    assert np.abs(pixels.numpy() - expected.transpose(2, 0, 1)).max() < 1e-6


def test_shrinking_a_large_picture_averages_and_does_not_skip_pixels() -> None:
    fine = np.indices((512, 512)).sum(0) % 2 * 255
    content = saved(Image.fromarray(fine.astype(np.uint8)), "PNG")
    pixels = media.pixels_of(media.decode(content), crop_plan(512, 512, Bucket(32, 32)))
    assert pixels.abs().max() < 0.02, "a checkerboard of single pixels is middle grey"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.95])
def test_a_truncated_file_is_an_error_in_both_looks(kind: str, kept: float) -> None:
    content = saved(Image.fromarray(SAMPLE), kind)
    torn = content[: int(len(content) * kept)]
    for look in (media.inspect, media.decode):
        with pytest.raises(SourceError, match=r"0 bytes|not a readable picture"):
            look(torn)


# Damage may claim a huge size: Pillow warns from 89 million pixels on and refuses from 179 on.
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@UNHURRIED
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "BMP"]), st.data())
def test_damaged_bytes_give_a_picture_or_a_source_error_and_nothing_else(
    kind: str, data: st.DataObject
) -> None:
    content = bytearray(saved(Image.fromarray(SAMPLE[:16, :16]), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        look = media.inspect(bytes(content))
        image = media.decode(bytes(content))
    except SourceError:
        return
    assert image.mode == "RGB"
    assert image.size == (look.width, look.height)
