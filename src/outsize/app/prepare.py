"""Preparing one model: from published files to a store, within a host-memory budget.

Tensor by tensor, windows of rows are read into one reused slab, pushed into the format's encoder, and the encoded parts
appended to the block's file. What is held at a time is the slab and the parts of one tensor, never a block, never the
model. A store is named by all that shapes its bytes, so one that is there and whole is used as it is.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.base.errors import DoesNotFit, FormatError, StoreBroken
from outsize.base.files import json_digest
from outsize.base.journal import Journal
from outsize.base.layout import Layout
from outsize.base.parts import Part
from outsize.base.progress import OnProgress
from outsize.base.table import ShapeTable
from outsize.base.units import format_bytes
from outsize.formats._packing import Packing
from outsize.weights.budget import (
    MemoryWatch,
    is_stored_as_itself,
    private_bytes,
    slab_bytes,
    slab_rows,
    trim_heap,
)
from outsize.weights.identity import LEDGER_NAME, DigestLedger
from outsize.weights.mapping import MappedSource
from outsize.weights.packet import Packet, plan_packet
from outsize.weights.source import Source
from outsize.weights.store import MANIFEST, STORE_VERSION, Store, open_store
from outsize.weights.store_writer import BlockWriter, StoreWriter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Job:
    """One model to prepare: what the steps below share."""

    mapped: MappedSource
    packing: Packing
    packets: dict[int | None, Packet]
    slab_bytes: int
    device: str
    journal: Journal | None
    progress: OnProgress | None

    def note(self, event: str, **values: Any) -> None:
        """Write to the journal, if there is one."""
        if self.journal is not None:
            self.journal.write(event, **values)

    def source_bytes(self, block: int | None) -> int:
        """Bytes read for one block."""
        names = self.packets[block].tensors()
        return sum(self.mapped.row_bytes(name) * self.mapped.num_rows(name) for name in names)


def store_key(
    *,
    table: ShapeTable,
    layouts: Sequence[Layout],
    source: Source,
    packing: Packing,
    cache_root: Path,
    progress: OnProgress | None = None,
) -> str:
    """Digest of everything that shapes a store's bytes, hexadecimal.

    cache_root: where digests of source files are remembered. progress: of hashing files not seen before.
    Raises: SourceError when the files do not hold the table's tensors.
    """
    mapped = source.locate(layouts, table)
    ledger = DigestLedger(cache_root / LEDGER_NAME)
    return json_digest(_provenance(mapped, packing, source.fingerprint(ledger, progress)))


def store_folder(cache_root: Path, *, family: str, variant: str, slot: str, key: str) -> Path:
    """The folder of a store: readable, and distinct by its key."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{family}-{variant}-{slot}")
    return cache_root / f"{name}-{key[:16]}"


def prepare_store(
    *,
    table: ShapeTable,
    layouts: Sequence[Layout],
    source: Source,
    packing: Packing,
    folder: Path,
    ram_budget_bytes: int,
    device: torch.device | str = "cpu",
    progress: OnProgress | None = None,
    journal: Journal | None = None,
) -> Store:
    """Make the store in `folder`, or use the one that is there; files of a torn one that are whole are kept.

    ram_budget_bytes: private host memory above what the process holds now. device: where rows are encoded. progress:
    called with (bytes of the source done, bytes in all). Interrupted at any point, the next call continues.
    Raises: SourceError for files that do not hold the table; DoesNotFit for a budget that is too small (naming the
    smallest) or too little disk; FormatError naming the tensor for weights that cannot be held; StoreBroken when the
    folder holds another store.
    """
    mapped = source.locate(layouts, table)
    fingerprint = source.fingerprint(DigestLedger(folder.parent / LEDGER_NAME))
    provenance = _provenance(mapped, packing, fingerprint)
    key = json_digest(provenance)
    store = _existing(folder, key, journal)
    if store is None:
        parts = {spec.name: packing.parts(spec.name) for spec in table}
        row_bytes = max((mapped.row_bytes(spec.name) for spec in table), default=0)
        job = _Job(
            mapped,
            packing,
            _plan_packets(table, parts),
            slab_bytes(table, parts, row_bytes=row_bytes, budget_bytes=ram_budget_bytes),
            str(device),
            journal,
            progress,
        )
        store = _prepare(job, folder, key, provenance)
    if progress is not None:
        progress(mapped.num_bytes, mapped.num_bytes)
    return store


def _provenance(mapped: MappedSource, packing: Packing, fingerprint: str) -> dict[str, Any]:
    specs = [[s.name, list(s.shape), s.role, s.block, s.is_linear] for s in mapped.table]
    return {
        "source": fingerprint,
        "table": json_digest(specs),
        "packing": packing.describe(),
        "layout": mapped.layout,
        "store_version": STORE_VERSION,
    }


def _existing(folder: Path, key: str, journal: Journal | None) -> Store | None:
    """The whole store that is there, or None; what is wrong with a torn one goes to the journal."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        store = open_store(folder)
    except StoreBroken as fault:
        if journal is not None:
            journal.write("prepare_found_broken", folder=str(folder), fault=str(fault))
        return None
    if store.key != key:
        raise StoreBroken(
            f"{folder} holds another store (key {store.key[:16]}, wanted {key[:16]}); name another folder, "
            "or delete that one"
        )
    return store


def _plan_packets(
    table: ShapeTable, parts: Mapping[str, Sequence[Part]]
) -> dict[int | None, Packet]:
    blocks: list[int | None] = [None, *range(table.num_blocks)]
    return {block: plan_packet(table.of_block(block), parts) for block in blocks}


def _prepare(job: _Job, folder: Path, key: str, provenance: dict[str, Any]) -> Store:
    began = time.monotonic()
    writer = StoreWriter(
        folder,
        key=key,
        provenance=provenance,
        packets=job.packets,
        on_wait=lambda: job.note("prepare_waits", folder=str(folder)),
    )
    with writer, MemoryWatch() as watch:
        # Another process may have finished it since we looked, or while we waited for the lock.
        store = _existing(folder, key, job.journal)
        if store is not None:
            return store
        kept = writer.keep_complete()
        _check_disk(job, folder, kept)
        job.note(
            "prepare_start",
            folder=str(folder),
            files=[str(file) for file in job.mapped.source.files],
            source_bytes=job.mapped.num_bytes,
            num_unused_tensors=len(job.mapped.extra),
            num_files=len(job.packets),
            num_kept=len(kept),
            slab_bytes=job.slab_bytes,
            **provenance,
        )
        _encode_blocks(job, writer, kept)
        store = writer.finish()
    job.note(
        "prepare_done",
        seconds=round(time.monotonic() - began, 3),
        store_bytes=store.nbytes,
        peak_private_bytes=watch.peak_bytes,
        growth_bytes=watch.growth_bytes,
    )
    return store


def _check_disk(job: _Job, folder: Path, kept: set[int | None]) -> None:
    needed = sum(packet.num_bytes for block, packet in job.packets.items() if block not in kept)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DoesNotFit(
            f"the store in {folder} needs {format_bytes(needed)} more, the disk has {format_bytes(free)} "
            "free; free some, or put the cache on another disk"
        )


def _encode_blocks(job: _Job, writer: StoreWriter, kept: set[int | None]) -> None:
    import torch

    slab_u8 = torch.empty(min(job.slab_bytes, job.mapped.num_bytes), dtype=torch.uint8)
    done_bytes = sum(job.source_bytes(block) for block in kept)
    total_bytes = job.mapped.num_bytes

    def advance(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if job.progress is not None:
            job.progress(done_bytes, total_bytes)

    for block, packet in job.packets.items():
        if block in kept:
            continue
        began = time.monotonic()
        with writer.block(block) as file:
            for name in packet.tensors():
                _encode_tensor(job, file, packet, name, slab_u8=slab_u8, advance=advance)
        trim_heap()
        job.note(
            "prepare_block",
            block=block,
            seconds=round(time.monotonic() - began, 3),
            block_bytes=packet.num_bytes,
            private_bytes=private_bytes(),
        )


def _encode_tensor(
    job: _Job,
    file: BlockWriter,
    packet: Packet,
    name: str,
    *,
    slab_u8: torch.Tensor,
    advance: Callable[[int], None],
) -> None:
    """Read one tensor by windows of rows, encode, and append its parts."""
    fmt, shape = job.packing.formats[name], job.packing.shapes[name]
    entries = packet.parts(name)
    is_itself = is_stored_as_itself(shape, job.packing.parts(name))
    num_rows, row_bytes = job.mapped.num_rows(name), job.mapped.row_bytes(name)
    step = max(1, slab_rows(row_bytes, job.slab_bytes))
    encoder = fmt.encoder(shape)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        rows = job.mapped.read_rows(name, start, stop, slab_u8).to(job.device)
        try:
            if is_itself:
                encoder = fmt.encoder(tuple(rows.shape))
            encoder.push(rows)
            if is_itself:
                file.append(entries[""], encoder.finish()[""].cpu())
        except FormatError as error:
            raise FormatError(f"{name}, in rows {start} to {stop}: {error}") from error
        advance((stop - start) * row_bytes)
    if not is_itself:
        parts = encoder.finish()
        for part, entry in entries.items():
            file.append(entry, parts[part].reshape(entry.shape).cpu())
