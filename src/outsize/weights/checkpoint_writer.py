"""Writing a checkpoint of any size as it is published: shards with an index, filled by several threads in pieces.

Each shard's header is written first, then pieces of tensors at their places, in any order; a shard has a temporary name
until all of it is there. What is held at a time is one piece for each thread.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from outsize.base.files import commit_file, make_folder, temporary_beside, write_json_atomically
from outsize.base.parts import DTYPE_BYTES
from outsize.base.progress import OnProgress
from outsize.weights.choice import INDEX_END
from outsize.weights.header import build_header

PIECE_BYTES = 32 * 2**20
_ALIGNMENT = 8  # what the safetensors library writes


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written; dtype is a safetensors code."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a flattened tensor; number counts the pieces of the tensor."""

    tensor: NewTensor
    number: int
    start: int
    stop: int


Fill = Callable[[Piece], memoryview]
"""The bytes of a piece; called in several threads, and the view may be reused by the next call in the same thread."""


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    written: Path
    header: bytes
    tensors: tuple[NewTensor, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(one.num_bytes for one in self.tensors)

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """All pieces, each with its place in the file."""
        begin = len(self.header)
        for tensor in self.tensors:
            size = DTYPE_BYTES[tensor.dtype]
            step = PIECE_BYTES // size
            for number, start in enumerate(range(0, tensor.num_elements, step)):
                stop = min(start + step, tensor.num_elements)
                yield Piece(tensor, number, start, stop), begin + start * size
            begin += tensor.num_bytes


def write_checkpoint(
    folder: Path,
    stem: str,
    tensors: Sequence[NewTensor],
    fill: Fill,
    *,
    shard_bytes: int,
    num_threads: int,
    progress: OnProgress | None = None,
) -> tuple[Path, ...]:
    """Write tensors to `folder`, in order, as one file or as shards with an index; give the files.

    shard_bytes: of tensors in one file at most, unless one tensor alone takes more. progress: told (bytes written,
    bytes in all). An error or an interruption leaves no file that looks whole.
    """
    make_folder(folder)
    shards = _plan(folder, stem, tensors, shard_bytes)
    total, done, lock = sum(one.num_bytes for one in tensors), 0, threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    try:
        with ThreadPoolExecutor(num_threads) as pool:
            for shard in shards:
                _write_shard(shard, fill, pool, num_threads, advance)
    finally:
        for shard in shards:
            shard.written.unlink(missing_ok=True)
    if len(shards) > 1:
        weight_map = {one.name: shard.path.name for shard in shards for one in shard.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json_atomically(folder / f"{stem}{INDEX_END}", index)
    return tuple(shard.path for shard in shards)


def _plan(
    folder: Path, stem: str, tensors: Sequence[NewTensor], shard_bytes: int
) -> tuple[_Shard, ...]:
    groups: list[list[NewTensor]] = [[]]
    held_bytes = 0
    for tensor in tensors:
        if groups[-1] and held_bytes + tensor.num_bytes > shard_bytes:
            groups.append([])
            held_bytes = 0
        groups[-1].append(tensor)
        held_bytes += tensor.num_bytes
    count = len(groups)
    shards = []
    for number, group in enumerate(groups, start=1):
        part = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
        path = folder / f"{stem}{part}.safetensors"
        shards.append(_Shard(path, temporary_beside(path), _header(group), tuple(group)))
    return tuple(shards)


def _header(tensors: Sequence[NewTensor]) -> bytes:
    rows, begin = [], 0
    for one in tensors:
        rows.append((one.name, one.dtype, one.shape, begin, begin + one.num_bytes))
        begin += one.num_bytes
    return build_header(rows, {"format": "pt"}, alignment=_ALIGNMENT)


def _write_shard(
    shard: _Shard,
    fill: Fill,
    pool: ThreadPoolExecutor,
    num_threads: int,
    advance: Callable[[int], None],
) -> None:
    with shard.written.open("wb") as file:
        file.write(shard.header)
        file.truncate(shard.num_bytes)
    pieces, lock = shard.pieces(), threading.Lock()

    def work() -> None:
        # A handle for each thread: a seek and a write are two calls.
        with shard.written.open("rb+", buffering=0) as file:
            while True:
                with lock:
                    found = next(pieces, None)
                if found is None:
                    return
                piece, place = found
                content = fill(piece)
                file.seek(place, os.SEEK_SET)
                write_exactly(file.write, content)
                advance(len(content))

    futures = [pool.submit(work) for _ in range(num_threads)]
    try:
        for future in futures:
            future.result()
    except BaseException:
        with lock:
            for _ in pieces:  # what is left is not begun
                pass
        raise
    commit_file(shard.written, shard.path)


def write_exactly(write: Callable[[memoryview], int | None], content: memoryview) -> None:
    """Write all of it by an unbuffered file's method; systems cap one write at about 2 GiB and may take less."""
    position = 0
    while position < len(content):
        position += write(content[position:]) or 0
