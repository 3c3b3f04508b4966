"""The work of preparing: rows are read and hashed ahead by several threads, encoded in order, and written behind.

Three lines of work go side by side: readers fill slabs (and copy them to a card), this thread encodes them, one thread
appends what was encoded, each within its share of the budget. On a processor this thread is where torch uses its cores;
on a card it only queues kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outsize.app._taking import taking_of
from outsize.base.errors import FormatError
from outsize.base.progress import OnProgress
from outsize.base.quantised import CODES
from outsize.formats._packing import Packing
from outsize.weights.budget import (
    Shares,
    share_out,
    trim_heap,
)
from outsize.weights.conveyor import Conveyor
from outsize.weights.dtypes import torch_dtype
from outsize.weights.identity import digest_of, num_readers, windows_of_tensor
from outsize.weights.lanes import Lanes, Slabs
from outsize.weights.mapping import MappedSource
from outsize.weights.packet import Entry, Packet, plan_packet
from outsize.weights.pieces import RowWindow, piece_digests
from outsize.weights.readahead import read_ahead
from outsize.weights.store_writer import BlockWriter, StoreWriter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STAGING_BYTES = 16 * 2**20
_CPU_READERS = 4  # as encoding is slower there, and wants the cores

Windows = Generator[tuple[RowWindow, int, bytes]]


class Bar:
    """Counts the bytes of the source that are done."""

    def __init__(self, total: int, progress: OnProgress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def advance(self, num_bytes: int) -> None:
        """So many more."""
        self._done += num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class Encoding:
    """What is encoded, and how.

    shares: of the budget of memory. advance: told the bytes of the source that were encoded.
    """

    mapped: MappedSource
    packing: Packing
    packets: dict[int | None, Packet]
    shares: Shares
    lanes: Lanes
    advance: Callable[[int], None]


def plan_encoding(
    mapped: MappedSource,
    packing: Packing,
    *,
    ram_bytes: int,
    device: torch.device | str,
    device_bytes: int,
    advance: Callable[[int], None],
) -> Encoding:
    """The work to do within a budget of private host memory, and one of a card's.

    Raises: DoesNotFit naming the smallest budget.
    """
    import torch

    table = mapped.table
    parts = {spec.name: packing.parts(spec.name) for spec in table}
    lanes = Lanes(torch.device(device))
    shares = share_out(
        table,
        parts,
        row_bytes=mapped.widest_row_bytes(),
        budget_bytes=ram_bytes,
        max_slabs=_num_readers(lanes) + 2,
        device_bytes=device_bytes if lanes.has_queues else None,
    )
    blocks: list[int | None] = [None, *range(table.num_blocks)]
    packets = {block: plan_packet(table.of_block(block), parts) for block in blocks}
    return Encoding(mapped, packing, packets, shares, lanes, advance)


def encode_blocks(
    job: Encoding, writer: StoreWriter, blocks: Sequence[int | None]
) -> dict[str, str]:
    """Encode some blocks into the writer; give the digests of their tensors in the source.

    Raises: FormatError naming the tensor for weights that cannot be held; SourceError for files that cannot be read.
    """
    work = _Work(job, writer)
    with (
        ExitStack() as work.opened,
        Conveyor(job.shares.queue_bytes, "store-writer") as work.conveyor,
        closing(work.read(blocks)) as windows,
    ):
        for block in blocks:
            work.encode_block(block, windows)
            trim_heap()
    return work.digests


class _Work:
    """One run of the three lines. opened: what the writing thread has open."""

    opened: ExitStack
    conveyor: Conveyor

    def __init__(self, job: Encoding, writer: StoreWriter) -> None:
        self.digests: dict[str, str] = {}
        self._job = job
        self._writer = writer
        self._file: BlockWriter | None = None
        self._slabs = Slabs(job.lanes, job.shares.num_slabs, job.shares.slab_bytes)
        self._staging = job.lanes.host_buffer(_STAGING_BYTES) if job.lanes.has_queues else None

    def read(self, blocks: Sequence[int | None]) -> Windows:
        """All windows of all tensors in order, each with its slab and the digests of its pieces."""
        job, slabs = self._job, self._slabs
        windows = (
            window
            for block in blocks
            for name in job.packets[block].tensors()
            for window in windows_of_tensor(job.mapped, name, job.shares.slab_bytes)
        )

        def fill(window: RowWindow, slab: int) -> bytes:
            raw = slabs.buffer(slab, window.num_bytes)
            job.mapped.read_into(window.name, window.start, window.stop, raw, window.part)
            digests = piece_digests(raw, window.row_bytes)
            slabs.upload(slab, window.num_bytes)
            return digests

        return read_ahead(
            windows,
            fill,
            num_slabs=job.shares.num_slabs,
            num_threads=min(_num_readers(job.lanes), job.shares.num_slabs),
        )

    def encode_block(self, block: int | None, windows: Windows) -> None:
        """Open the block's file, encode its tensors, and close it, all but the encoding on the writing thread."""

        def begin() -> None:
            self._file = self.opened.enter_context(self._writer.block(block))

        self.conveyor.put(begin)
        packet = self._job.packets[block]
        for name in packet.tensors():
            self.digests[name] = self._encode_tensor(packet, name, windows)
        found = {name: self.digests[name] for name in packet.tensors()}

        def end() -> None:
            assert self._file is not None, "begin was put before"
            self._file.sources |= found
            self.opened.close()

        self.conveyor.put(end)

    def _encode_tensor(self, packet: Packet, name: str, windows: Windows) -> str:
        """Encode one tensor from its windows, and put its parts; the digest of what was read."""
        job = self._job
        entries = packet.parts(name)
        way = taking_of(job.mapped, job.packing, name)
        pieces = bytearray()
        for part in job.mapped.parts(name):
            num_rows = 0
            while num_rows < part.num_rows:
                window, slab, found = next(windows)
                place = (window.name, window.part, window.start)
                assert place == (name, part.part, num_rows), "windows come in order"
                pieces += found
                num_rows = window.stop
                self.conveyor.reserve(_bytes_at_once(entries, window, part.num_rows))
                raw_u8 = self._slabs.rows(slab, (window.num_bytes,), torch_dtype("U8"))
                try:
                    for made, values in way.take(window, raw_u8):
                        self._put(entries[made], values)
                except FormatError as error:
                    where = f"rows {window.start} to {window.stop}"
                    raise FormatError(f"{name}, in {where}: {error}") from error
                self._slabs.release(slab)
                job.advance(window.num_bytes)
        left = dict(way.finish())
        for made, entry in entries.items():
            if made in left:
                self._put(entry, left[made].reshape(entry.shape))
        return digest_of(job.mapped, name, pieces)

    def _put(self, entry: Entry, values: Tensor) -> None:
        """Hand values to the writing thread, which waits for the device to have made them."""
        made: Any = self._job.lanes.mark()

        def append() -> None:
            assert self._file is not None, "the block was begun before"
            with self._job.lanes.lane(after=made):
                self._file.append(entry, values, self._staging)

        self.conveyor.put(append, values.nbytes)


def _num_readers(lanes: Lanes) -> int:
    return num_readers() if lanes.has_queues else min(_CPU_READERS, num_readers())


def _bytes_at_once(entries: Mapping[str, Entry], window: RowWindow, num_rows: int) -> int:
    """Bytes that are written as soon as a window of a tensor's rows is there."""
    entry = entries.get("", entries.get(window.part))
    if entry is None or window.part not in ("", CODES):
        return 0
    return entry.num_bytes * (window.stop - window.start) // num_rows
