"""From the bytes of a picture file to pixels a model takes: decode, turn, flatten, scale, crop.

What a picture is here does not depend on how it was saved: it is turned as its EXIF or XMP tag says, laid on a colour
where it is transparent, and brought to 8-bit sRGB; of several frames the first is taken. Anything that changes a pixel
of the result must raise TRANSFORM, or add to crop_fields: both are part of every cache key.

Dimensions: C colours (3), H W height and width.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from outsize.base.errors import SourceError
from outsize.data import _colour
from outsize.data._colour import RGB, WHITE
from outsize.data._kinds import require_reader
from outsize.data.buckets import CropPlan

if TYPE_CHECKING:
    from torch import Tensor

TRANSFORM = "media/1"
LOOKS = "looks/1"  # raise it when the same bytes must lead to another Look
_PROFILES = "srgb/1"  # how colour profiles are applied
_ORIENTATION = 0x0112  # EXIF 2.32, table 4; values 5 to 8 swap width and height
_ONE_PICTURE = {"MPO"}  # a JPEG with previews or depth behind it: several frames, but no animation

# What Pillow's decoders raise on damaged files, gathered by the fuzz test of this module.
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    EOFError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True, slots=True)
class Look:
    """What decoding has shown. width, height: as the picture is looked at, orientation applied.

    has_profile: its colours are converted by a profile that it holds. note: what a person should know of it, or "".
    """

    width: int
    height: int
    has_alpha: bool = False
    has_profile: bool = False
    note: str = ""


def inspect(content: bytes) -> Look:
    """What the picture is, after proving that it decodes to its end.

    Raises: SourceError saying what is wrong, without a file name, which the caller knows; LibraryMissing.
    """
    with _opened(content) as image:
        width, height = image.size
        note = _frames_note(image)
        # JPEG only: the bit stream is read to its end, most of the arithmetic is left out.
        image.draft(None, (max(1, width // 8), max(1, height // 8)))
        image.load()
        is_turned = image.getexif().get(_ORIENTATION, 1) in range(5, 9)
        has_profile, unused = _colour.profile_note(image)
        if image.mode not in {"RGB", "L"}:
            _colour.as_rgb(image, WHITE)  # refuses what has no 8-bit form
        size = (height, width) if is_turned else (width, height)
        notes = "; ".join(filter(None, (note, unused)))
        return Look(*size, _colour.has_alpha(image), has_profile, notes)


def decode(content: bytes, background: RGB = WHITE) -> Image.Image:
    """The picture upright in 8-bit sRGB, laid on a colour where it is transparent; of several frames the first.

    Raises: SourceError as inspect does.
    """
    with _opened(content) as image:
        image.load()
        return _colour.as_rgb(ImageOps.exif_transpose(image), background)


def decode_mask(content: bytes, *, is_alpha: bool) -> NDArray[np.float32]:
    """A mask upright, (H, W) in 0..1: the picture's brightness, or its opacity.

    Raises: SourceError as inspect does.
    """
    with _opened(content) as image:
        image.load()
        upright = ImageOps.exif_transpose(image)
        return _colour.alpha_of(upright) if is_alpha else _colour.grey_of(upright)


def crop_fields(
    crop: CropPlan, look: Look | None = None, background: RGB = WHITE, *, is_flipped: bool = False
) -> dict[str, Any]:
    """What this module adds to a cache key: the crop, the version of the transform, and what else shapes the pixels.

    A background counts only where there is something to see it through.
    """
    fields: dict[str, Any] = {"transform": TRANSFORM, **crop.describe()}
    if look is not None and look.has_alpha and background != WHITE:
        fields["background"] = list(background)
    if look is not None and look.has_profile:
        fields["profiles"] = _PROFILES
    if is_flipped:
        fields["is_flipped"] = True
    return fields


def pixels_of(image: Image.Image, crop: CropPlan, *, is_flipped: bool = False) -> Tensor:
    """Pixels (C, H, W) of the bucket, fp32 in -1..1, of a decoded picture; left and right exchanged if flipped."""
    import torch

    scaled_size = (crop.scaled_width, crop.scaled_height)
    if image.size != scaled_size:
        # A gap of 3 lets Pillow shrink by whole factors first; it says the result is as good.
        image = image.resize(scaled_size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    pixels_HWC = np.array(image.crop(crop.box), dtype=np.float32)
    if is_flipped:
        pixels_HWC = pixels_HWC[:, ::-1]
    pixels_HWC = pixels_HWC / np.float32(127.5) - np.float32(1)
    return torch.from_numpy(np.ascontiguousarray(pixels_HWC.transpose(2, 0, 1)))


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """The picture as Pillow opens it; what fails inside the block is told in our words."""
    try:
        require_reader(content)
        with Image.open(io.BytesIO(content)) as image:
            yield image
    except _UNREADABLE as error:
        raise _unreadable(content, error) from error


def _frames_note(image: Image.Image) -> str:
    num_frames = getattr(image, "n_frames", 1)
    if num_frames == 1 or image.format in _ONE_PICTURE:
        return ""
    noun = "pages" if image.format == "TIFF" else "frames"
    return f"{num_frames} {noun}: the first is taken"


def _unreadable(content: bytes, error: BaseException) -> SourceError:
    if not content:
        return SourceError("the file is empty (0 bytes)")
    # Pillow names the object that it was given, which here is no file
    why = re.sub(r"image file <.*>", "its kind", str(error))
    return SourceError(f"not a readable picture ({len(content)} bytes): {why}")
