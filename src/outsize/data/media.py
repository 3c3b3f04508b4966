"""From the bytes of a picture file to pixels a model takes: decode, turn, flatten, scale, crop.

What a picture is here does not depend on how it was saved: it is turned as its EXIF or XMP tag
says, laid on white where it is transparent, and brought to 8-bit RGB. Anything that changes a
pixel of the result must raise TRANSFORM, which is part of every cache key.

Dimensions: C colours (3), H W height and width.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from outsize.base.errors import SourceError
from outsize.data.buckets import CropPlan

if TYPE_CHECKING:
    from torch import Tensor

TRANSFORM = "media/1"
_ORIENTATION = 0x0112  # EXIF 2.32, table 4; values 5 to 8 swap width and height
_WIDE_MODES = {"I", "I;16", "I;16B", "I;16L", "I;16N"}  # 16-bit grey, as Pillow names it
_ALPHA_MODES = {"RGBA", "RGBa", "LA", "La", "PA"}

# What Pillow's decoders raise on damaged files, gathered by the fuzz test of this module.
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def inspect(content: bytes) -> tuple[int, int]:
    """Width and height as the picture is looked at, after proving that it decodes to its end.

    Raises: SourceError saying what is wrong, without a file name, which the caller knows.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            # JPEG only: the bit stream is read to its end, most of the arithmetic is left out.
            image.draft(None, (max(1, width // 8), max(1, height // 8)))
            image.load()
            is_turned = image.getexif().get(_ORIENTATION, 1) in range(5, 9)
    except _UNREADABLE as error:
        raise _unreadable(content, error) from error
    return (height, width) if is_turned else (width, height)


def decode(content: bytes) -> Image.Image:
    """The picture upright in 8-bit RGB; of an animation the first frame.

    Raises: SourceError as inspect does.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            return _as_rgb(ImageOps.exif_transpose(image))
    except _UNREADABLE as error:
        raise _unreadable(content, error) from error


def crop_fields(crop: CropPlan) -> dict[str, Any]:
    """What this module adds to a cache key: the crop and the version of the transform."""
    return {"transform": TRANSFORM, **crop.describe()}


def pixels_of(image: Image.Image, crop: CropPlan) -> Tensor:
    """Pixels (C, H, W) of the bucket, fp32 in -1..1, of a decoded picture."""
    import torch

    scaled_size = (crop.scaled_width, crop.scaled_height)
    if image.size != scaled_size:
        # A gap of 3 lets Pillow shrink by whole factors first; it says the result is as good.
        image = image.resize(scaled_size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    pixels_HWC = np.array(image.crop(crop.box), dtype=np.float32)
    pixels_HWC = pixels_HWC / np.float32(127.5) - np.float32(1)
    return torch.from_numpy(np.ascontiguousarray(pixels_HWC.transpose(2, 0, 1)))


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _WIDE_MODES:
        wide = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        image = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
    if image.mode not in _ALPHA_MODES and "transparency" not in image.info:
        return image.convert("RGB")
    picture = image.convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")


def _unreadable(content: bytes, error: BaseException) -> SourceError:
    if not content:
        return SourceError("the file is empty (0 bytes)")
    # Pillow names the object that it was given, which here is no file
    why = re.sub(r"image file <.*>", "its kind", str(error))
    return SourceError(f"not a readable picture ({len(content)} bytes): {why}")
