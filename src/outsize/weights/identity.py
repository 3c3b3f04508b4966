"""The content identity of checkpoint files: SHA-256 of all bytes, remembered so that 64 GB are hashed once.

A file in the hub's cache is named by its SHA-256 already. Any other is hashed on first sight (by several threads, as
hashing leaves Python free) and the digest is kept in a ledger under the file's path, size, time of change and header
digest. Why this and not samples: docs/decisions/002-source-identity.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outsize.base.errors import SourceError
from outsize.base.files import write_json_atomically
from outsize.base.progress import OnProgress
from outsize.weights.header import Header

LEDGER_NAME = "digests.json"
_CHUNK_BYTES = 8 * 2**20
_MAX_THREADS = 4  # one core hashes 0.4 to 2 GB/s; four outrun most disks
# FAT keeps times to 2 s: a file this young could change again without a new time of change.
_MIN_AGE_S = 3.0
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


class DigestLedger:
    """A JSON file of digests by path; safe to lose, and safe to share: entries that do not fit are not believed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def look_up(self, header: Header) -> str | None:
        """The digest noted for exactly this state of the file, or None."""
        row = self._rows().get(_key(header.file))
        return (
            str(row["sha256"]) if row is not None and row.get("stamp") == _stamp(header) else None
        )

    def note(self, digests: Sequence[tuple[Header, list[object], str]]) -> None:
        """Add digests; each with the stamp taken before hashing began."""
        rows = self._rows()
        for header, stamp, digest in digests:
            rows[_key(header.file)] = {"stamp": stamp, "sha256": digest}
        write_json_atomically(self.path, dict(sorted(rows.items())))

    def _rows(self) -> dict[str, dict[str, object]]:
        try:
            rows = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:  # a ledger is only a memory: without it files are hashed again
            return {}
        if not isinstance(rows, dict):
            return {}
        return {key: row for key, row in rows.items() if isinstance(row, dict) and "sha256" in row}


def content_digests(
    headers: Sequence[Header], ledger: DigestLedger | None, progress: OnProgress | None = None
) -> list[str]:
    """SHA-256 of each file's bytes, in order.

    progress: called with (bytes hashed, bytes to hash) when files have to be read.
    Raises: SourceError when a file changes while it is hashed.
    """
    known = {header.file: _known_digest(header, ledger) for header in headers}
    unknown = [header for header in headers if known[header.file] is None]
    if unknown:
        stamps = [_stamp(header) for header in unknown]
        found = _hash_files(unknown, progress)
        for header, stamp in zip(unknown, stamps, strict=True):
            if _stamp(header) != stamp:
                raise SourceError(f"{header.file} changed while it was being read; start again")
        known |= {header.file: digest for header, digest in zip(unknown, found, strict=True)}
        lasting = [
            row for row in zip(unknown, stamps, found, strict=True) if _is_settled(row[0].file)
        ]
        if ledger is not None and lasting:
            ledger.note(lasting)
    digests = [known[header.file] for header in headers]
    return [digest for digest in digests if digest is not None]


def _known_digest(header: Header, ledger: DigestLedger | None) -> str | None:
    blob = header.file.resolve()
    if blob.parent.name == "blobs" and _SHA256_NAME.fullmatch(blob.name):
        return blob.name
    return ledger.look_up(header) if ledger is not None else None


def _hash_files(headers: Sequence[Header], progress: OnProgress | None) -> list[str]:
    total = sum(header.file_bytes for header in headers)
    counts = [0] * len(headers)

    def hash_one(number: int) -> str:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        with headers[number].file.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                counts[number] += count
                if progress is not None:
                    progress(sum(counts), total)
        return digest.hexdigest()

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1, len(headers))) as pool:
        return list(pool.map(hash_one, range(len(headers))))


def _key(file: Path) -> str:
    return file.resolve().as_posix()


def _stamp(header: Header) -> list[object]:
    status = header.file.stat()
    return [status.st_size, status.st_mtime_ns, header.digest]


def _is_settled(file: Path) -> bool:
    return time.time() - file.stat().st_mtime > _MIN_AGE_S
