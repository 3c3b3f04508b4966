"""Pictures listed by rows: a manifest (.jsonl, .csv), a Hugging Face imagefolder, or a dataset that holds them (parquet, arrow).

A row names its picture, and may give it a caption, a weight of its loss, a mask, and how often it counts.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.base.errors import SourceError
from outsize.data._kinds import PICTURE_EXTENSIONS
from outsize.data.folders import caption_in
from outsize.data.found import Findings, Found, PictureSet, extension_of, masks_below, stem_of
from outsize.data.origin import TABLES, Origin, table_columns, table_rows
from outsize.data.text_files import Row, find_files, place_of, read_rows, split_of

METADATA = frozenset({"metadata.jsonl", "metadata.csv"})
_FILES = ("file_name", "file", "image", "path")
_SETTINGS = ("weight", "repeats", "mask")


def find_in_manifests(
    item: PictureSet, manifests: Sequence[Path], files: Mapping[str, Path]
) -> Findings:
    """The pictures that manifests list. A file_name is below the set's folder, or beside a manifest that lies in it.

    files: of the set's folder; pictures among them that no row names are a warning.
    Faults: rows that cannot be read, name no file, or give a caption, weight, mask or repeats that is none.
    """
    findings = Findings()
    masks = {} if item.masks is None else masks_below(item.masks, findings)
    for manifest in manifests:
        base = item.folder if item.manifest is not None else manifest.parent
        unused: set[str] = set()
        try:
            for row in _rows(manifest):
                place = place_of(manifest, row.number)
                if row.value is None:
                    findings.faults.append(f"{place}: {row.fault}")
                    continue
                unused |= row.value.keys() - {*_FILES, *_SETTINGS, *item.caption_columns, "tags"}
                _take(findings, _Listed(item, manifest.parent, base, masks), row.value, place)
        except SourceError as error:
            findings.faults.append(str(error))
        if unused:
            findings.warnings.append(f"{manifest}: columns not used: {', '.join(sorted(unused))}")
    _warn_of_unlisted(item, files, findings)
    if not findings.pictures and not findings.faults:
        findings.faults.append(f"{', '.join(map(str, manifests))}: lists no picture")
    return findings


def find_in_dataset(item: PictureSet) -> Findings:
    """The pictures in a dataset's tables, taken row by row.

    Faults: tables that cannot be read, no column of pictures, captions or weights that are none.
    """
    findings = Findings()
    try:
        for path in find_files(item.folder, item.split or "train"):
            _take_table(findings, item, path)
    except SourceError as error:
        findings.faults.append(str(error))
    return findings


def manifests_of(item: PictureSet, files: Mapping[str, Path], findings: Findings) -> list[Path]:
    """The manifests of an imagefolder that belong to the set's split; others are a warning."""
    named = {name: path for name, path in files.items() if name.rpartition("/")[2] in METADATA}
    splits = {name: split_of(name.rpartition("/")[0] + "/_") for name in named}
    if item.split is None and "train" not in splits.values():
        return list(named.values())
    wanted = split_of(f"{item.split or 'train'}/_") or item.split
    chosen = [path for name, path in named.items() if splits[name] == wanted]
    left = [path for name, path in named.items() if splits[name] != wanted]
    findings.warnings += [f"{path}: of another split than {wanted}: not taken" for path in left]
    if named and not chosen:
        findings.faults.append(f"{item.folder}: has no manifest of a split {item.split!r}")
    return chosen


def is_dataset(files: Mapping[str, Path]) -> bool:
    """Whether the folder holds tables, and no picture that is a file."""
    kinds = {extension_of(name) for name in files}
    return bool(kinds & TABLES) and not kinds & PICTURE_EXTENSIONS


@dataclass(frozen=True, slots=True)
class _Listed:
    """Where names in rows lead. beside: the manifest's folder. base: whence pictures are named."""

    item: PictureSet
    beside: Path
    base: Path
    masks: Mapping[str, Origin]

    def found(self, value: Mapping[str, Any], place: str) -> Found:
        """Raises: ValueError saying what is wrong with the row."""
        named = next((value[key] for key in _FILES if value.get(key)), None)
        if not isinstance(named, str):
            raise ValueError(f"names no picture; give it one of the columns {', '.join(_FILES)}")  # noqa: TRY004
        name, mask = Path(named).as_posix(), value.get("mask")
        if mask and not isinstance(mask, str):
            raise ValueError(f"mask must be a path, and is {mask!r:.40}")
        return Found(
            name=name,
            origin=Origin(self.base / named),
            caption=caption_in(value, self.item),
            uncaptioned=_uncaptioned(self.item, place),
            mask=Origin(self.beside / mask) if mask else self.masks.get(stem_of(name)),
            **_settings(value),
        )


def _take(findings: Findings, listed: _Listed, value: Mapping[str, Any], place: str) -> None:
    try:
        findings.pictures.append(listed.found(value, place))
    except ValueError as error:
        findings.faults.append(f"{place}: {error}")


def _take_table(findings: Findings, item: PictureSet, path: Path) -> None:
    columns = table_columns(path)
    image = _image_column(item, columns, path)
    words = [one for one in (*item.caption_columns, "weight", "repeats") if one in columns]
    has_mask = columns.get("mask") == "picture" and image != "mask"
    for row, value in enumerate(table_rows(path, words)):
        place = place_of(path, row + 1)
        try:
            found = Found(
                name=f"{path.name}#{row + 1}",
                origin=Origin(path, row, image),
                caption=caption_in(value, item),
                uncaptioned=_uncaptioned(item, place),
                mask=Origin(path, row, "mask") if has_mask else None,
                **_settings(value),
            )
        except ValueError as error:
            findings.faults.append(f"{place}: {error}")
            continue
        findings.pictures.append(found)


def _image_column(item: PictureSet, columns: Mapping[str, str], path: Path) -> str:
    """Raises: SourceError when there is no such column, or several that might be it."""
    able = [name for name, kind in columns.items() if kind == "picture"]
    if item.image_column is not None:
        able = [name for name in able if name == item.image_column]
    elif "image" in able:
        able = ["image"]
    if len(able) != 1:
        there = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
        what = "no column" if not able else "several columns"
        raise SourceError(f"{path}: {what} of pictures; set image_column to one of: {there}")
    return able[0]


def _settings(value: Mapping[str, Any]) -> dict[str, Any]:
    """Weight and repeats of a row, where it gives them; numbers may be written as text, as in CSV.

    Raises: ValueError.
    """
    found: dict[str, Any] = {}
    for key, kind, least in (("weight", float, "above 0"), ("repeats", int, "1 or more")):
        written = value.get(key)
        if written is None or written == "":
            continue
        number = _number(written)
        is_kind = number is not None and (kind is float or number.is_integer())
        if number is None or not is_kind or number <= 0:
            raise ValueError(f"{key} must be a number, {least}, and is {written!r:.40}")
        found[key] = kind(number)
    return found


def _number(written: object) -> float | None:
    """A finite number, which may be written as text; None for anything else."""
    if isinstance(written, bool) or not isinstance(written, str | int | float):
        return None
    try:
        number = float(written)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _uncaptioned(item: PictureSet, place: str) -> str:
    columns = ", ".join(item.caption_columns)
    return f"{place}: has no caption ({columns}); write one, or set a trigger or default_caption"


def _rows(manifest: Path) -> Iterator[Row]:
    if not manifest.is_file():
        raise SourceError(f"{manifest}: there is no such manifest")
    if manifest.suffix.lower() == ".csv":
        return _csv_rows(manifest)
    if manifest.suffix.lower() in {".jsonl", ".ndjson", ".json"}:
        return read_rows(manifest)
    raise SourceError(f"{manifest}: a manifest is a .jsonl or .csv file")


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for value in reader:
                if None in value or None in value.values():
                    yield Row(reader.line_num, None, "has more or fewer cells than the first line")
                else:
                    yield Row(reader.line_num, value)
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: byte {error.start + 1} is not UTF-8 text") from error
    except (OSError, csv.Error) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error


def _warn_of_unlisted(item: PictureSet, files: Mapping[str, Path], findings: Findings) -> None:
    listed = {one.origin.path.absolute() for one in findings.pictures}
    listed |= {one.mask.path.absolute() for one in findings.pictures if one.mask is not None}
    left = [
        name
        for name, path in files.items()
        if extension_of(name) in PICTURE_EXTENSIONS and path.absolute() not in listed
    ]
    if left:
        some = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        findings.warnings.append(
            f"{item.folder}: {len(left)} pictures are not listed, and not taken: {some}"
        )
