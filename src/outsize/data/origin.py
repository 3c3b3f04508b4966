"""Where the bytes of a picture are: a file, or a cell of a table of pictures (parquet, arrow) as Hugging Face keeps them.

Tables need pyarrow, which is imported when one is met. A cell of parquet is read with its whole row group, so that the
last ones are kept: pictures are asked for in order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.base.errors import SourceError
from outsize.data.text_files import import_arrow

TABLES = frozenset({".parquet", ".arrow"})


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """A file; or, with a row (from 0) and a column, a cell of a table."""

    path: Path
    row: int = -1
    column: str = ""

    def __str__(self) -> str:
        return str(self.path) if self.row < 0 else f"{self.path}: row {self.row + 1}"

    def read(self) -> bytes:
        """All bytes.

        Raises: OSError, or SourceError for a cell that holds no picture.
        """
        if self.row < 0:
            return self.path.read_bytes()
        return _content(_cell(self), self)


def table_columns(path: Path) -> dict[str, str]:
    """The columns of a table, each with its type in words: picture, text or other.

    Raises: SourceError when the table cannot be read, or pyarrow is missing.
    """
    arrow = import_arrow("pyarrow", path)

    def kind(one: Any) -> str:
        is_binary = arrow.types.is_binary(one) or arrow.types.is_large_binary(one)
        is_struct = arrow.types.is_struct(one) and one.get_field_index("bytes") >= 0
        is_text = arrow.types.is_string(one) or arrow.types.is_large_string(one)
        return "picture" if is_binary or is_struct else "text" if is_text else "other"

    with _readable(path):
        schema = _table(path).schema if path.suffix == ".arrow" else _parquet(path).schema_arrow
        return {field.name: kind(field.type) for field in schema}


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Some columns of all rows of a table.

    Raises: SourceError when the table cannot be read.
    """
    with _readable(path):
        if path.suffix == ".arrow":
            batches = _table(path).select(list(columns)).to_batches()
        else:
            batches = _parquet(path).iter_batches(columns=list(columns))
        for batch in batches:
            yield from batch.to_pylist()


def count_rows(path: Path) -> int:
    """Rows of a table, from its header alone where it has one.

    Raises: SourceError when the table cannot be read, or pyarrow is missing.
    """
    with _readable(path):
        if path.suffix == ".arrow":
            return int(_table(path).num_rows)
        return int(_parquet(path).metadata.num_rows)


def _content(value: Any, origin: Origin) -> bytes:
    """The bytes in a cell, or those of the file that it names."""
    if isinstance(value, Mapping):
        content, named = value.get("bytes"), value.get("path")
        if content is None and named:
            return (origin.path.parent / str(named)).read_bytes()
        value = content
    if isinstance(value, bytes):
        return value
    raise SourceError(f"column {origin.column!r} holds no picture")


def _cell(origin: Origin) -> Any:
    with _readable(origin.path):
        if origin.path.suffix == ".arrow":
            return _table(origin.path)[origin.column][origin.row].as_py()
        group, row = _place(origin.path, origin.row)
        column = _row_group(origin.path, group, origin.column)
        return column[row].as_py()


@functools.lru_cache(maxsize=4)
def _starts(path: Path) -> tuple[int, ...]:
    """First row of each row group, and the number of all rows."""
    metadata = _parquet(path).metadata
    starts = [0]
    for group in range(metadata.num_row_groups):
        starts.append(starts[-1] + metadata.row_group(group).num_rows)
    return tuple(starts)


def _place(path: Path, row: int) -> tuple[int, int]:
    starts = _starts(path)
    group = next(i for i in range(len(starts) - 1) if row < starts[i + 1])
    return group, row - starts[group]


@functools.lru_cache(maxsize=2)
def _row_group(path: Path, group: int, column: str) -> Any:
    return _parquet(path).read_row_group(group, columns=[column]).column(column)


def _parquet(path: Path) -> Any:
    return import_arrow("pyarrow.parquet", path).ParquetFile(path)


@functools.lru_cache(maxsize=2)
def _table(path: Path) -> Any:
    """An arrow file, mapped: what is not asked for is not read."""
    arrow = import_arrow("pyarrow", path)
    mapped = arrow.memory_map(str(path))
    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
    return (arrow.ipc.open_file(mapped) if is_file else arrow.ipc.open_stream(mapped)).read_all()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What arrow says of a damaged table, in our words."""
    arrow = import_arrow("pyarrow", path)
    try:
        yield
    except arrow.ArrowException as error:
        raise SourceError(
            f"{path}: no table that can be read ({error}); download it again"
        ) from error
