"""The pictures and texts of a report: previews and comparisons, small enough to lie inside one page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.app.report.history import dicts, read_json

if TYPE_CHECKING:
    from outsize.runs.folder import RunFolder

MOST_PREVIEWS = 40  # of a long run, at even distances, the first and the last among them
_WIDEST = 960  # pixels
_QUALITY = 82
_MOST_PIXELS = 64_000_000  # a grid is far smaller; what is larger is not opened


@dataclass(frozen=True, slots=True)
class Picture:
    """source: a data URI."""

    source: str
    width: int
    height: int
    caption: str


@dataclass(frozen=True, slots=True)
class Preview:
    """What the adapter of one step makes. texts: (prompt, seed, text); waits: not decoded yet."""

    step: int
    picture: Picture | None
    texts: tuple[tuple[str, str, str], ...] = ()
    waits: bool = False


def previews_of(run: RunFolder) -> tuple[list[Preview], int]:
    """Previews in the order of their steps, and how many there are beside those."""
    folders = sorted(one for one in run.previews.glob("*") if one.name.isdigit())
    chosen = _evenly(folders, MOST_PREVIEWS)
    found = [_preview(folder) for folder in chosen]
    return found, len(folders) - len(chosen)


def comparisons_of(run: RunFolder) -> list[Picture]:
    """The newest grid of base against adapter, and the demo's."""
    folders = sorted(
        one
        for one in (run.path / "compare").glob("*")
        if one.name.isdigit() and (one / "grid.png").exists()
    )
    paths = [(one / "grid.png", f"base against adapter ({one.name})") for one in folders[-1:]]
    paths.append((run.path / "demo.png", "the demo's proof"))
    found = (embedded(path, caption) for path, caption in paths)
    return [one for one in found if one is not None]


def embedded(path: Path, caption: str) -> Picture | None:
    """A picture as a data URI, no wider than a page; None when there is none that can be read."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > _MOST_PIXELS:
                return None
            picture = opened.convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError):
        return None
    if picture.width > _WIDEST:
        height = max(1, round(picture.height * _WIDEST / picture.width))
        picture = picture.resize((_WIDEST, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=_QUALITY, optimize=True)
    source = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return Picture(source, picture.width, picture.height, caption)


def _preview(folder: Path) -> Preview:
    step, values = int(folder.name), read_json(folder / "preview.json")
    values = values if isinstance(values, dict) else {}
    texts = tuple(
        (str(one.get("prompt", "")), str(one.get("seed", "")), str(one.get("text", "")))
        for one in dicts(values.get("texts"))
    )
    asked = [str(one.get("prompt", "")) for one in dicts(values.get("pictures"))]
    caption = f"step {step}: {'; '.join(dict.fromkeys(asked))}"
    picture = embedded(folder / "grid.png", caption)
    return Preview(step, picture, texts, waits=bool(asked) and picture is None)


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
