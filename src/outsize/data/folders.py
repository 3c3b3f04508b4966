"""A folder of pictures: captions and masks lie in files of the same name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outsize.data._kinds import OTHER_PICTURES, PICTURE_EXTENSIONS
from outsize.data.found import (
    Findings,
    Found,
    PictureSet,
    extension_of,
    masks_below,
    stem_of,
)
from outsize.data.origin import Origin
from outsize.data.text_files import split_of

_JSON = ".json"


def find_in_folder(item: PictureSet, files: Mapping[str, Path]) -> Findings:
    """The set's pictures by name, each with the caption beside it.

    Faults: no picture, captions that cannot be read, a split that no folder is named after.
    """
    findings = Findings()
    names = [name for name in files if extension_of(name) in PICTURE_EXTENSIONS]
    if item.split is not None:
        names = _of_split(item, names, findings)
    beside = _Captions.among(item, files)
    masks = {} if item.masks is None else masks_below(item.masks, findings)
    for name in names:
        source = beside.of(name)
        try:
            caption = "" if source is None else beside.read(source)
        except (OSError, ValueError) as error:
            findings.faults.append(f"{source}: {_unreadable(error)}")
            continue
        findings.pictures.append(
            Found(
                name=name,
                origin=Origin(files[name]),
                caption=caption,
                uncaptioned=beside.uncaptioned(files[name], source),
                mask=masks.get(stem_of(name)),
            )
        )
    findings.warnings += [
        f"{path}: pictures of this kind are not read ({known_extensions()})"
        for name, path in files.items()
        if extension_of(name) in OTHER_PICTURES
    ]
    lonely = beside.texts.keys() - {stem_of(name) for name in names} - set(names)
    if item.split is None:
        findings.warnings += [
            f"{beside.texts[stem]}: a caption without a picture" for stem in sorted(lonely)
        ]
    if not names and not findings.faults:
        findings.faults.append(f"{item.folder}: no picture in it ({known_extensions()})")
    return findings


def known_extensions() -> str:
    """The endings of pictures that are read."""
    return " ".join(sorted(PICTURE_EXTENSIONS))


def caption_in(value: Any, item: PictureSet) -> str:
    """The caption of a JSON object, or of a row: text, or a list of tags. "" where it has none.

    Raises: ValueError saying what is there instead.
    """
    if isinstance(value, str):
        return one_line(value)
    if not isinstance(value, Mapping):
        raise ValueError("must hold a text, or an object with a caption")  # noqa: TRY004 - of the file, not a type
    for key in (*item.caption_columns, *(("tags",) if item.caption_column is None else ())):
        found = value.get(key)
        if found is None:
            continue
        if isinstance(found, list) and all(isinstance(one, str) for one in found):
            if key in {"tags", item.caption_column}:
                return one_line(", ".join(found))
            raise ValueError(f"{key!r} holds {len(found)} captions; give each a row of its own")
        if not isinstance(found, str):
            raise ValueError(f"{key!r} must be text, and is {found!r:.40}")  # noqa: TRY004 - as above
        return one_line(found)
    return ""


def one_line(text: str) -> str:
    """A text with all white space between words made one space."""
    return " ".join(text.split())


class _Captions:
    """Caption files by stem: those of the wanted ending, and JSON files for pictures without one."""

    def __init__(
        self, item: PictureSet, texts: Mapping[str, Path], others: Mapping[str, Path]
    ) -> None:
        self.texts = texts
        self._item, self._others = item, others

    @classmethod
    def among(cls, item: PictureSet, files: Mapping[str, Path]) -> _Captions:
        wanted = _dotted(item)

        def ending(text: str) -> dict[str, Path]:
            return {
                name[: -len(text)]: path
                for name, path in files.items()
                if name.lower().endswith(text)
            }

        return cls(item, ending(wanted), {} if wanted == _JSON else ending(_JSON))

    def of(self, name: str) -> Path | None:
        """The caption file of a picture. `a.jpg` has its caption in a.txt, or in a.jpg.txt as some tools write it."""
        for captions in (self.texts, self._others):
            for stem in (stem_of(name), name):
                if stem in captions:
                    return captions[stem]
        return None

    def read(self, source: Path) -> str:
        """The caption in a file. Raises: OSError, ValueError."""
        text = source.read_text(encoding="utf-8-sig")
        if source.suffix.lower() != _JSON:
            return one_line(text)
        return caption_in(json.loads(text), self._item)

    def uncaptioned(self, picture: Path, source: Path | None) -> str:
        """What to say of a picture without a caption."""
        written = f"{picture.stem}{_dotted(self._item)}"
        remedy = f"write {written}, or set a trigger or default_caption"
        if source is None:
            return f"{picture}: has no caption beside it; {remedy}"
        if source.suffix.lower() == _JSON:
            keys = ", ".join(self._item.caption_columns)
            return f"{source}: holds no caption ({keys}); {remedy}"
        return f"{source}: the caption is empty; {remedy}"


def _dotted(item: PictureSet) -> str:
    return f".{item.caption_extension.lstrip('.').lower()}"


def _of_split(item: PictureSet, names: list[str], findings: Findings) -> list[str]:
    """Pictures in folders named after a split."""
    by_split: dict[str | None, list[str]] = {}
    for name in names:
        folder = name.rpartition("/")[0]
        by_split.setdefault(split_of(f"{folder}/_") if folder else None, []).append(name)
    chosen = by_split.get(split_of(f"{item.split}/_") or item.split, [])
    if not chosen:
        known = ", ".join(sorted(one for one in by_split if one)) or "none"
        findings.faults.append(
            f"{item.folder}: has no pictures of a split {item.split!r}; its folders name: {known}"
        )
    return chosen


def _unreadable(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"the caption cannot be read: {error.strerror or error}"
    if isinstance(error, UnicodeDecodeError):
        return f"the caption is not UTF-8 text ({error}); save it as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error.msg} at line {error.lineno}, character {error.colno}"
    return str(error)
