"""Reading a store's blocks: once while loading, hashed as they come; and over and over while training, past the page cache.

What is read over and over goes past the page cache where the system can (O_DIRECT), since a base larger than memory would
only push out what others keep there. Where it cannot, reads are ordinary ones and the pages are given back after each.
Those reads are not hashed: what they would find was hashed when it was written, and again when the store was opened and
a file's size or time of change was not the one noted then.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.base.errors import SourceError, StoreBroken
from outsize.weights.source import read_exactly
from outsize.weights.store import ALTERED, DATA_ALIGNMENT, Store, broken_message

if TYPE_CHECKING:
    from io import FileIO

    from torch import Tensor

# Read and then hashed at a time: it stays in the processor's cache in between, and a thread that must ask for Python's
# lock in between, while another imports modules, still comes to half a gigabyte a second.
_PIECE_BYTES = 8 << 20


class CheckedRead:
    """One packet, read in order by `into`. read_s, hash_s: seconds taken so far."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self._file, self._path = file, path
        self._digest = hashlib.sha256()
        self.read_s = self.hash_s = 0.0

    def into(self, host_u8: Tensor) -> None:
        """Fill a tensor (uint8, on the host, contiguous) with the packet's next bytes.

        Raises: SourceError when the file ends first.
        """
        target = host_u8.numpy().data
        for begin in range(0, len(target), _PIECE_BYTES):
            piece = target[begin : begin + _PIECE_BYTES]
            started = time.perf_counter()
            read_exactly(self._file, piece, self._path)
            read = time.perf_counter()
            self._digest.update(piece)
            self.read_s += read - started
            self.hash_s += time.perf_counter() - read

    def digest(self) -> str:
        """SHA-256 of everything read."""
        return self._digest.hexdigest()


class StoreReader:
    """Reads blocks of a store. why_buffered: "" where reads go past the page cache."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.why_buffered = why_no_direct_reads(store.path(store.files[0].block))

    @contextmanager
    def checked(self, block: int | None) -> Iterator[CheckedRead]:
        """Read a whole packet within the `with` block; at its end the bytes are known to be those that were written.

        Raises: StoreBroken when the file is gone, ends early, or does not hash to what the manifest says.
        """
        file = self.store.file(block)
        path = self.store.folder / file.name
        with self._named(block), path.open("rb", buffering=0) as opened:
            opened.seek(file.data_begin)
            reading = CheckedRead(opened, path)
            yield reading
            if reading.digest() != file.data_sha256:
                raise SourceError(ALTERED)

    def read_small(self, block: int, into: Tensor) -> None:
        """Fill a tensor with what follows the streamed bytes of a packet, unhashed.

        Raises: StoreBroken when the file is gone or ends early.
        """
        file = self.store.file(block)
        path = self.store.folder / file.name
        with self._named(block), path.open("rb", buffering=0) as opened:
            opened.seek(file.data_begin + file.packet.streamed_bytes)
            read_exactly(opened, into.numpy().data, path)

    def read_streamed(self, block: int, begin: int, into: Tensor) -> None:
        """Fill a tensor with a packet's bytes from `begin` on, unhashed; any number of threads may call it.

        into: uint8 (n,) on the host. Reads go past the page cache if `begin` and the tensor's address are multiples of 4096.
        Raises: StoreBroken when the file is gone or ends early.
        """
        file = self.store.file(block)
        path = self.store.folder / file.name
        offset = file.data_begin + begin
        is_aligned = offset % DATA_ALIGNMENT == into.data_ptr() % DATA_ALIGNMENT == 0
        with self._named(block):
            if is_aligned and not self.why_buffered:
                _read_direct(path, offset, into.numpy().data)
            else:
                _read_and_forget(path, offset, into.numpy().data)

    @contextmanager
    def _named(self, block: int | None) -> Iterator[None]:
        """Any fault of a file is a fault of the store, which names the file."""
        try:
            yield
        except (OSError, SourceError) as error:
            fault = f"{self.store.file(block).name}: {error}"
            raise StoreBroken(broken_message(self.store.folder, [fault])) from error


def why_no_direct_reads(path: Path) -> str:
    """Why a file cannot be read past the page cache; "" where it can."""
    if not hasattr(os, "O_DIRECT"):
        return f"{sys.platform} has no O_DIRECT"
    try:
        _read_direct(path, 0, memoryview(bytearray(1)))
    except OSError as error:
        return f"the file system of {path.parent} refuses direct reads ({error.strerror})"
    return ""


def _read_direct(path: Path, offset: int, target: memoryview[Any]) -> None:
    """Read past the page cache. offset and the target's address are multiples of 4096, its length need not be."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        whole = len(target) // DATA_ALIGNMENT * DATA_ALIGNMENT
        done = 0
        while done < whole:
            count = os.preadv(handle, [target[done:whole]], offset + done)
            done += count
            if (
                count % DATA_ALIGNMENT or not count
            ):  # only the end of a file is read in parts of a sector
                raise _ended(path, len(target) - done)
        rest = len(target) - whole
        if rest:
            with mmap.mmap(-1, DATA_ALIGNMENT) as page:
                count = os.preadv(handle, [page], offset + whole)
                if count < rest:
                    raise _ended(path, rest - count)
                target[whole:] = page[:rest]
    finally:
        os.close(handle)


def _read_and_forget(path: Path, offset: int, target: memoryview[Any]) -> None:
    """Read through the page cache and give its pages back, where the system lets us."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        read_exactly(file, target, path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), offset, len(target), os.POSIX_FADV_DONTNEED)


def _ended(path: Path, missing: int) -> SourceError:
    return SourceError(f"{path} ended {missing} bytes early; it changed after it was opened")
