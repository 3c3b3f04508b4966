"""A contact sheet: pictures as they are trained on, cropped, masked and captioned, some of each set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from outsize.data import media
from outsize.data.buckets import CropPlan
from outsize.data.manifest import Manifest, Mask
from outsize.data.masks import on_grid
from outsize.data.samples import Sample

_COLUMNS, _CELL, _GAP, _MARGIN = 6, 190, 14, 24
_LINE, _CAPTION_LINES = (
    15,
    4,
)  # height of a line of small text, spacing included; lines of a caption
_TITLE, _HEADING = 44, 40
_TEXT, _QUIET, _PAPER, _FRAME = (28, 28, 30), (120, 120, 128), (255, 255, 255), (222, 222, 228)
_VEIL = 0.72  # how much white lies over what is not learned, which is grey beneath

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True, slots=True)
class Section:
    """One set on the sheet. heading: what it is; samples: of its pictures, in order."""

    heading: str
    samples: Sequence[Sample]


def draw_sheet(title: str, manifest: Manifest, sections: Sequence[Section]) -> Image.Image:
    """All sections below each other; what a mask keeps from being learned is grey behind a veil.

    Raises: SourceError when a picture can no longer be read.
    """
    width = 2 * _MARGIN + _COLUMNS * (_CELL + _GAP) - _GAP
    strips = [_text(title, width, 20, _TITLE)]
    for section in sections:
        strips.append(_text(section.heading, width, 15, _HEADING))
        rows = range(0, len(section.samples), _COLUMNS)
        strips += [_row(manifest, section.samples[at : at + _COLUMNS], width) for at in rows]
    sheet = Image.new("RGB", (width, sum(one.height for one in strips) + 2 * _MARGIN), _PAPER)
    top = _MARGIN
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    return sheet


def shown(manifest: Manifest, sample: Sample) -> Image.Image:
    """What a sample shows of its picture, at most as large as a cell."""
    picture = manifest.pictures[sample.picture]
    item = manifest.set_of(picture)
    image = media.decode(picture.origin.read(), item.background)
    part = _part(sample.crop, image.width, image.height)
    scale = _CELL / max(sample.crop.bucket.width, sample.crop.bucket.height)
    size = (
        max(1, round(sample.crop.bucket.width * scale)),
        max(1, round(sample.crop.bucket.height * scale)),
    )
    small = image.resize(size, Image.Resampling.LANCZOS, box=part, reducing_gap=3.0)
    return small if picture.mask is None else _masked(small, picture.mask, sample.crop)


def _part(crop: CropPlan, width: int, height: int) -> tuple[float, float, float, float]:
    """The crop in pixels of the picture itself."""
    left, top, right, bottom = crop.box
    across, down = width / crop.scaled_width, height / crop.scaled_height
    return (left * across, top * down, min(width, right * across), min(height, bottom * down))


def _masked(image: Image.Image, mask: Mask, crop: CropPlan) -> Image.Image:
    whole_HW = media.decode_mask(mask.origin.read(), is_alpha=mask.is_alpha)
    mask_HW = on_grid(whole_HW, crop, (image.height, image.width))
    grey = image.convert("L").point(lambda value: value * (1 - _VEIL) + 255 * _VEIL)
    learned = Image.fromarray((mask_HW * 255).round().astype(np.uint8))
    return Image.composite(image, grey.convert("RGB"), learned)


def _text(text: str, width: int, size: int, height: int) -> Image.Image:
    """A strip with one line."""
    strip = Image.new("RGB", (width, height), _PAPER)
    font = ImageFont.load_default(size)
    draw = ImageDraw.Draw(strip)
    draw.text(
        (_MARGIN, height - size - 12), _fit(text, font, width - 2 * _MARGIN), fill=_TEXT, font=font
    )
    return strip


def _row(manifest: Manifest, samples: Sequence[Sample], width: int) -> Image.Image:
    """A strip of pictures that stand on one line, names and captions below; as high as they take."""
    font = ImageFont.load_default(11)
    pictures = [shown(manifest, one) for one in samples]
    captions = [_wrapped(manifest.pictures[one.picture].caption, font) for one in samples]
    tallest = max(one.height for one in pictures)
    num_lines = 2 + max(map(len, captions))
    strip = Image.new("RGB", (width, tallest + num_lines * _LINE + 2 * _GAP), _PAPER)
    draw = ImageDraw.Draw(strip)
    for column, (sample, picture) in enumerate(zip(samples, pictures, strict=True)):
        x = _MARGIN + column * (_CELL + _GAP)
        left, top = x + (_CELL - picture.width) // 2, tallest - picture.height + 1
        strip.paste(picture, (left, top))
        draw.rectangle(
            (left - 1, top - 1, left + picture.width, top + picture.height), outline=_FRAME
        )
        y = tallest + 5
        for text in (manifest.pictures[sample.picture].name, _size_of(manifest, sample)):
            draw.text((x, y), _fit(text, font), fill=_QUIET, font=font)
            y += _LINE
        for text in captions[column]:
            draw.text((x, y), text, fill=_TEXT, font=font)
            y += _LINE
    return strip


def _size_of(manifest: Manifest, sample: Sample) -> str:
    picture, bucket = manifest.pictures[sample.picture], sample.crop.bucket
    return f"{picture.width} x {picture.height}, at {bucket.width} x {bucket.height}"


def _fit(text: str, font: Font, width: int = _CELL) -> str:
    """As much of a text as there is room for."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def _wrapped(text: str, font: Font) -> list[str]:
    """A caption in the lines that there is room for."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= _CELL:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > _CAPTION_LINES:
        lines[_CAPTION_LINES - 1] += " ..."
    return [_fit(line, font) for line in lines[:_CAPTION_LINES]]
