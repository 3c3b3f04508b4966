"""From whatever a file holds to 8-bit sRGB: wide grey, palettes, CMYK, colour profiles, transparency.

Dimensions: H W height and width.
"""

from __future__ import annotations

import functools
import io
from typing import cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from outsize.base.errors import SourceError

RGB = tuple[int, int, int]
WHITE: RGB = (255, 255, 255)

_WIDE_MODES = {"I", "I;16", "I;16B", "I;16L", "I;16N"}  # 16-bit grey, as Pillow names it
_ALPHA_MODES = {"RGBA", "RGBa", "LA", "La", "PA"}
# What a profile must be for, by the mode of the pixels that it describes.
_SPACES = {"RGB": "RGB ", "CMYK": "CMYK", "L": "GRAY"}


def has_alpha(image: Image.Image) -> bool:
    """Whether pixels of the picture may be transparent."""
    return image.mode in _ALPHA_MODES or "transparency" in image.info


def as_rgb(image: Image.Image, background: RGB) -> Image.Image:
    """The picture in 8-bit sRGB, laid on a colour where it is transparent.

    Raises: SourceError for numbers of which nobody knows where white is.
    """
    profile = image.info.get("icc_profile")
    image = _narrow(image)
    if not has_alpha(image):
        kept = image if image.mode in _SPACES else image.convert("RGB")
        return _to_srgb(kept, profile)
    picture = image.convert("RGBA")
    under = Image.new("RGBA", picture.size, (*background, 255))
    opaque = _to_srgb(picture.convert("RGB"), profile)
    opaque.putalpha(picture.getchannel("A"))
    return Image.alpha_composite(under, opaque).convert("RGB")


def grey_of(image: Image.Image) -> NDArray[np.float32]:
    """Brightness (H, W), 0..1, of a mask; what is transparent is black."""
    if image.mode in _WIDE_MODES:
        return (_wide(image) / 65535).astype(np.float32)
    if has_alpha(image):
        picture = image.convert("RGBA")
        black = Image.new("RGBA", picture.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, picture)
    return np.asarray(image.convert("L"), dtype=np.float32) / np.float32(255)


def alpha_of(image: Image.Image) -> NDArray[np.float32]:
    """Opacity (H, W), 0..1."""
    if not has_alpha(image):
        return np.ones((image.height, image.width), dtype=np.float32)
    return np.asarray(image.convert("RGBA").getchannel("A"), dtype=np.float32) / np.float32(255)


def profile_note(image: Image.Image) -> tuple[bool, str]:
    """Whether the picture's colours are converted by its profile, and what is wrong with a profile that is not used."""
    content = image.info.get("icc_profile")
    if not content:
        return False, ""
    profile = _profile(content)
    if profile is None:
        return False, "its colour profile cannot be read: taken as sRGB"
    if profile.is_srgb:
        return False, ""
    mode = image.mode if image.mode in {"CMYK", "L"} else "RGB"
    if _SPACES[mode] != profile.space and image.mode not in _WIDE_MODES:
        return False, f"its colour profile is for {profile.space.strip()}, not {mode}: not used"
    return image.mode not in _WIDE_MODES, ""


def _narrow(image: Image.Image) -> Image.Image:
    """8 bits a channel."""
    if image.mode in _WIDE_MODES:
        scaled = (_wide(image) * 255 + 32767) // 65535
        return Image.fromarray(scaled.astype(np.uint8))
    if image.mode == "F":
        raise SourceError(
            "pixels in 32-bit floats do not say which number is white; save it with 8 or 16 bits"
        )
    return image


def _wide(image: Image.Image) -> NDArray[np.int64]:
    """16-bit grey as whole numbers."""
    pixels = np.asarray(image, dtype=np.int64)
    if pixels.size and (pixels.min() < 0 or pixels.max() > 65535):
        raise SourceError(
            f"grey values from {pixels.min()} to {pixels.max()} are no 16-bit ones; save it with 8 or 16 bits"
        )
    return pixels


class _Profile:
    """A colour profile that could be read."""

    def __init__(self, content: bytes) -> None:
        self.inner = ImageCms.ImageCmsProfile(io.BytesIO(content))
        self.space = str(self.inner.profile.xcolor_space)
        description = self.inner.profile.profile_description or ""
        self.is_srgb = "srgb" in description.lower()


@functools.lru_cache(maxsize=16)
def _profile(content: bytes) -> _Profile | None:
    try:
        return _Profile(content)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


def _to_srgb(image: Image.Image, content: bytes | None) -> Image.Image:
    """The picture in sRGB; without a profile for its mode it is taken to be in it."""
    profile = _profile(content) if content else None
    if profile is None or profile.is_srgb or profile.space != _SPACES[image.mode]:
        return image.convert("RGB")
    try:
        made = ImageCms.profileToProfile(
            image,
            profile.inner,
            ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            outputMode="RGB",
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except ImageCms.PyCMSError as error:
        raise SourceError(
            f"its colour profile cannot be applied ({error}); save it in sRGB"
        ) from error
    return cast("Image.Image", made)
