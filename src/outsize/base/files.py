"""Files that are either the old or the new, never torn: temporary name, fsync, rename, fsync of the parent.

Works the same on Windows, where a folder cannot be fsynced (NTFS journals the rename) and a file that is open cannot be
replaced (so nothing here keeps one open).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp-"  # a name with this in it is never read, and may be deleted by the next writer


def sync_file(path: Path) -> None:
    """Force a written file to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Force a folder's entries to disk, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, so that no power cut takes their names away again."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        sync_folder(one.parent)


def temporary_beside(path: Path) -> Path:
    """A fresh name beside `path`, on the same file system, that readers ignore."""
    return path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:12]}")


def commit_file(written: Path, target: Path) -> None:
    """Make a fully written temporary file the target: fsync, rename over, fsync of the parent."""
    sync_file(written)
    written.replace(target)
    sync_folder(target.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    make_folder(path.parent)
    written = temporary_beside(path)
    try:
        written.write_bytes(content)
        commit_file(written, path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def write_json_atomically(path: Path, value: Any) -> None:
    """Write JSON whole or not at all, readable by people."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


@contextlib.contextmanager
def folder_committed_to(target: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; when the block ends it becomes `target`, with every file fsynced.

    Raises: FileExistsError when the target is already there. An error inside the block leaves nothing behind.
    """
    if target.exists():
        raise FileExistsError(f"{target} is already there")
    make_folder(target.parent)
    folder = temporary_beside(target)
    folder.mkdir()
    try:
        yield folder
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                sync_file(path)
            else:
                sync_folder(path)
        sync_folder(folder)
        folder.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def remove_temporaries(folder: Path) -> None:
    """Delete what killed writers left behind; call only while holding the folder's lock."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def parse_json(content: bytes | bytearray | str) -> Any:
    """Read JSON that may have been written by anybody.

    Raises: ValueError for whatever is wrong with it, nesting that is too deep for Python's reader included.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form (sorted keys, no spaces), hexadecimal."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
