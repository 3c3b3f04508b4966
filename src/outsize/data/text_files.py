"""Files of texts: which ones a set names, and their rows with numbers that an error can name.

JSON lines, JSON arrays, parquet, arrow shards and plain text. A folder may be a Hugging Face dataset as it is
downloaded or as `save_to_disk` writes it; which file belongs to which split is read off names alone. parquet and arrow
need pyarrow, which is imported when such a file is met.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from outsize.base.errors import SourceError

ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".txt")

# What a dataset folder holds beside its data.
_NOT_DATA = re.compile(
    r"(dataset_infos?|dataset_dict|state|config|metadata)\.json|provenance\.jsonl|cache-.*\.arrow|(readme|license).*\.txt",
    re.IGNORECASE,
)
_SHARD = re.compile(r"(.+?)-\d+-of-\d+(-[0-9a-f]+)?")  # older shards end in a digest
_SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file. number: line in a text file, else place of the row, both from 1.

    value: its columns; None where it could not be read, and then fault says why.
    """

    number: int
    value: Mapping[str, Any] | None
    fault: str = ""


def find_files(path: Path, split: str) -> tuple[Path, ...]:
    """The files of a set, in the same order on every system.

    split: taken where names of files or folders name splits, without meaning elsewhere.
    Raises: SourceError when there is no such path, nothing in it that can be read, files of several kinds, or no file
    of the split (names the splits there are).
    """
    if path.is_file():
        if path.suffix.lower() not in ENDINGS:
            raise SourceError(
                f"{path}: a file of this kind is not read; convert it to one of {' '.join(ENDINGS)}"
            )
        return (path,)
    if not path.is_dir():
        raise SourceError(f"{path}: there is no such file or folder")
    names = sorted(data_files(path))
    if not names:
        raise SourceError(f"{path}: holds no file that is read ({' '.join(ENDINGS)})")
    by_split: dict[str | None, list[str]] = {}
    for name in names:
        by_split.setdefault(split_of(name), []).append(name)
    chosen = by_split.get(_SPLITS.get(split, split)) if by_split.keys() - {None} else names
    if not chosen:
        known = ", ".join(sorted(one for one in by_split if one is not None))
        raise SourceError(f"{path}: has no split {split!r}; set split to one of {known}")
    endings = sorted({PurePosixPath(name).suffix.lower() for name in chosen})
    if len(endings) > 1:
        raise SourceError(
            f"{path}: holds files of several kinds ({' '.join(endings)}), which are often the same data twice; "
            "name one file, or a folder of one kind"
        )
    return tuple(path / name for name in chosen)


def split_of(name: str) -> str | None:
    """The split that a relative path names, None when it names none.

    `data/train_sft-00000-of-00003.parquet` is of train_sft, `test/data-00000-of-00001.arrow` and `test.jsonl` of test.
    """
    path = PurePosixPath(name)
    shard = _SHARD.fullmatch(path.stem)
    if shard is not None and shard[1] not in {"data", "part", "shard", "file"}:
        return _SPLITS.get(shard[1], shard[1])
    for part in (path.stem, *reversed(path.parts[:-1])):
        words = re.split(r"[-_. ]", part.lower())
        found = [_SPLITS[word] for word in words if word in _SPLITS]
        if found:
            return found[0]
    return None


def read_rows(path: Path) -> Iterator[Row]:
    """All rows of a file, without keeping them.

    A line that cannot be read is a row with a fault, so that all of them can be named at once.
    Raises: SourceError when the file as a whole cannot be read.
    """
    try:
        yield from _READERS[path.suffix.lower()](path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error


def place_of(path: Path, number: int) -> str:
    """How an error names a row."""
    noun = "line" if path.suffix.lower() in {".jsonl", ".ndjson", ".csv"} else "row"
    return f"{path}: {noun} {number}"


def data_files(folder: Path) -> Iterator[str]:
    """Names of data files at any depth, but hidden ones and those in hidden folders."""
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if is_hidden or path.suffix.lower() not in ENDINGS or _NOT_DATA.fullmatch(path.name):
            continue
        if path.is_file():
            yield relative.as_posix()


def _read_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not content.strip():
                continue
            try:
                yield _row(number, json.loads(content))
            except UnicodeDecodeError as error:
                yield Row(number, None, f"byte {error.start + 1} of the line is not UTF-8 text")
            except json.JSONDecodeError as error:
                yield Row(number, None, f"is not JSON: {error.msg} at character {error.pos + 1}")
            except RecursionError:
                yield Row(number, None, "is nested too deeply to be a sample")


def _read_array(path: Path) -> Iterator[Row]:
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: byte {error.start + 1} is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        hint = "; one object a line is .jsonl" if error.msg == "Extra data" else ""
        raise SourceError(
            f"{path}: line {error.lineno}: is not JSON: {error.msg} at character {error.colno}{hint}"
        ) from error
    if not isinstance(value, list):
        raise SourceError(f"{path}: must hold a list of samples, and holds {_kind(value)}")
    for number, item in enumerate(value, 1):
        yield _row(number, item)


def _read_text(path: Path) -> Iterator[Row]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: byte {error.start + 1} is not UTF-8 text") from error
    yield Row(1, {"text": text.replace("\r\n", "\n")})


def _read_parquet(path: Path) -> Iterator[Row]:
    parquet = import_arrow("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(path) as file:
            yield from _read_batches(file.iter_batches(batch_size=1024))
    except import_arrow("pyarrow", path).ArrowException as error:
        raise SourceError(f"{path}: is no parquet file that can be read: {error}") from error


def _read_arrow(path: Path) -> Iterator[Row]:
    arrow = import_arrow("pyarrow", path)
    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"  # the file format; datasets writes the stream format
        file.seek(0)
        try:
            if is_file:
                whole = arrow.ipc.open_file(file)
                yield from _read_batches(
                    whole.get_batch(i) for i in range(whole.num_record_batches)
                )
            else:
                yield from _read_batches(arrow.ipc.open_stream(file))
        except arrow.ArrowException as error:
            raise SourceError(f"{path}: is no arrow file that can be read: {error}") from error


def _read_batches(batches: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for value in batch.to_pylist():
            number += 1
            yield Row(number, value)


def import_arrow(module: str, path: Path) -> Any:
    """pyarrow, or a module of it, where a file is met that needs it.

    Raises: SourceError naming the file, and the remedy, when it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SourceError(
            f"{path}: reading it needs pyarrow, which is not installed; `pip install pyarrow`, or convert the file "
            "to .jsonl"
        ) from error


def _row(number: int, value: object) -> Row:
    if isinstance(value, dict):
        return Row(number, value)
    return Row(number, None, f"must be an object with columns, and is {_kind(value)}")


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        type(None): "null",
        bool: "a truth value",
    }
    return names.get(type(value), "a number")


_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_array,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_text,
}
