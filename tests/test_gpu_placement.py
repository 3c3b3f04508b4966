"""The ring on a real card: slow copies, slow readers, poisoned slots, every tier; memory that is pinned and given back.

The same scenes as on the fake card of `test_placement_tiers.py`, with streams and events. `torch.cuda._sleep` makes either
side slow; released slots are filled with 0xFF on the computing stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outsize.base.tiers import TIERS, Tier
from outsize.devices._host import pageable
from outsize.devices.protocol import open_device
from outsize.layers.loading import Loading
from outsize.placement import _copier, _staging, stream
from outsize.placement.protocol import PlacementSettings, Sweep, report_of
from outsize.placement.resident import Resident
from outsize.placement.stream import Stream
from outsize.weights.reading import StoreReader

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SLEEP = 2_000_000  # cycles: about a millisecond
SIZES = [MIB * (1 + block % 3) + 256 * block for block in range(12)]
MIXED: list[Tier] = [TIERS[block % 4] for block in range(12)]


class PoisoningCopier(_copier.StreamCopier):
    """Copies as the ring's own does, late if so ordered, and leaves no released slot as it was."""

    def __init__(self, device: torch.device, num_slots: int, *, copy_sleep: int = 0) -> None:
        self._slots: dict[int, Tensor] = {}
        self._saved: dict[int, Tensor] = {}
        self._was_copied: set[int] = set()
        self._copy_sleep = copy_sleep
        super().__init__(device, num_slots)

    def copy(self, slot: int, target: Tensor, source: Tensor, lane: _copier.Lane) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=target.device)
        self._slots[slot] = whole.set_(target.untyped_storage())
        self._was_copied.add(slot)
        if self._copy_sleep:
            with torch.cuda.stream(self._lanes[lane]):
                torch.cuda._sleep(self._copy_sleep)
        super().copy(slot, target, source, lane)

    def wait_filled(self, slot: int) -> None:
        super().wait_filled(slot)
        if slot not in self._was_copied:  # its block is used again without a copy
            self._slots[slot].copy_(self._saved[slot])

    def mark_read(self, slot: int) -> None:
        if slot in self._slots:
            self._saved[slot] = self._slots[slot].clone()
            self._slots[slot].fill_(0xFF)
        self._was_copied.discard(slot)
        super().mark_read(slot)


class NoWaitForCopy(PoisoningCopier):
    """The reader begins at once."""

    def wait_filled(self, slot: int) -> None:
        """Nothing is queued."""


class NoWaitForReader(PoisoningCopier):
    """The copy begins at once."""

    def copy(self, slot: int, target: Tensor, source: Tensor, lane: _copier.Lane) -> None:
        self._read[slot] = torch.cuda.Event()
        super().copy(slot, target, source, lane)


@contextmanager
def copies_by(make: Callable[..., PoisoningCopier], copy_sleep: int) -> Iterator[None]:
    """The ring copies by this copier, in small pieces where it stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stream,
            "make_copier",
            lambda device, slots: make(device.torch_device, slots, copy_sleep=copy_sleep),
        )
        patch.setattr(_staging, "PIECE_BYTES", MIB // 2)
        patch.setattr(_staging, "NUM_PIECES", 4)
        yield


def packet_of(block: int, size: int) -> Tensor:
    return ((torch.arange(size) + 17 * block) % 251).to(torch.uint8)


def count_faults(
    tiers: Sequence[Tier], sweeps: Sequence[Sweep], *, compute_sleep: int, slots: int = 3
) -> int:
    """Bytes that a reader on the computing stream found wrong; the host never waits in between."""
    device = open_device("cuda")
    packets = [packet_of(block, size) for block, size in enumerate(SIZES)]
    expected = [packet.to(device.torch_device) for packet in packets]

    def read(block: int, begin: int, into: Tensor) -> None:
        into.copy_(packets[block][begin : begin + into.numel()])

    ring = Stream(PlacementSettings(device, SIZES, tiers, slots, read))
    for block, packet in enumerate(packets):
        ring.put(block, packet)
    wrong = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    for kind in sweeps:
        ring.begin(kind)
        up = list(range(len(SIZES)))
        for block in up + (up[::-1] if kind == "train" else []):
            held = ring.acquire(block)
            if compute_sleep:
                torch.cuda._sleep(compute_sleep)
            wrong += (held != expected[block]).sum()
            ring.release(block)
    ring.close()
    return int(wrong)


SWEEPS: list[Sweep] = ["train", "train", "forward", "train", "forward", "forward", "train"]


@pytest.mark.parametrize(("copy_sleep", "compute_sleep"), [(0, 0), (SLEEP, 0), (0, SLEEP)])
@pytest.mark.parametrize("tiers", [*([tier] * 12 for tier in TIERS[1:]), MIXED], ids=str)
@pytest.mark.parametrize("slots", [1, 3])
def test_every_use_finds_its_own_bytes_whatever_is_slow(
    tiers: list[Tier], slots: int, copy_sleep: int, compute_sleep: int
) -> None:
    with copies_by(PoisoningCopier, copy_sleep):
        assert count_faults(tiers, SWEEPS, compute_sleep=compute_sleep, slots=slots) == 0


@pytest.mark.parametrize("tier", ["pinned", "disk"])
@pytest.mark.parametrize(
    ("copier", "copy_sleep", "compute_sleep"),
    [(NoWaitForCopy, SLEEP, 0), (NoWaitForReader, 0, SLEEP)],
)
def test_a_copier_that_leaves_out_a_wait_is_found_out(
    tier: Tier, copier: type[PoisoningCopier], copy_sleep: int, compute_sleep: int
) -> None:
    with copies_by(copier, copy_sleep):
        assert count_faults([tier] * 12, SWEEPS, compute_sleep=compute_sleep) > 0


def test_nothing_is_allocated_while_running() -> None:
    device = open_device("cuda")
    ring = Stream(PlacementSettings(device, SIZES, ["pinned"] * 12))
    ring.begin("train")

    def step() -> None:
        ring.begin("train")
        up = list(range(12))
        for block in up + up[::-1]:
            ring.acquire(block)
            ring.release(block)

    step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    ring.close()


def test_host_buffers_are_pinned_and_given_back() -> None:
    """Memory that was page-locked in place can be page-locked again after it was released."""
    device = open_device("cuda")
    for _ in range(3):
        made = device.host_buffer(8 * MIB)
        assert made.why_not_pinned == ""
        assert made.tensor.is_pinned()
        assert made.taken_bytes == 8 * MIB
        assert made.tensor.data_ptr() % 4096 == 0
        made.tensor.copy_(packet_of(1, 8 * MIB))
        assert torch.equal(made.tensor.to("cuda", non_blocking=True).cpu(), packet_of(1, 8 * MIB))
        made.release()


def test_a_refused_registration_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next kernel must not be blamed for it. Memory that is registered already is refused."""
    from outsize.devices import _torch_gpu

    held = pageable(8 * MIB)
    monkeypatch.setattr(_torch_gpu, "pageable", lambda _: held)
    device = open_device("cuda")
    first = _torch_gpu.registered_buffer(8 * MIB, device.torch_device)
    second = _torch_gpu.registered_buffer(8 * MIB, device.torch_device)
    assert first.why_not_pinned == ""
    assert "refused" in second.why_not_pinned
    assert int(torch.ones(3, device="cuda").sum()) == 3
    first.release()


@pytest.mark.parametrize("tiers", [["device"] * 4, ["pinned", "pageable", "disk", "device"]])
def test_a_store_is_loaded_to_the_byte(tmp_path: Path, tiers: list[Tier]) -> None:
    """Through the pinned buffers of several threads, and from each tier into a slot."""
    from engine_support import make_tiny

    base = make_tiny(tmp_path, "flux2", ("nf4", {"group": 64}))
    reader = StoreReader(base.store)
    count = base.family.table(base.variant).num_blocks
    sizes = [base.store.packet(block).streamed_bytes for block in range(count)]
    each = [tiers[block % 4] for block in range(count)]
    card, host = open_device("cuda"), open_device("cpu")
    ring = Stream(PlacementSettings(card, sizes, each, 2, reader.read_streamed))
    truth = Resident(PlacementSettings(host, sizes))
    for placement, device in ((ring, card), (truth, host)):
        with Loading(reader, placement, device) as loading:
            for future in loading._small.values():
                future.result()
    print(report_of(ring))  # noqa: T201
    ring.begin("train")
    for block in [*range(count), *reversed(range(count))]:
        assert torch.equal(ring.acquire(block).cpu(), truth.acquire(block))
        ring.release(block)
    ring.close()
