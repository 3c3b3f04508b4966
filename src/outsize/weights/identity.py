"""The content identity of a model's tensors: SHA-256 of every byte that is read, remembered by the state of the files.

Each of the table's tensors has a digest (weights/pieces.py), and the model's is that of all of them: how the files are
called or cut does not matter, nor what else they hold. It is made while a store is encoded, or by reading alone when a
store that exists may be that of these bytes. A ledger keeps it under the files' paths, sizes, times of change and header
digests. Why this and not samples: docs/decisions/011-identity-by-tensors.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from outsize.base.errors import SourceError
from outsize.base.files import json_digest, parse_json, write_json_atomically
from outsize.base.progress import OnProgress
from outsize.weights.header import Header
from outsize.weights.mapping import MappedSource
from outsize.weights.pieces import (
    PIECE_BYTES,
    RowWindow,
    fingerprint_of,
    piece_digests,
    tensor_digest,
    windows_of,
)
from outsize.weights.readahead import read_ahead

LEDGER_NAME = "digests.json"
MAX_THREADS = 16  # one core reads and hashes 0.4 to 2 GB/s; sixteen outrun most disks
# FAT keeps times to 2 s: a file this young could change again without a new time of change.
_MIN_AGE_S = 3.0


class DigestLedger:
    """A JSON file of fingerprints; safe to lose, and safe to share: entries that do not fit are not believed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def look_up(self, mapped: MappedSource) -> str | None:
        """The fingerprint noted for exactly this state of the files, or None."""
        row = self._rows().get(_place(mapped))
        if row is None or row.get("stamps") != stamps_of(mapped.source.headers):
            return None
        return str(row["fingerprint"])

    def note(self, mapped: MappedSource, stamps: list[list[Any]], fingerprint: str) -> None:
        """Add a fingerprint, unless a file is so young that it could change unseen.

        stamps: taken before reading began.
        """
        if not all(_is_settled(file) for file in mapped.source.files):
            return
        rows = self._rows()
        rows[_place(mapped)] = {
            "files": [str(file) for file in mapped.source.files],
            "stamps": stamps,
            "fingerprint": fingerprint,
        }
        write_json_atomically(self.path, dict(sorted(rows.items())))

    def _rows(self) -> dict[str, dict[str, Any]]:
        try:
            rows = parse_json(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:  # a ledger is only a memory: without it files are hashed again
            return {}
        if not isinstance(rows, dict):
            return {}
        return {
            key: row for key, row in rows.items() if isinstance(row, dict) and "fingerprint" in row
        }


def fingerprint(
    mapped: MappedSource, ledger: DigestLedger | None, progress: OnProgress | None = None
) -> str:
    """The identity of the table's tensors, from the ledger or by reading them.

    progress: called with (bytes hashed, bytes to hash) when files have to be read.
    Raises: SourceError when a file changes while it is hashed.
    """
    known = ledger.look_up(mapped) if ledger is not None else None
    if known is not None:
        return known
    stamps = stamps_of(mapped.source.headers)
    found = fingerprint_of(source_digests(mapped, mapped.windows, progress))
    require_unchanged(mapped, stamps)
    if ledger is not None:
        ledger.note(mapped, stamps, found)
    return found


def source_digests(
    mapped: MappedSource,
    names: Iterable[str],
    progress: OnProgress | None = None,
    *,
    max_slabs: int = MAX_THREADS,
) -> dict[str, str]:
    """The digest of each of some tensors, by reading them with several threads; no torch.

    Memory: max_slabs slabs at most, each of one piece, which is PIECE_BYTES or one row.
    """
    names = tuple(names)
    total = sum(mapped.tensor_bytes(name) for name in names)
    slab_bytes = max((PIECE_BYTES, *(mapped.row_bytes(name) for name in names)))
    num_slabs = min(num_readers(), max_slabs)
    slabs = [memoryview(bytearray(slab_bytes)) for _ in range(num_slabs)]
    windows = (one for name in names for one in windows_of_tensor(mapped, name, slab_bytes))

    def fill(window: RowWindow, slab: int) -> bytes:
        raw = slabs[slab][: window.num_bytes]
        mapped.read_into(window.name, window.start, window.stop, raw, window.part)
        return piece_digests(raw, window.row_bytes)

    pieces = {name: bytearray() for name in names}
    done = 0
    for window, _, found in read_ahead(windows, fill, num_slabs=num_slabs, num_threads=num_slabs):
        pieces[window.name] += found
        done += window.num_bytes
        if progress is not None:
            progress(done, total)
    return {name: digest_of(mapped, name, pieces[name]) for name in names}


def windows_of_tensor(mapped: MappedSource, name: str, slab_bytes: int) -> Iterable[RowWindow]:
    """Windows of one of the table's tensors, of each of its parts in order."""
    for part in mapped.parts(name):
        yield from windows_of(name, part.num_rows, part.row_bytes, slab_bytes, part.part)


def digest_of(mapped: MappedSource, name: str, pieces: bytes | bytearray) -> str:
    """The digest of one of the table's tensors from those of its pieces."""
    return tensor_digest(mapped.encoding(name), mapped.table[name].shape, bytes(pieces))


def num_readers() -> int:
    """Threads that read and hash."""
    return min(MAX_THREADS, os.cpu_count() or 1)


def stamps_of(headers: Sequence[Header]) -> list[list[Any]]:
    """The state of each file: size, time of change, digest of its header."""
    stamps = []
    for header in headers:
        status = header.file.stat()
        stamps.append([status.st_size, status.st_mtime_ns, header.digest])
    return stamps


def require_unchanged(mapped: MappedSource, stamps: list[list[Any]]) -> None:
    """Raise SourceError naming every file that is not as it was when its stamp was taken."""
    now = stamps_of(mapped.source.headers)
    changed = [
        str(file)
        for file, before, after in zip(mapped.source.files, stamps, now, strict=True)
        if before != after
    ]
    if changed:
        raise SourceError(f"{', '.join(changed)} changed while being read; start again")


def state_key(mapped: MappedSource) -> str:
    """Names this state of these files, read as this table: a place for unfinished work, never an identity."""
    return json_digest([_place(mapped), stamps_of(mapped.source.headers)])


def _place(mapped: MappedSource) -> str:
    specs = [[spec.name, list(spec.shape)] for spec in mapped.table]
    paths = [file.resolve().as_posix() for file in mapped.source.files]
    return json_digest([paths, specs, mapped.layout, mapped.prefix])


def _is_settled(file: Path) -> bool:
    return time.time() - file.stat().st_mtime > _MIN_AGE_S
