"""Writing a store, so that a kill at any moment costs one block at most.

Each block's file is written under a temporary name, its parts appended as they are encoded and hashed on the way; then
fsync and rename. The manifest comes last. Whoever comes next removes temporaries, keeps the files whose digest is right and
writes the rest. One process writes at a time, behind a lock in the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from filelock import FileLock, Timeout

from outsize.base.errors import SourceError
from outsize.base.files import commit_file, remove_temporaries, temporary_beside
from outsize.weights.dtypes import dtype_code
from outsize.weights.header import read_header
from outsize.weights.packet import Entry, Packet
from outsize.weights.store import (
    MANIFEST,
    Store,
    StoreFile,
    data_digest,
    file_name,
    hash_many,
    packet_header,
    write_manifest,
)

if TYPE_CHECKING:
    from torch import Tensor

LOCK = ".lock"


class StoreWriter:
    """Fills one store folder; use it in a `with` block, which holds the folder's lock.

    on_wait: called once before waiting for another process that holds the lock.
    """

    def __init__(
        self,
        folder: Path,
        *,
        key: str,
        provenance: dict[str, Any],
        packets: Mapping[int | None, Packet],
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        self.folder = folder
        self._on_wait = on_wait
        self._key = key
        self._provenance = provenance
        self._packets = dict(packets)
        self._written: dict[int | None, StoreFile] = {}
        self._lock = FileLock(folder / LOCK)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            if self._on_wait is not None:
                self._on_wait()
            self._lock.acquire()
        remove_temporaries(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def keep_complete(self) -> set[int | None]:
        """Blocks whose files are there and whole, by digest; they need not be written again.

        A manifest is removed first: from here on the folder is not a store until `finish`.
        """
        (self.folder / MANIFEST).unlink(missing_ok=True)
        candidates = [file for block in self._packets if (file := self._stated(block)) is not None]
        digests = hash_many(
            lambda file: data_digest(self.folder / file.name, file.data_begin), candidates
        )
        for file, digest in zip(candidates, digests, strict=True):
            if digest == file.data_sha256:
                self._written[file.block] = file
        return set(self._written)

    @contextlib.contextmanager
    def block(self, block: int | None) -> Iterator[BlockWriter]:
        """A writer for one block's parts; the file appears whole when the `with` block ends, or not at all."""
        packet = self._packets[block]
        path = self.folder / file_name(block)
        temporary = temporary_beside(path)
        placeholder = packet_header(packet, key=self._key, data_sha256="0" * 64)
        try:
            with temporary.open("wb") as file:
                file.write(placeholder)
                writer = BlockWriter(file, packet)
                yield writer
                digest = writer.close()
                header = packet_header(packet, key=self._key, data_sha256=digest)
                assert len(header) == len(placeholder), "a digest has a fixed length"
                file.seek(0)
                file.write(header)
            commit_file(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._written[block] = self._row(block, header, digest)

    def finish(self) -> Store:
        """Write the manifest and give the store."""
        missing = [file_name(block) for block in self._packets if block not in self._written]
        assert not missing, f"finish before {missing} were written"
        files = tuple(self._written[block] for block in self._packets)
        store = Store(self.folder, self._key, self._provenance, files)
        write_manifest(store)
        return store

    def _stated(self, block: int | None) -> StoreFile | None:
        """What an existing file says of itself, if it has exactly the header we would write."""
        path = self.folder / file_name(block)
        if not path.is_file():
            return None
        try:
            found = read_header(path)
        except SourceError:
            return None  # torn: it is written again
        digest = found.metadata.get("data_sha256", "")
        header = packet_header(self._packets[block], key=self._key, data_sha256=digest)
        if hashlib.sha256(header).hexdigest() != found.digest:
            return None
        return self._row(block, header, digest)

    def _row(self, block: int | None, header: bytes, digest: str) -> StoreFile:
        header_digest = hashlib.sha256(header).hexdigest()
        name, packet = file_name(block), self._packets[block]
        return StoreFile(name, block, packet, len(header), header_digest, digest)


class BlockWriter:
    """Appends a packet's entries in order, whole or by rows, and hashes what it writes."""

    def __init__(self, file: BinaryIO, packet: Packet) -> None:
        self._file = file
        self._packet = packet
        self._digest = hashlib.sha256()
        self._position = 0

    def append(self, entry: Entry, values: Tensor) -> None:
        """Write an entry, or its next rows. values: any shape, the entry's dtype, on the CPU.

        Raises: ValueError for a wrong dtype, an entry out of order, or more values than it holds.
        """
        if dtype_code(values.dtype) != entry.dtype:
            raise ValueError(f"{entry.key} is {entry.dtype}, given {values.dtype}")
        if self._position < entry.offset:
            self._pad_to(entry.offset)
        raw = _bytes_of(values)
        if not entry.offset <= self._position <= entry.end - len(raw):
            raise ValueError(
                f"{entry.key} lies at {entry.offset}:{entry.end}; {len(raw)} bytes at {self._position} "
                "would leave it"
            )
        self._write(raw)

    def close(self) -> str:
        """Pad to the packet's end; returns the SHA-256 of its bytes.

        Raises: ValueError when entries are missing.
        """
        if self._packet.entries:
            self._pad_to(self._packet.num_bytes)
        return self._digest.hexdigest()

    def _pad_to(self, offset: int) -> None:
        """Zeros up to an offset, which may not skip an entry."""
        skipped = [
            entry.key
            for entry in self._packet.entries
            if entry.num_bytes and entry.end > self._position and entry.offset < offset
        ]
        if skipped:
            raise ValueError(f"not or not wholly written: {', '.join(skipped)}")
        self._write(bytes(offset - self._position))

    def _write(self, raw: bytes | memoryview) -> None:
        self._file.write(raw)
        self._digest.update(raw)
        self._position += len(raw)


def _bytes_of(values: Tensor) -> memoryview:
    import torch

    flat = values.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
