"""Score of generated pictures: which real picture is nearest, among all of them, on the same background.

No trained scorer and no threshold: a generation counts as a cat if the nearest of all real pictures is one. Distance is
taken over two views of a picture, edge directions in cells (shape) and mean colour in cells (appearance). Needs numpy
only; Pillow is imported when the gallery file is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

SIDE_PX = 48
CELL_PX = 6
NUM_DIRECTIONS = 9
# Weight of the colour view: chosen so that both views spread equally over the real pictures (RMS distance 1 each).
COLOUR_WEIGHT = 1.0


@dataclass(frozen=True, slots=True)
class Match:
    """The nearest real picture of one generation."""

    name: str
    style: str
    distance: float


@dataclass(slots=True)
class Gallery:
    """All real pictures: rgba_NHWC (N, 48, 48, 4) uint8 with names and styles; features are kept per background."""

    rgba_NHWC: np.ndarray
    names: list[str]
    styles: list[str]
    backgrounds: dict[str, tuple[int, int, int]]
    _views: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def pictures(self, background: str) -> np.ndarray:
        """All pictures on a named background, (N, 48, 48, 3) uint8."""
        alpha = self.rgba_NHWC[..., 3:].astype(np.float32) / 255.0
        colour = np.asarray(self.backgrounds[background], np.float32)
        mixed = self.rgba_NHWC[..., :3].astype(np.float32) * alpha + colour * (1.0 - alpha)
        rounded: np.ndarray = np.rint(mixed).astype(np.uint8)
        return rounded

    def nearest(self, picture_HWC: np.ndarray, background: str) -> Match:
        """The real picture nearest to picture_HWC (48, 48, 3) uint8 on the same background."""
        if background not in self._views:
            self._views[background] = _scaled_views(self.pictures(background))
        real, scale = self._views[background]
        asked = np.concatenate(_views(picture_HWC[None]), axis=1) * scale
        # |r - a|^2 without its constant |a|^2, which moves no minimum and would cost a table-sized copy.
        best = int(((real**2).sum(1) - 2 * (real @ asked[0])).argmin())
        distance = float(np.sqrt(((real[best] - asked[0]) ** 2).sum()))
        return Match(self.names[best], self.styles[best], distance)


def load_gallery(atlas_png: Path, names_json: Path) -> Gallery:
    """Read the gallery: one RGBA atlas of 48-pixel tiles, row by row, and the names of its tiles."""
    from PIL import Image

    table = json.loads(names_json.read_text(encoding="utf-8"))
    atlas = np.asarray(Image.open(atlas_png).convert("RGBA"))
    rows, columns = atlas.shape[0] // SIDE_PX, atlas.shape[1] // SIDE_PX
    tiles = atlas.reshape(rows, SIDE_PX, columns, SIDE_PX, 4).swapaxes(1, 2)
    tiles = tiles.reshape(-1, SIDE_PX, SIDE_PX, 4)[: len(table["names"])]
    backgrounds = {k: tuple(v) for k, v in table["backgrounds"].items()}
    return Gallery(tiles, table["names"], table["styles"], backgrounds)


def is_cat(match: Match) -> bool:
    """Whether the nearest real picture is a cat, judged by the word "cat" in its name."""
    return "cat" in match.name.split("-")


def recognised(match: Match, name: str) -> bool:
    """Whether the nearest real picture has the name that was asked for, in either style."""
    return match.name == name


def _views(pictures_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edge and colour features, one row per picture."""
    pixels = pictures_NHWC.astype(np.float32) / 255.0
    return _edge_directions(pixels.mean(-1)), _cell_means(pixels)


def _scaled_views(pictures_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features of the real pictures and the scale that gives both views an equal say."""
    edges, colours = _views(pictures_NHWC)
    spread = [float(np.sqrt(v.var(0).sum())) for v in (edges, colours)]
    scale = np.concatenate(
        [
            np.full(edges.shape[1], 1 / spread[0]),
            np.full(colours.shape[1], COLOUR_WEIGHT / spread[1]),
        ]
    ).astype(np.float32)
    return np.concatenate([edges, colours], axis=1) * scale, scale


def _edge_directions(gray_NHW: np.ndarray) -> np.ndarray:
    """Histograms of oriented gradients over 6-pixel cells, normalised over 2 x 2 cells (Dalal and Triggs, 2005)."""
    down, right = np.gradient(gray_NHW, axis=(1, 2))
    strength = np.hypot(down, right)
    turn = (np.arctan2(down, right) % np.pi) / np.pi * NUM_DIRECTIONS
    low = np.floor(turn).astype(np.int64) % NUM_DIRECTIONS
    part = turn - np.floor(turn)
    cells = np.stack(
        [
            _cell_means(
                (strength * ((low == k) * (1 - part) + ((low + 1) % NUM_DIRECTIONS == k) * part))[
                    ..., None
                ]
            )
            for k in range(NUM_DIRECTIONS)
        ],
        axis=-1,
    )
    side = SIDE_PX // CELL_PX
    cells = cells.reshape(len(gray_NHW), side, side, NUM_DIRECTIONS)
    blocks = np.concatenate(
        [cells[:, y : side - 1 + y, x : side - 1 + x] for y in (0, 1) for x in (0, 1)], axis=-1
    )
    # 0.02 keeps a flat block flat: it is the mean gradient of a barely visible edge.
    blocks = blocks / np.sqrt((blocks**2).sum(-1, keepdims=True) + 0.02**2)
    rows: np.ndarray = blocks.reshape(len(gray_NHW), -1).astype(np.float32)
    return rows


def _cell_means(pixels_NHWC: np.ndarray) -> np.ndarray:
    """Mean of each 6-pixel cell, flattened to one row per picture."""
    num, height, width, channels = pixels_NHWC.shape
    cells = pixels_NHWC.reshape(
        num, height // CELL_PX, CELL_PX, width // CELL_PX, CELL_PX, channels
    ).mean((2, 4))
    rows: np.ndarray = cells.reshape(num, -1).astype(np.float32)
    return rows
