"""Kinds of pictures people have: profiles, animations, pages, wide pixels, HEIC and AVIF; read, or refused by name."""

from __future__ import annotations

import base64
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_support import UNHURRIED
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, features

from outsize.base.errors import SourceError
from outsize.data import media
from outsize.data._kinds import LibraryMissing
from outsize.data.buckets import Bucket, crop_plan
from outsize.data.found import PictureSet
from outsize.data.media import Look
from outsize.data.scanning import scan

CROP = crop_plan(40, 40, Bucket(32, 32))
# Left half (200, 40, 40), right half (40, 40, 200), 64 x 48 px; written by libheif 1.20 through pillow-heif.
HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAX1tZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAA"
    "AAAAAAAAAAAAACJpbG9jAAAAAERAAAEAAQAAAAABoQABAAAAAAAAAEAAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAA"
    "AAABAABodmMxAAAAAA5waXRtAAAAAAABAAAA/WlwcnAAAADdaXBjbwAAAHZodmNDAQNwAAAAkAAAAAAAHvAA/P34"
    "+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQAqQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbq5Ka5"
    "uAhoMCAAAAMDIAAAAwAhYgABAAZEAcFzwIkAAAATY29scm5jbHgAAQANAAaAAAAAFGlzcGUAAAAAAAAAQAAAAEAA"
    "AAAoY2xhcAAAAEAAAAABAAAAMAAAAAEAAAAAAAAAAv////AAAAACAAAAEHBpeGkAAAAAAwgICAAAABhpcG1hAAAA"
    "AAAAAAEAAQWBAgMFhAAAAEhtZGF0AAAAPCgBr1jm9Oq//+J8//o2kh8eP/X/89vVftM/P+jslaV9tHbBRIcPyrBE"
    "yKVv3GQGkTdV6NB8du1Vrys3oA=="
)
HAS_HEIF = any(importlib.util.find_spec(name) for name in ("pi_heif", "pillow_heif"))
NEEDS_HEIF = pytest.mark.skipif(not HAS_HEIF, reason="pi-heif is not installed")
NEEDS_AVIF = pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF")
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
LAB = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def coloured(*pixels: tuple[int, ...], mode: str = "RGB") -> Image.Image:
    """A picture of 32 x 32 in as many stripes."""
    image = Image.new(mode, (len(pixels), 1))
    for x, pixel in enumerate(pixels):
        image.putpixel((x, 0), pixel)
    return image.resize((32, 32), Image.Resampling.NEAREST)


def swapped_profile() -> bytes:
    """SRGB with the primaries of red and blue exchanged: what is stored as red is seen as blue."""
    content = bytearray(SRGB)
    tags = {
        bytes(content[at : at + 4]): at
        for at in range(132, 132 + 12 * int.from_bytes(content[128:132], "big"), 12)
    }
    red, blue = (tags[name] for name in (b"rXYZ", b"bXYZ"))
    place = slice(red + 4, red + 12), slice(blue + 4, blue + 12)
    content[place[0]], content[place[1]] = content[place[1]], content[place[0]]
    return (
        bytes(content)
        .replace("sRGB".encode("utf-16-be"), "swap".encode("utf-16-be"))
        .replace(b"sRGB built-in", b"swap built-in")
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_colours_are_converted_by_the_profile_that_a_file_holds(kind: str) -> None:
    """A phone's picture in Display P3, a scan in Adobe RGB: their numbers mean other colours than sRGB's."""
    content = saved(coloured((250, 0, 0)), kind, icc_profile=swapped_profile())
    red, green, blue = np.asarray(media.decode(content))[16, 16]
    assert blue > 240
    assert max(red, green) < 15
    look = media.inspect(content)
    assert look.has_profile
    assert "profiles" in media.crop_fields(CROP, look)


def test_an_srgb_profile_changes_nothing_and_neither_does_its_key() -> None:
    image = coloured((250, 0, 0), (1, 2, 3))
    content = saved(image, "PNG", icc_profile=SRGB)
    assert np.array_equal(np.asarray(media.decode(content)), np.asarray(image))
    assert media.inspect(content) == Look(32, 32)
    assert media.crop_fields(CROP, media.inspect(content)) == media.crop_fields(CROP)


@pytest.mark.parametrize(
    ("profile", "note"),
    [
        (b"no profile at all", "its colour profile cannot be read: taken as sRGB"),
        (LAB, "its colour profile is for Lab, not RGB: not used"),
    ],
)
def test_a_profile_that_cannot_be_used_is_told(profile: bytes, note: str) -> None:
    image = coloured((250, 0, 0))
    content = saved(image, "PNG", icc_profile=profile)
    assert media.inspect(content) == Look(32, 32, note=note)
    assert np.array_equal(np.asarray(media.decode(content)), np.asarray(image))


def test_transparency_keeps_its_edges_under_a_profile() -> None:
    image = coloured((250, 0, 0, 255), (250, 0, 0, 0), mode="RGBA")
    content = saved(image, "PNG", icc_profile=swapped_profile())
    out = np.asarray(media.decode(content, (10, 20, 30)))
    assert out[0, 0, 2] > 240
    assert out[0, 31].tolist() == [10, 20, 30]


def test_the_background_is_the_stated_colour_and_counts_only_where_it_is_seen() -> None:
    see_through = saved(coloured((9, 9, 9, 255), (200, 0, 0, 0), mode="RGBA"), "PNG")
    assert np.asarray(media.decode(see_through, (0, 128, 0)))[0, 31].tolist() == [0, 128, 0]
    opaque = saved(coloured((9, 9, 9)), "PNG")
    fields = [
        media.crop_fields(CROP, media.inspect(content), background)
        for content in (see_through, opaque)
        for background in ((255, 255, 255), (0, 128, 0))
    ]
    assert fields[0] == fields[2] == fields[3] == media.crop_fields(CROP)
    assert fields[1] == media.crop_fields(CROP) | {"background": [0, 128, 0]}


@pytest.mark.parametrize(
    ("kind", "noun"), [("GIF", "frames"), ("PNG", "frames"), ("WEBP", "frames"), ("TIFF", "pages")]
)
def test_of_several_frames_the_first_is_taken_and_that_is_said(
    tmp_path: Path, kind: str, noun: str
) -> None:
    frames = [coloured(colour) for colour in ((200, 0, 0), (0, 200, 0), (0, 0, 200))]
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert media.inspect(content).note == f"3 {noun}: the first is taken"
    assert np.asarray(media.decode(content))[16, 16].tolist() == [200, 0, 0]
    for name in ("a", "b"):
        (tmp_path / f"{name}.{kind.lower()}").write_bytes(content + bytes(ord(name)))
        (tmp_path / f"{name}.txt").write_text("moving")
    (warning,) = scan([PictureSet(folder=tmp_path)]).warnings
    assert warning.startswith(f"2 pictures: 3 {noun}: the first is taken: ")


def test_sixteen_bit_colour_is_read_in_eight() -> None:
    """As RGB TIFF of 16 bits a channel, from a scanner: the high byte."""
    wide = np.array([[[0x1234, 0x80FF, 0xFFFF]]], dtype="<u2")
    strip = wide.tobytes()
    tags = [(256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 3, 122), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, 128), (277, 3, 1, 3), (278, 3, 1, 1), (279, 4, 1, len(strip))]
    content = b"II*\x00\x08\x00\x00\x00" + len(tags).to_bytes(2, "little")
    for tag, kind, count, value in tags:
        content += tag.to_bytes(2, "little") + kind.to_bytes(2, "little")
        content += count.to_bytes(4, "little") + value.to_bytes(4, "little")
    content += bytes(4)
    content = content.ljust(122, b"\0") + b"\x10\0" * 3 + strip
    assert np.asarray(media.decode(content)).tolist() == [[[0x12, 0x80, 0xFF]]]


def test_sixteen_bit_grey_with_an_alpha_mask_scales_as_a_mask() -> None:
    wide = np.array([[0, 32768, 65535]], dtype=np.uint16)
    mask = media.decode_mask(saved(Image.fromarray(wide), "PNG"), is_alpha=False)
    assert mask[0].tolist() == pytest.approx([0, 32768 / 65535, 1])


def test_a_mask_is_black_where_it_is_transparent_and_opacity_is_taken_on_demand() -> None:
    content = saved(coloured((255, 255, 255, 255), (255, 255, 255, 0), mode="RGBA"), "PNG")
    assert media.decode_mask(content, is_alpha=False)[0, [0, 31]].tolist() == [1, 0]
    half = saved(coloured((0, 0, 0, 51), mode="RGBA"), "PNG")
    assert media.decode_mask(half, is_alpha=True)[0, 0] == pytest.approx(0.2)
    assert media.decode_mask(saved(coloured((0, 0, 0)), "PNG"), is_alpha=True).min() == 1


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (
            np.array([[0.5, 7.0]], dtype=np.float32),
            "32-bit floats do not say which number is white",
        ),
        (np.array([[5, 70000]], dtype=np.int32), "grey values from 5 to 70000 are no 16-bit ones"),
    ],
)
def test_numbers_without_a_white_are_refused(pixels: np.ndarray[Any, Any], message: str) -> None:
    content = saved(Image.fromarray(pixels), "TIFF")
    for look in (media.inspect, media.decode):
        with pytest.raises(SourceError, match=message):
            look(content)


@NEEDS_HEIF
@pytest.mark.parametrize("name", ["a.heic", "a.jpg"])
def test_heic_is_read_whatever_the_file_is_called(tmp_path: Path, name: str) -> None:
    """Phones and messengers rename HEIC to .jpg."""
    (tmp_path / name).write_bytes(HEIC)
    (tmp_path / "a.txt").write_text("two halves")
    picture = scan([PictureSet(folder=tmp_path)]).pictures[0]
    assert (picture.width, picture.height) == (64, 48)
    out = np.asarray(media.decode(HEIC)).astype(int)
    assert np.abs(out[24, 8] - (200, 40, 40)).max() <= 4
    assert np.abs(out[24, 56] - (40, 40, 200)).max() <= 4


def test_heic_without_its_library_names_it_and_is_never_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(LibraryMissing, match=r"HEIC, which needs a library: `pip install pi-heif`"):
        media.inspect(HEIC)
    (tmp_path / "a.heic").write_bytes(HEIC)
    (tmp_path / "b.png").write_bytes(saved(coloured((1, 2, 3)), "PNG"))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("x")
    with pytest.raises(SourceError, match=r"a\.heic: a picture in HEIC"):
        scan([PictureSet(folder=tmp_path)], leaves_out_broken=True)


@NEEDS_AVIF
def test_avif_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    image = coloured((200, 40, 40), (40, 40, 200))
    content = saved(image, "AVIF", quality=100, subsampling="4:4:4")
    out = np.asarray(media.decode(content)).astype(int)
    assert np.abs(out - np.asarray(image)).mean() < 4
    monkeypatch.setattr(features, "check", lambda _name: False)
    with pytest.raises(LibraryMissing, match="AVIF, which this build of Pillow does not read"):
        media.inspect(content)


@pytest.mark.parametrize(
    "content", [b"\xff\x0a" + bytes(20), b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(9)]
)
def test_jpeg_xl_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(SourceError, match="JPEG XL, which is not read; convert it to PNG"):
        media.inspect(content)


def test_left_and_right_are_exchanged_after_cropping() -> None:
    image = coloured((10, 0, 0), (20, 0, 0), (30, 0, 0))
    crop = crop_plan(32, 32, Bucket(24, 16))
    plain, flipped = (media.pixels_of(image, crop, is_flipped=one) for one in (False, True))
    assert (flipped == plain.flip(-1)).all()
    assert not (flipped == plain).all()
    assert media.crop_fields(crop, is_flipped=True) != media.crop_fields(crop)


FUZZED = {
    "GIF": saved(coloured((200, 0, 0)), "GIF", save_all=True, append_images=[coloured((0, 9, 0))]),
    "TIFF": saved(coloured((1, 2, 3), (4, 5, 6)), "TIFF"),
    "ICC": saved(coloured((1, 2, 3)), "PNG", icc_profile=swapped_profile(), compress_level=0),
    **({"HEIC": HEIC} if HAS_HEIF else {}),
    **({"AVIF": saved(coloured((1, 2, 3)), "AVIF")} if features.check("avif") else {}),
}


@pytest.mark.filterwarnings("ignore")  # Pillow warns of what it meets in damaged headers
@UNHURRIED
@given(st.sampled_from(sorted(FUZZED)), st.data())
def test_damaged_bytes_of_any_kind_give_a_picture_or_a_source_error(
    kind: str, data: st.DataObject
) -> None:
    content = bytearray(FUZZED[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    try:
        look = media.inspect(bytes(content))
        image = media.decode(bytes(content))
    except SourceError:
        return
    assert (image.mode, image.size) == ("RGB", (look.width, look.height))
