"""What a file holds, told so that it stays told when the file is renamed, moved, or loses its metadata.

The digest of a safetensors file is that of its tensors' types, shapes and bytes, in an order in which their names have no part. A
file whose tensors were changed, if only rounded to another type, is another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from outsize.base.files import file_digest, json_digest
from outsize.registry.records import Item
from outsize.registry.standing import place_of
from outsize.weights.header import read_header

SUBJECTS_KEY = "outsize.subjects"  # in the header of a file that we wrote
SEPARATOR = "+"  # between ids there
_SUFFIX = ".safetensors"
_WINDOW = 1 << 20


def tensors_digest(path: Path) -> str:
    """SHA-256 of what a safetensors file's tensors hold.

    Raises: SourceError when it is no such file.
    """
    tensors = read_header(path).tensors.values()
    with path.open("rb") as file:
        rows = [
            [one.dtype, list(one.shape), _content_digest(file, one.begin, one.num_bytes)]
            for one in tensors
        ]
    return json_digest(sorted(rows, key=lambda row: (row[2], row[0], row[1])))


def stated_subjects(path: Path) -> tuple[str, ...]:
    """Whom a safetensors file itself says it shows.

    Raises: SourceError when it is no such file.
    """
    stated = read_header(path).metadata.get(SUBJECTS_KEY, "")
    return tuple(stated.split(SEPARATOR)) if stated else ()


def tensor_files(path: Path) -> list[Path]:
    """The safetensors files that a path names: itself, or those in the folder or below it."""
    if path.is_dir():
        return sorted(one for one in path.rglob(f"*{_SUFFIX}") if one.is_file())
    return [path] if path.suffix == _SUFFIX and path.is_file() else []


def items_of(path: Path, *, lies_at: Path | None = None) -> tuple[Item, ...]:
    """A file as the ledger knows it; of a folder itself, and the files of tensors in it.

    lies_at: where it will be, when it still has another name.
    """
    place = path if lies_at is None else lies_at
    if not path.is_dir():
        return (_item(path, place),)
    files = (_item(one, place / one.relative_to(path)) for one in tensor_files(path))
    return (Item(place_of(place)), *files)


def _item(path: Path, place: Path) -> Item:
    if place.suffix == _SUFFIX:
        return Item(place_of(place), tensors=tensors_digest(path))
    return Item(place_of(place), sha256=file_digest(path))


def _content_digest(file: BinaryIO, at: int, num_bytes: int) -> str:
    digest = hashlib.sha256()
    for window in _windows(file, at, num_bytes):
        digest.update(window)
    return digest.hexdigest()


def _windows(file: BinaryIO, at: int, num_bytes: int) -> Iterator[bytes]:
    file.seek(at)
    for start in range(0, num_bytes, _WINDOW):
        yield file.read(min(_WINDOW, num_bytes - start))
