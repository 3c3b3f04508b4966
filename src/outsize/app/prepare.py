"""Preparing one model: from published files to a store, in one pass over the files, within a budget of host memory.

A store is named by all that shapes its bytes, the content of the source included, so one that is there and whole is used
as it is. That content is hashed while it is encoded: a source that was never seen is encoded into a folder named by
the state of its files, which gets its real name when its content is known. Only where a store might be that of this source
are the files hashed first. The work itself is in app/_encoding.py.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from outsize.app._encoding import Bar, Encoding, encode_blocks, plan_encoding
from outsize.app.wanted import Wanted, is_made_by, known_key, store_key, wanted
from outsize.base.errors import DoesNotFit, StoreBroken
from outsize.base.files import json_digest, make_folder, sync_folder
from outsize.base.journal import Journal
from outsize.base.layout import Layout
from outsize.base.progress import OnProgress
from outsize.base.table import ShapeTable
from outsize.base.units import format_bytes
from outsize.formats._packing import Packing
from outsize.weights.budget import DEVICE_BYTES, MemoryWatch, private_bytes
from outsize.weights.identity import require_unchanged, source_digests, stamps_of
from outsize.weights.pieces import fingerprint_of
from outsize.weights.source import Source
from outsize.weights.store import MANIFEST, Store, open_store
from outsize.weights.store_writer import StoreWriter, acquire

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Figures:
    """What preparing took. Peaks: private bytes of the process, bytes of tensors on the device.

    adopted: what was taken from a quantised source as it is, and what was not; "" for a plain source.
    """

    seconds: float
    source_bytes: int
    store_bytes: int
    peak_private_bytes: int
    growth_bytes: int
    peak_device_bytes: int
    adopted: str = ""


@dataclass(frozen=True, slots=True)
class How:
    """Ways and means of preparing.

    ram_bytes: private host memory above what the process holds now. device: where rows are encoded. progress: called
    with (bytes of the source done, bytes in all). on_done: told what it took, unless nothing had to be done.
    device_bytes: of a card, what may be taken in all; DEVICE_BYTES are at most.
    """

    ram_bytes: int
    device: torch.device | str = "cpu"
    progress: OnProgress | None = None
    journal: Journal | None = None
    on_done: Callable[[Figures], None] | None = None
    device_bytes: int = DEVICE_BYTES

    def note(self, event: str, **values: Any) -> None:
        """Write to the journal, if there is one."""
        if self.journal is not None:
            self.journal.write(event, **values)


def prepare_in_cache(one: Wanted, how: How) -> Store:
    """The store in its cache folder: the one that is there, or a new one. One process at a time makes one of a name.

    Raises: as prepare_store.
    """
    make_folder(one.cache_root)
    with _lock(one, how):
        key = known_key(one)
        place = one.partial_folder() if key is None else one.folder(key)
        store = _named_by_content(one, prepare_in(one, place, how))
        for (
            left
        ) in one.partial_folders():  # of files that are no longer as they were, or of other formats
            shutil.rmtree(left, ignore_errors=True)
        return store


def _named_by_content(one: Wanted, made: Store) -> Store:
    """Give a store's folder the name that its content has."""
    folder = one.folder(made.key)
    if folder == made.folder:
        return made
    if is_made_by(folder, one.maker):
        try:
            found = open_store(folder)  # the same content, from files at another place
        except StoreBroken:
            pass
        else:
            shutil.rmtree(made.folder)
            return found
    shutil.rmtree(folder, ignore_errors=True)  # torn
    made.folder.rename(folder)
    sync_folder(one.cache_root)
    return replace(made, folder=folder)


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

    Interrupted at any point, the next call continues.
    Raises: SourceError for files that do not hold the table; DoesNotFit for a budget that is too small (naming the
    smallest) or too little disk; FormatError naming the tensor for weights that cannot be held; StoreBroken when the
    folder holds another store.
    """
    one = wanted(
        name=folder.name,
        table=table,
        layouts=layouts,
        source=source,
        packing=packing,
        cache_root=folder.parent,
    )
    return prepare_in(one, folder, How(ram_budget_bytes, device, progress, journal))


def prepare_in(one: Wanted, folder: Path, how: How) -> Store:
    """As prepare_store."""
    store = _existing(one, folder, how)
    if store is None:
        store = _prepare(one, folder, how)
    if how.progress is not None:
        how.progress(one.mapped.num_bytes, one.mapped.num_bytes)
    return store


@contextmanager
def _lock(one: Wanted, how: How) -> Iterator[None]:
    # Beside the folder, which is renamed: Windows renames none with an open file in it.
    lock = FileLock(one.cache_root / f".{one.name}.lock")
    acquire(lock, lambda: how.note("prepare_waits", folder=str(one.cache_root / one.name)))
    try:
        yield
    finally:
        lock.release()


def _existing(one: Wanted, folder: Path, how: How) -> Store | None:
    """The whole store that is there, or None; what is wrong with a torn one goes to the journal."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        store = open_store(folder)
    except StoreBroken as fault:
        how.note("prepare_found_broken", folder=str(folder), fault=str(fault))
        return None
    key = store_key(one) if is_made_by(folder, one.maker) else "none like it"
    if store.key != key:
        raise StoreBroken(
            f"{folder} holds another store (key {store.key[:16]}, wanted {key[:16]}); name another folder, "
            "or delete that one"
        )
    return store


def _prepare(one: Wanted, folder: Path, how: How) -> Store:
    began = last = time.monotonic()
    bar = Bar(one.mapped.num_bytes, how.progress)
    job = plan_encoding(
        one.mapped,
        one.packing,
        ram_bytes=how.ram_bytes,
        device=how.device,
        device_bytes=min(how.device_bytes, DEVICE_BYTES),
        advance=bar.advance,
    )

    def committed(block: int | None) -> None:
        nonlocal last
        last, before = time.monotonic(), last
        how.note(
            "prepare_block",
            block=block,
            seconds=round(last - before, 3),
            block_bytes=job.packets[block].num_bytes,
            private_bytes=private_bytes(),
        )

    writer = StoreWriter(
        folder,
        maker=one.maker,
        packets=job.packets,
        on_wait=lambda: how.note("prepare_waits", folder=str(folder)),
        on_commit=committed,
    )
    with MemoryWatch() as watch, writer:
        # Another process may have finished it since we looked, or while we waited for the lock.
        store = _existing(one, folder, how)
        if store is not None:
            return store
        last = time.monotonic()
        store = _fill(one, job, writer, how, bar)
    figures = Figures(
        round(time.monotonic() - began, 3),
        one.mapped.num_bytes,
        store.nbytes,
        watch.peak_bytes,
        watch.growth_bytes,
        job.lanes.peak_bytes(),
        one.adopted(),
    )
    how.note(
        "prepare_done", key=store.key, unpinned_buffers=job.lanes.num_unpinned, **asdict(figures)
    )
    if how.on_done is not None:
        how.on_done(figures)
    return store


def _fill(one: Wanted, job: Encoding, writer: StoreWriter, how: How, bar: Bar) -> Store:
    """Keep what is of use, encode the rest, and finish: now the content is known."""
    stamps = stamps_of(one.mapped.source.headers)
    kept, digests = _keep(one, job, writer, bar)
    rest = [block for block in job.packets if block not in kept]
    _check_disk(writer.folder, sum(job.packets[block].num_bytes for block in rest))
    how.note(
        "prepare_start",
        folder=str(writer.folder),
        files=[str(file) for file in one.mapped.source.files],
        source_bytes=one.mapped.num_bytes,
        num_unused_tensors=len(one.mapped.extra),
        num_files=len(job.packets),
        num_kept=len(kept),
        adopted=one.adopted(),
        device=str(job.lanes.device),
        **asdict(job.shares),
        **one.made,
    )
    digests |= encode_blocks(job, writer, rest)
    job.lanes.give_back()
    require_unchanged(one.mapped, stamps)
    content = fingerprint_of(digests)
    provenance = one.provenance(content)
    store = writer.finish(json_digest(provenance), provenance)
    one.ledger.note(one.mapped, stamps, content)
    return store


def _keep(
    one: Wanted, job: Encoding, writer: StoreWriter, bar: Bar
) -> tuple[set[int | None], dict[str, str]]:
    """Blocks of an interrupted run that are of exactly these bytes, and the digests of their tensors.

    The source is read for it, which is quick beside encoding: what a folder is called, or a file's time, proves nothing.
    """
    stated = writer.keep_complete()
    names = [name for sources in stated.values() for name in sources]
    found = source_digests(one.mapped, names, max_slabs=job.shares.num_slabs)
    kept: set[int | None] = set()
    digests: dict[str, str] = {}
    for block, sources in stated.items():
        true = {name: found[name] for name in sources}
        if true == sources:
            kept.add(block)
            digests |= true
            bar.advance(sum(one.mapped.tensor_bytes(name) for name in job.packets[block].tensors()))
        else:
            writer.discard(block)
    return kept, digests


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DoesNotFit(
            f"the store in {folder} needs {format_bytes(needed)} more, the disk has {format_bytes(free)} "
            "free; free some, or put the cache on another disk"
        )
