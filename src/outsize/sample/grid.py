"""A labelled grid of pictures: rows with a title each, columns with a caption each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

_MARGIN, _GAP = 12, 6
_SPACING = 2  # between lines of small text
_LINE = 15  # height of one of them, spacing included
_TEXT, _QUIET, _PAPER = (28, 28, 30), (110, 110, 115), (255, 255, 255)


@dataclass(frozen=True, slots=True)
class Row:
    """Pictures of one kind. title: its meaning, in a few words, at the left."""

    title: str
    pictures: Sequence[Image.Image]


def draw_grid(
    heading: str, rows: Sequence[Row], captions: Sequence[str] = (), *, cell: int = 96
) -> Image.Image:
    """One picture with all rows; every cell is `cell` pixels wide, small pictures enlarged without smoothing."""
    font, small = ImageFont.load_default(15), ImageFont.load_default(11)
    columns = max(len(row.pictures) for row in rows)
    heights = [max(_scaled_height(one, cell) for one in row.pictures) for row in rows]
    left, top = _MARGIN + 150, _MARGIN + 28
    wrapped = [_wrap(caption, cell, small) for caption in captions]
    first_row = top + max((text.count("\n") + 1 for text in wrapped), default=0) * _LINE + _GAP
    width = left + columns * (cell + _GAP) + _MARGIN
    height = first_row + sum(heights) + len(rows) * _GAP + _MARGIN
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, _MARGIN), heading, fill=_TEXT, font=font)
    for column, text in enumerate(wrapped):
        x = left + column * (cell + _GAP)
        draw.multiline_text((x, top), text, fill=_QUIET, font=small, spacing=_SPACING)
    y = first_row
    for row, row_height in zip(rows, heights, strict=True):
        draw.multiline_text((_MARGIN, y + 4), _wrap(row.title, 140, small), fill=_TEXT, font=small)
        for column, picture in enumerate(row.pictures):
            sheet.paste(_scaled(picture, cell), (left + column * (cell + _GAP), y))
        y += row_height + _GAP
    return sheet


def _scaled_height(picture: Image.Image, cell: int) -> int:
    return round(picture.height * cell / picture.width)


def _scaled(picture: Image.Image, cell: int) -> Image.Image:
    size = (cell, _scaled_height(picture, cell))
    grows = picture.width < cell
    return picture.convert("RGB").resize(
        size, Image.Resampling.NEAREST if grows else Image.Resampling.LANCZOS
    )


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Break a text into lines of at most `width` pixels."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)
