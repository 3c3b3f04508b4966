"""A checkpoint as it was published: one or several safetensors files, read by windows of rows.

Headers first, then plain positioned reads into the caller's buffer, which is reused. No file is mapped: on Windows a
copy-on-write map of a 64 GB file is charged against RAM and page file. Each thread has file handles of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Self

from outsize.base.errors import SourceError
from outsize.base.layout import Layout
from outsize.base.table import ShapeTable
from outsize.weights.dtypes import torch_dtype
from outsize.weights.header import TensorInfo, read_header
from outsize.weights.layout_search import Adopts
from outsize.weights.mapping import MappedSource, map_source

if TYPE_CHECKING:
    from torch import Tensor


class Source:
    """Tensors of one or several safetensors files by name. Opening it reads the headers only.

    Raises: SourceError for an unsound file, or a tensor that two files hold.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.headers = tuple(read_header(file) for file in files)
        self.files: tuple[Path, ...] = tuple(header.file for header in self.headers)
        self.tensors: dict[str, TensorInfo] = {}
        twice = []
        for header in self.headers:
            twice += [
                f"{name}: in {self.tensors[name].file.name} and in {header.file.name}"
                for name in header.tensors
                if name in self.tensors
            ]
            self.tensors |= header.tensors
        if twice:
            listed = "\n  ".join(sorted(twice))
            raise SourceError(f"files of one checkpoint hold the same tensors:\n  {listed}")
        self._handles = threading.local()
        self._opened: list[FileIO] = []
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in all files."""
        return sum(info.num_bytes for info in self.tensors.values())

    def locate(
        self, layouts: Sequence[Layout], table: ShapeTable, adopts: Adopts | None = None
    ) -> MappedSource:
        """The table's tensors in these files, by the first layout whose names match.

        adopts: says why a matrix in 4 bits cannot be taken as it is, if it cannot.
        Raises: SourceError listing every missing, misshapen and unusable tensor of the nearest layout.
        """
        return map_source(self, layouts, table, adopts)

    def read_rows(self, name: str, start: int, stop: int, into: Tensor) -> Tensor:
        """Read rows [start, stop) of dimension 0 into the caller's buffer.

        into: uint8 (n,) on the CPU, contiguous, at least as long as the rows; pinned or not. Returns a view of it with
        the file's dtype and shape (stop - start, ...). A tensor without dimensions has one row and keeps its shape.
        Raises: SourceError when the file ends early or cannot be read; IndexError for rows that are not there.
        """
        num_bytes = self.read_into(name, start, stop, into.numpy().data)
        info = self.tensors[name]
        shape = (stop - start, *info.shape[1:]) if info.shape else ()
        assert math.prod(shape) == 0 or num_bytes, "only an empty tensor takes no bytes"
        return into[:num_bytes].view(torch_dtype(info.dtype)).view(shape)

    def read_into(self, name: str, start: int, stop: int, target: memoryview) -> int:
        """Read the bytes of rows [start, stop) to the start of a buffer, without torch; give their count.

        Raises: as read_rows; ValueError for a buffer that is too short.
        """
        info = self.tensors[name]
        num_rows = info.shape[0] if info.shape else 1
        if not 0 <= start <= stop <= num_rows:
            raise IndexError(f"rows {start}:{stop} of {name}, which has {num_rows}")
        row_bytes = info.num_bytes // num_rows if num_rows else 0
        num_bytes = (stop - start) * row_bytes
        if num_bytes > len(target):
            raise ValueError(
                f"{name} rows {start}:{stop} take {num_bytes} bytes, into {len(target)}"
            )
        if num_bytes:
            self._read(info.file, info.begin + start * row_bytes, target[:num_bytes])
        return num_bytes

    def close(self) -> None:
        """Close the file handles of all threads; no other thread may be reading."""
        with self._lock:
            for file in self._opened:
                file.close()
            self._opened.clear()
            self._handles = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, path: Path, offset: int, target: memoryview) -> None:
        try:
            file = self._handle(path)
            file.seek(offset)
            read_exactly(file, target, path)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error

    def _handle(self, path: Path) -> FileIO:
        handles: dict[Path, FileIO] = self._handles.__dict__.setdefault("files", {})
        if path not in handles:
            file = path.open("rb", buffering=0)
            handles[path] = file
            with self._lock:
                self._opened.append(file)
        return handles[path]


def read_exactly(file: FileIO, target: memoryview, path: Path) -> None:
    """Fill the target from an unbuffered file; systems cap one read at about 2 GiB and may give less.

    Raises: SourceError when the file ends first.
    """
    position = 0
    while position < len(target):
        count = file.readinto(target[position:])
        if not count:
            raise SourceError(
                f"{path} ended {len(target) - position} bytes early; it changed after it was opened"
            )
        position += count
