"""The prepared base on disk: a folder of one manifest and one safetensors file per block.

A file's data section is the block's packet, byte for byte, beginning at a multiple of 4096, so that a block is one read
into the buffer it is used from. The manifest knows size, header and SHA-256 of every file, and carries a digest of
itself. Opening checks sizes and headers; data are hashed again where a file's time of change is not the one that was
noted when it was last known to be right (`stamps.json`), and everywhere by `verify(full=True)`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from outsize.base.errors import StoreBroken
from outsize.base.files import json_digest, parse_json, write_json_atomically
from outsize.weights.header import build_header
from outsize.weights.packet import Packet

STORE_VERSION = 2  # raise it when bytes on disk change for the same source, table and formats
MANIFEST = "manifest.json"
STAMPS = "stamps.json"
DATA_ALIGNMENT = 4096  # a page, and a multiple of every disk's sector
_CHUNK_BYTES = 4 * 2**20
_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class StoreFile:
    """What the manifest knows of one file."""

    name: str
    block: int | None
    packet: Packet
    data_begin: int
    header_sha256: str
    data_sha256: str

    @property
    def file_bytes(self) -> int:
        return self.data_begin + self.packet.num_bytes

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        return {
            "name": self.name,
            "block": self.block,
            "data_begin": self.data_begin,
            "header_sha256": self.header_sha256,
            "data_sha256": self.data_sha256,
            "packet": self.packet.as_json(),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StoreFile:
        """The row that `as_json` wrote.

        Raises: ValueError for a file of another name, which might lie outside the store.
        """
        if value["name"] != file_name(value["block"]):
            raise ValueError(f"{value['name']!r:.100} is not the file of block {value['block']!r}")
        return StoreFile(
            value["name"],
            value["block"],
            Packet.from_json(value["packet"]),
            value["data_begin"],
            value["header_sha256"],
            value["data_sha256"],
        )


@dataclass(frozen=True)
class Store:
    """A store that was found complete when it was opened; make one with `open_store`.

    provenance: what it was made from, as JSON values (source fingerprint, formats, table, layout, versions).
    """

    folder: Path
    key: str
    provenance: dict[str, Any]
    files: tuple[StoreFile, ...]

    @cached_property
    def _by_block(self) -> dict[int | None, StoreFile]:
        return {file.block: file for file in self.files}

    @property
    def nbytes(self) -> int:
        """Bytes of all packets."""
        return sum(file.packet.num_bytes for file in self.files)

    def file(self, block: int | None) -> StoreFile:
        """The file of one block, or (None) of the tensors outside all blocks."""
        return self._by_block[block]

    def packet(self, block: int | None) -> Packet:
        """The packet of one block."""
        return self.file(block).packet

    def path(self, block: int | None) -> Path:
        """Where the file of one block lies."""
        return self.folder / self.file(block).name

    def verify(self, *, full: bool = False) -> None:
        """Check every file: sizes and headers, and data where stamps changed or (full) everywhere.

        Raises: StoreBroken naming every file that is missing, torn or altered.
        """
        stamps = {} if full else _read_stamps(self.folder)
        faults: list[str] = []
        unsure = []
        for file in self.files:
            fault = _quick_fault(self.folder, file)
            if fault is not None:
                faults.append(f"{file.name}: {fault}")
            elif stamps.get(file.name) != stamp(self.folder / file.name):
                unsure.append(file)
        before = {file.name: stamp(self.folder / file.name) for file in unsure}
        digests = hash_many(
            lambda file: data_digest(self.folder / file.name, file.data_begin), unsure
        )
        for file, digest in zip(unsure, digests, strict=True):
            if digest != file.data_sha256:
                faults.append(f"{file.name}: {ALTERED}")
        if faults:
            raise StoreBroken(broken_message(self.folder, faults))
        if unsure and os.access(self.folder, os.W_OK):  # else they are hashed at each opening
            write_json_atomically(self.folder / STAMPS, _read_stamps(self.folder) | before)


ALTERED = "its data are not those that were written (SHA-256 differs)"


def open_store(folder: Path, *, full: bool = False) -> Store:
    """Open a prepared store and check it, by Store.verify.

    Raises: StoreBroken naming everything that is missing, torn or altered.
    """
    store = read_manifest(folder)
    store.verify(full=full)
    return store


def read_manifest(folder: Path) -> Store:
    """The store as its manifest describes it; the files are not looked at.

    Raises: StoreBroken when there is no manifest, or it is not as it was written.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        what = (
            "has no manifest: its preparing did not finish" if folder.exists() else "is not there"
        )
        raise StoreBroken(broken_message(folder, [what])) from error
    try:
        values = parse_json(content)
        digest = values.pop("digest")
        if digest != json_digest(values):
            raise StoreBroken(
                broken_message(folder, [f"{MANIFEST} was altered (its digest differs)"])
            )
        if values["store_version"] != STORE_VERSION:
            found = values["store_version"]
            raise StoreBroken(
                broken_message(folder, [f"version {found}, this program reads {STORE_VERSION}"])
            )
        files = tuple(StoreFile.from_json(row) for row in values["files"])
        return Store(folder, values["key"], values["provenance"], files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreBroken(
            broken_message(folder, [f"{MANIFEST} cannot be read ({error!r})"])
        ) from error


def write_manifest(store: Store) -> None:
    """Write the stamps, and last of all the manifest, which makes the folder a store."""
    stamps = {file.name: stamp(store.folder / file.name) for file in store.files}
    write_json_atomically(store.folder / STAMPS, stamps)
    values = {
        "store_version": STORE_VERSION,
        "key": store.key,
        "provenance": store.provenance,
        "files": [file.as_json() for file in store.files],
    }
    write_json_atomically(store.folder / MANIFEST, values | {"digest": json_digest(values)})


def file_name(block: int | None) -> str:
    """The name of a block's file."""
    return "rest.safetensors" if block is None else f"block-{block:03d}.safetensors"


def packet_header(
    packet: Packet, *, maker: str, sources: Mapping[str, str], data_sha256: str
) -> bytes:
    """What precedes a packet in its file; its length does not depend on the values of digests.

    maker: digest of how the packet was made. sources: digest of each tensor that it was made of.
    """
    entries = sorted((*packet.entries, *packet.pads()), key=lambda entry: (entry.offset, entry.end))
    rows = [(entry.key, entry.dtype, entry.shape, entry.offset, entry.end) for entry in entries]
    metadata = {
        "outsize_store": str(STORE_VERSION),
        "maker": maker,
        "sources": json.dumps(dict(sources), separators=(",", ":")),
        "data_bytes": str(packet.num_bytes),
        "data_sha256": data_sha256,
    }
    return build_header(rows, metadata, alignment=DATA_ALIGNMENT)


def data_digest(path: Path, data_begin: int) -> str:
    """SHA-256 of everything from data_begin on."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(data_begin)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def hash_many(digest: Callable[[StoreFile], str], files: Iterable[StoreFile]) -> list[str]:
    """Digests of several files by several threads (hashing leaves Python free)."""
    listed = list(files)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(digest, listed))


def stamp(path: Path) -> list[int]:
    """Size and time of change of a file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _read_stamps(folder: Path) -> dict[str, Any]:
    try:
        stamps = parse_json((folder / STAMPS).read_bytes())
    except (FileNotFoundError, ValueError):  # only a memory: without it the data are hashed
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _quick_fault(folder: Path, file: StoreFile) -> str | None:
    path = folder / file.name
    try:
        with path.open("rb", buffering=0) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(0)
            header = opened.read(file.data_begin)
    except OSError as error:
        return f"missing or unreadable ({error.strerror})"
    if size != file.file_bytes:
        return f"torn: {size} bytes, expected {file.file_bytes}"
    if hashlib.sha256(header).hexdigest() != file.header_sha256:
        return "its header was altered (SHA-256 differs)"
    return None


def broken_message(folder: Path, faults: list[str]) -> str:
    """What to say of a store that cannot be used."""
    listed = "\n  ".join(faults)
    return (
        f"store {folder} cannot be used; `outsize prepare` makes what is missing again:\n  {listed}"
    )
