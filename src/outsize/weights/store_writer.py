"""Writing a store, so that a kill at any moment costs the blocks in flight at most.

Each block's file is written under a temporary name, its parts appended as they are encoded and hashed on the way; then,
in the background, fsync and rename. Its header says how it was made and of which tensors, by digest, so that whoever comes
next can tell whether it is of use. The manifest comes last. One process writes at a time, behind a lock.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from filelock import FileLock, Timeout

from outsize.base.errors import SourceError
from outsize.base.files import (
    commit_file,
    make_folder,
    parse_json,
    remove_temporaries,
    temporary_beside,
)
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
_NO_DIGEST = "0" * 64  # as long as a real one, and never equal to one
_CHUNK_BYTES = 16 * 2**20  # hashed and written at the same time, and copied from a device


class StoreWriter:
    """Fills one store folder; use it in a `with` block, which holds the folder's lock.

    maker: digest of how packets are made. on_wait: called once before waiting for another process that holds the lock.
    on_commit: told each block once its file is safe, from a thread of its own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        maker: str,
        packets: Mapping[int | None, Packet],
        on_wait: Callable[[], None] | None = None,
        on_commit: Callable[[int | None], None] | None = None,
    ) -> None:
        self.folder = folder
        self._on_wait = on_wait
        self._on_commit = on_commit
        self._maker = maker
        self._packets = dict(packets)
        self._written: dict[int | None, StoreFile] = {}
        self._lock = FileLock(folder / LOCK)
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="store-hash")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="store-commit")
        self._commits: list[Future[None]] = []

    def __enter__(self) -> Self:
        make_folder(self.folder)
        acquire(self._lock, self._on_wait)
        remove_temporaries(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown()
        self._committer.shutdown()
        self._lock.release()

    def keep_complete(self) -> dict[int | None, dict[str, str]]:
        """Blocks whose files are there, whole by digest, and made in our way, each with the digests of its tensors.

        They need not be written again if these are still the tensors' digests; else `discard` them. A manifest is
        removed first: from here on the folder is not a store until `finish`.
        """
        (self.folder / MANIFEST).unlink(missing_ok=True)
        stated = [found for block in self._packets if (found := self._stated(block)) is not None]
        files = [file for file, _ in stated]
        digests = hash_many(
            lambda file: data_digest(self.folder / file.name, file.data_begin), files
        )
        kept = {}
        for (file, sources), digest in zip(stated, digests, strict=True):
            if digest == file.data_sha256:
                self._written[file.block] = file
                kept[file.block] = sources
        return kept

    def discard(self, block: int | None) -> None:
        """Forget a block that was kept, and delete its file."""
        (self.folder / self._written.pop(block).name).unlink()

    @contextlib.contextmanager
    def block(self, block: int | None) -> Iterator[BlockWriter]:
        """A writer for one block's parts; the file appears whole soon after the `with` block ends, or not at all."""
        packet = self._packets[block]
        path = self.folder / file_name(block)
        temporary = temporary_beside(path)
        sources = dict.fromkeys(packet.tensors(), _NO_DIGEST)
        placeholder = self._header(packet, sources, _NO_DIGEST)
        try:
            with temporary.open("wb") as file:
                file.write(placeholder)
                writer = BlockWriter(file, packet, self._hasher)
                yield writer
                digest = writer.close()
                header = self._header(packet, sources | writer.sources, digest)
                assert len(header) == len(placeholder), "a digest has a fixed length"
                file.seek(0)
                file.write(header)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        row = self._row(block, header, digest)
        self._commits.append(self._committer.submit(self._commit, row, temporary))

    def finish(self, key: str, provenance: dict[str, Any]) -> Store:
        """Wait until every file is safe, write the manifest and give the store.

        key, provenance: what it was made from, all of it.
        """
        self._settle()
        missing = [file_name(block) for block in self._packets if block not in self._written]
        assert not missing, f"finish before {missing} were written"
        files = tuple(self._written[block] for block in self._packets)
        store = Store(self.folder, key, provenance, files)
        write_manifest(store)
        return store

    def _settle(self) -> None:
        for commit in self._commits:
            commit.result()
        self._commits.clear()

    def _commit(self, row: StoreFile, temporary: Path) -> None:
        try:
            commit_file(temporary, self.folder / row.name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._written[row.block] = row
        if self._on_commit is not None:
            self._on_commit(row.block)

    def _header(self, packet: Packet, sources: Mapping[str, str], digest: str) -> bytes:
        return packet_header(packet, maker=self._maker, sources=sources, data_sha256=digest)

    def _stated(self, block: int | None) -> tuple[StoreFile, dict[str, str]] | None:
        """What an existing file says of itself, if it has exactly the header we would write."""
        path = self.folder / file_name(block)
        if not path.is_file():
            return None
        packet = self._packets[block]
        try:
            found = read_header(path)
            stated = parse_json(found.metadata.get("sources", ""))
            sources = {name: str(stated[name]) for name in packet.tensors()}
        except (SourceError, ValueError, KeyError, TypeError):
            return None  # torn: it is written again
        digest = found.metadata.get("data_sha256", "")
        header = self._header(packet, sources, digest)
        if hashlib.sha256(header).hexdigest() != found.digest:
            return None
        return self._row(block, header, digest), sources

    def _row(self, block: int | None, header: bytes, digest: str) -> StoreFile:
        header_digest = hashlib.sha256(header).hexdigest()
        name, packet = file_name(block), self._packets[block]
        return StoreFile(name, block, packet, len(header), header_digest, digest)


class BlockWriter:
    """Appends a packet's entries in order, whole or by rows, and hashes what it writes in a second thread.

    sources: digests of the tensors that the packet is made of, to be filled in by the caller.
    """

    def __init__(self, file: BinaryIO, packet: Packet, hasher: ThreadPoolExecutor) -> None:
        self.sources: dict[str, str] = {}
        self._file = file
        self._packet = packet
        self._hasher = hasher
        self._digest = hashlib.sha256()
        self._position = 0

    def append(self, entry: Entry, values: Tensor, staging: Tensor | None = None) -> None:
        """Write an entry, or its next rows.

        values: any shape, the entry's dtype. staging: uint8 on the host, through which values on a device are copied.
        Raises: ValueError for a wrong dtype, an entry out of order, or more values than it holds.
        """
        if dtype_code(values.dtype) != entry.dtype:
            raise ValueError(f"{entry.key} is {entry.dtype}, given {values.dtype}")
        if self._position < entry.offset:
            self._pad_to(entry.offset)
        if not entry.offset <= self._position <= entry.end - values.nbytes:
            raise ValueError(
                f"{entry.key} lies at {entry.offset}:{entry.end}; {values.nbytes} bytes at {self._position} "
                "would leave it"
            )
        raw_u8 = _bytes_of(values)
        step = _CHUNK_BYTES if staging is None else min(_CHUNK_BYTES, staging.numel())
        for begin in range(0, raw_u8.numel(), step):
            chunk = raw_u8[begin : begin + step]
            if staging is not None:
                chunk = staging[: chunk.numel()].copy_(chunk)
            self._write(chunk.numpy().data)

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
        self._write(memoryview(bytes(offset - self._position)))

    def _write(self, raw: memoryview) -> None:
        hashed = self._hasher.submit(self._digest.update, raw)
        self._file.write(raw)
        hashed.result()
        self._position += len(raw)


def acquire(lock: FileLock, on_wait: Callable[[], None] | None) -> None:
    """Take a lock, saying so before waiting for another process."""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if on_wait is not None:
            on_wait()
        lock.acquire()


def _bytes_of(values: Tensor) -> Tensor:
    """The same memory as flat uint8, where it lies."""
    import torch

    return values.detach().contiguous().reshape(-1).view(torch.uint8)
