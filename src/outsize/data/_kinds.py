"""Kinds of picture files: which are read, which need a library, and what a file is whatever its name says."""

from __future__ import annotations

import importlib
import importlib.util

from PIL import features

from outsize.base.errors import SourceError

PICTURE_EXTENSIONS = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
    | {".heic", ".heif", ".avif"}
)
# Pictures we do not read: passing over them needs a warning.
OTHER_PICTURES = frozenset({".jxl", ".psd", ".svg", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw"})

# Brands of ISO/IEC 23008-12 (HEIF) files, bytes 8 to 12; mif1 and msf1 hold either, which later brands tell.
_HEIC_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs"})
_AVIF_BRANDS = frozenset({b"avif", b"avis"})


class LibraryMissing(SourceError):  # noqa: N818 - reads as the claim it makes
    """A picture is of a kind that only an optional library reads: the file itself may be whole."""


def require_reader(content: bytes) -> None:
    """Make sure that the picture's kind can be read here; registers an optional library where one is needed.

    Raises: LibraryMissing naming the library; SourceError for JPEG XL, which is not read.
    """
    brands = _brands(content)
    if brands & _HEIC_BRANDS:
        _register_heif()
    elif brands & _AVIF_BRANDS:
        if not features.check("avif"):
            raise LibraryMissing(
                "a picture in AVIF, which this build of Pillow does not read; `pip install 'pillow>=11.3'`"
            )
    elif content[:2] == b"\xff\x0a" or content[4:12] == b"JXL \r\n\x87\n":
        raise SourceError("a picture in JPEG XL, which is not read; convert it to PNG")


def _brands(content: bytes) -> frozenset[bytes]:
    """Major and compatible brands of an ISO media file; none for others."""
    if content[4:8] != b"ftyp":
        return frozenset()
    end = min(int.from_bytes(content[:4], "big"), 256, len(content))
    return frozenset(content[place : place + 4] for place in (8, *range(16, end, 4)))


def _register_heif() -> None:
    """Let Pillow read HEIC through pi-heif, or pillow-heif where that is installed instead."""
    for name in ("pi_heif", "pillow_heif"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name).register_heif_opener()
            return
    raise LibraryMissing(
        "a picture in HEIC, which needs a library: `pip install pi-heif` (or outsize[heic])"
    )
