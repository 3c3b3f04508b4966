"""The ring on a card that runs everything late: right bytes from every tier, whatever is slow, and no wait left out.

The card is `fake_card.py`: copies and readers run in queues of their own, slots are poisoned at release. Each guard of the
ring is also taken away once, and the same checks must then fail: else they would prove nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from fake_card import COMPUTE, Card, CardCopier, CardFence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outsize.base.errors import StoreBroken
from outsize.base.tiers import TIERS, Tier
from outsize.devices._host import HostBuffer, pageable, touch_
from outsize.devices.cpu import Cpu
from outsize.placement import _staging, stream
from outsize.placement._feeder import Feeder
from outsize.placement._slab import CHUNK_BYTES, SMALLEST_CHUNK_BYTES, HostSlab, chunk_sizes
from outsize.placement.protocol import PlacementSettings, Sweep, report_of
from outsize.placement.stream import Stream

PIECE = 4096
SLOW = ("", COMPUTE, "straight", "staged")


def packet_of(block: int, size: int) -> Tensor:
    """Bytes that no other block has at the same place, none of them the poison."""
    return ((torch.arange(size) + 17 * block) % 251).to(torch.uint8)


class Scene:
    """A ring over blocks of given sizes and tiers on a fake card, filled as a loader fills it."""

    def __init__(
        self,
        sizes: Sequence[int],
        tiers: Sequence[Tier],
        card: Card,
        *,
        slots: int = 3,
        read_s: float = 0.0,
        device: Cpu | None = None,
    ) -> None:
        self.card, self.sizes, self.tiers = card, sizes, tiers
        self.expected = [packet_of(block, size) for block, size in enumerate(sizes)]
        self.read_s = read_s
        self.ring = Stream(PlacementSettings(device or Cpu(), sizes, tiers, slots, self.read))
        for block, packet in enumerate(self.expected):
            self.ring.put(block, packet)

    def read(self, block: int, begin: int, into: Tensor) -> None:
        assert self.tiers[block] == "disk", "only blocks on disk are read"
        if self.read_s:
            time.sleep(self.read_s)
        into.copy_(self.expected[block][begin : begin + into.numel()])

    def use(self, block: int) -> None:
        packet = self.ring.acquire(block)
        assert packet.numel() == self.sizes[block]

        def check() -> None:
            if not torch.equal(packet, self.expected[block]):
                self.card.faults.append(f"block {block} from {self.tiers[block]} has other bytes")

        self.card.run(COMPUTE, check)
        self.ring.release(block)

    def sweep(self, kind: Sweep, *, until: int | None = None) -> None:
        self.ring.begin(kind)
        up = list(range(len(self.sizes)))
        for block in (up + (up[::-1] if kind == "train" else []))[:until]:
            self.use(block)


@contextmanager
def fake_card(
    slow: str = "", copier: Callable[[Card, int], CardCopier] = CardCopier, pieces: int = 3
) -> Iterator[Card]:
    """A card under the ring for the time of the block, and a small staging ring."""
    card = Card(slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "make_copier", lambda _, num_slots: copier(card, num_slots))
        patch.setattr(_staging, "PIECE_BYTES", PIECE)
        patch.setattr(_staging, "NUM_PIECES", pieces)
        yield card
    card.off()


def run_sweeps(scene: Scene, sweeps: Sequence[Sweep], *, broken_off_at: int | None = None) -> None:
    for number, kind in enumerate(sweeps):
        scene.sweep(kind, until=broken_off_at if number % 2 else None)
    scene.card.finish()
    scene.ring.close()


# ------------------------------------------------------------ right bytes


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    blocks=st.lists(
        st.tuples(st.integers(0, 3 * PIECE), st.sampled_from(TIERS)), min_size=0, max_size=9
    ),
    slots=st.integers(1, 4),
    sweeps=st.lists(st.sampled_from(["train", "forward"]), min_size=1, max_size=5),
    slow=st.sampled_from(SLOW),
    pieces=st.integers(1, 5),
    broken_off_at=st.one_of(st.none(), st.integers(1, 8)),
)
def test_every_use_finds_its_own_bytes_whatever_is_slow(  # noqa: PLR0917 - what hypothesis draws
    blocks: list[tuple[int, Tier]],
    slots: int,
    sweeps: list[Sweep],
    slow: str,
    pieces: int,
    broken_off_at: int | None,
) -> None:
    """Any sizes, tiers, slots and sweeps, the latter broken off in the middle as well."""
    sizes, tiers = [size for size, _ in blocks], [tier for _, tier in blocks]
    with fake_card(slow, pieces=pieces) as card:
        run_sweeps(Scene(sizes, tiers, card, slots=slots), sweeps, broken_off_at=broken_off_at)
    assert not card.faults


@pytest.mark.parametrize("slow", SLOW)
def test_a_long_run_over_all_tiers_finds_its_own_bytes(slow: str) -> None:
    """Alternating sweeps over a mix of tiers with a disk slower than everything else."""
    sizes = [PIECE * (1 + block % 3) + 100 * block for block in range(12)]
    tiers = [TIERS[block % 4] for block in range(12)]
    with fake_card(slow) as card:
        scene = Scene(sizes, tiers, card, read_s=0.0005)
        run_sweeps(scene, ["train", "train", "forward", "train", "forward", "forward", "train"])
    assert not card.faults


def test_staged_blocks_need_as_few_copies_as_pinned_ones() -> None:
    """Where blocks come from does not change which copies the ring makes."""
    counts = []
    for tier in ("pinned", "pageable", "disk"):
        with fake_card() as card:
            scene = Scene([PIECE] * 8, [tier] * 8, card)
            scene.sweep("train")
            before = scene.ring.num_copies
            scene.sweep("train")
            scene.sweep("train")
            counts.append(scene.ring.num_copies - before)
            scene.ring.close()
    assert counts == [2 * 2 * (8 - 3)] * 3


def test_a_disk_goes_on_reading_while_slots_are_taken() -> None:
    """Blocks on disk far apart: the next one is in the staging ring before a slot is free for it."""
    tiers: list[Tier] = ["disk", *(["pinned"] * 5), "disk", *(["pinned"] * 5)]
    with fake_card(pieces=4) as card:
        scene = Scene([PIECE] * 12, tiers, card)
        read: list[int] = []
        inner, both = scene.ring._settings.read, threading.Event()
        assert inner is not None

        def noted(block: int, begin: int, into: Tensor) -> None:
            inner(block, begin, into)
            read.append(block)
            if 6 in read:
                both.set()

        scene.ring._fill = noted  # type: ignore[method-assign]
        scene.ring.begin("train")
        assert both.wait(10), "block 6 is read although only three slots are ahead of block 0"
        scene.sweep("train")
        scene.ring.close()
    assert not card.faults


# ------------------------------------------------------------ guards taken away


class NoWaitForCopy(CardCopier):
    """The reader begins at once."""

    def wait_filled(self, slot: int) -> None:
        """Nothing is queued."""


class NoWaitForReader(CardCopier):
    """The copy begins at once."""

    def wait_for_slot(self, slot: int, lane: str) -> None:
        """Nothing is queued."""


class NoFence(CardCopier):
    """Staging memory is filled again at once."""

    def fence(self) -> CardFence:
        made = super().fence()
        made.wait = lambda: None  # type: ignore[method-assign]
        return made


def _no_host_wait(self: Feeder, number: int) -> None:
    """The reader does not ask whether the copy was queued."""


def _all_open(self: Feeder, number: int) -> None:
    """Copies are sent before the slot's reader was marked."""
    with self._changed:
        self._opened = number + 5
        self._send()


def _nothing_broken(self: Feeder) -> set[int]:
    _RESET(self)
    return set()


_RESET = Feeder.reset
MIXED: list[Tier] = ["pinned", "disk", "pageable", "pinned", "disk", "pinned", "pageable", "disk"]


@pytest.mark.parametrize(
    ("slow", "copier", "tiers"),
    [
        ("straight", NoWaitForCopy, ["pinned"] * 8),
        ("staged", NoWaitForCopy, ["disk"] * 8),
        (COMPUTE, NoWaitForReader, ["pinned"] * 8),
        (COMPUTE, NoWaitForReader, ["disk"] * 8),
        ("staged", NoFence, ["disk"] * 8),
    ],
)
def test_a_copier_that_leaves_out_a_wait_is_found_out(
    slow: str, copier: type[CardCopier], tiers: list[Tier]
) -> None:
    with fake_card(slow, copier) as card:
        run_sweeps(Scene([PIECE * 2] * 8, tiers, card), ["train"] * 3)
    assert card.faults


@pytest.mark.parametrize(
    ("method", "broken", "slow", "until"),
    [
        ("wait", _no_host_wait, "", None),
        ("open_before", _all_open, COMPUTE, None),
        ("reset", _nothing_broken, "", 1),  # what was ordered and not sent is soon used again
    ],
)
def test_a_feeder_that_leaves_out_a_step_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    broken: Callable[..., object],
    slow: str,
    until: int | None,
) -> None:
    monkeypatch.setattr(Feeder, method, broken)
    with fake_card(slow, pieces=16) as card:
        scene = Scene([PIECE * 2] * 8, MIXED, card, read_s=0.003)
        for kind in ("train", "forward", "train", "forward"):
            scene.sweep(kind, until=until if kind == "train" else None)
        card.finish()
        scene.ring.close()
    assert card.faults


# ------------------------------------------------------------ faults and ends


def feeders() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("feeder")]


def test_a_disk_that_fails_is_an_error_where_the_block_is_asked_for() -> None:
    with fake_card() as card:
        scene = Scene([PIECE] * 6, ["disk"] * 6, card)

        def fails(block: int, begin: int, into: Tensor) -> None:  # noqa: ARG001
            if block == 4:
                raise StoreBroken("block-004.safetensors: gone")

        scene.ring._fill = fails  # type: ignore[method-assign]
        with pytest.raises(StoreBroken, match="block-004"):
            scene.sweep("train")
        with pytest.raises(StoreBroken, match="block-004"):
            scene.sweep("forward")
        scene.ring.close()
    assert not feeders()


def test_closing_ends_the_threads_in_the_middle_of_anything() -> None:
    with fake_card("staged") as card:
        scene = Scene([PIECE * 3] * 6, ["disk"] * 6, card, read_s=0.01)
        scene.sweep("train", until=2)
        assert feeders()
        scene.ring.close()
        scene.ring.close()
    assert not feeders()


def test_an_interrupted_use_leaves_the_ring_usable() -> None:
    """Ctrl-C between acquire and release: the next sweep begins anew."""
    with fake_card() as card:
        scene = Scene([PIECE * 2] * 6, ["disk", "pinned", "pageable"] * 2, card, read_s=0.001)
        scene.sweep("train", until=4)
        scene.ring.acquire(4)
        for _ in range(2):
            scene.sweep("train")
        card.finish()
        scene.ring.close()
    assert not card.faults


# ------------------------------------------------------------ memory


class Refusing(Cpu):
    """A machine that pins no more than some bytes."""

    def __init__(self, pinnable: int) -> None:
        super().__init__()
        object.__setattr__(self, "left", [pinnable])

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        left: list[int] = self.left  # type: ignore[attr-defined]
        if num_bytes > left[0]:
            return HostBuffer(pageable(num_bytes), num_bytes, "the limit was met")
        left[0] -= num_bytes

        def undo() -> None:
            left[0] += num_bytes

        return HostBuffer(torch.empty(num_bytes, dtype=torch.uint8), num_bytes, undo=undo)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outsize.placement._slab.CHUNK_BYTES", 4 * PIECE)
    monkeypatch.setattr("outsize.placement._slab.SMALLEST_CHUNK_BYTES", PIECE)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("pinnable", [0, PIECE, 5 * PIECE, 9 * PIECE, 100 * PIECE])
def test_what_cannot_be_pinned_is_staged_and_said(pinnable: int) -> None:
    """The bytes are the same; the report says what is pinned in fact, and why not more."""
    sizes = [3 * PIECE] * 6
    with fake_card() as card:
        scene = Scene(sizes, ["pinned"] * 6, card, device=Refusing(pinnable))
        report = report_of(scene.ring)
        run_sweeps(scene, ["train", "forward", "train"])
    assert not card.faults
    tiers = report["tiers"]
    assert tiers["pinned"] + tiers["pageable"] == sum(sizes)
    if pinnable < sum(sizes):
        assert tiers["pinned"] <= pinnable
        assert tiers["pageable"] > 0
        assert report["not_pinned"] == "the limit was met"
        assert report["staging_bytes"] == 3 * PIECE
        is_ring_pinned = pinnable >= 3 * PIECE
        assert bool(report["staging_not_pinned"]) != is_ring_pinned
    else:
        assert tiers["pinned"] == sum(sizes)
        assert report["not_pinned"] == report["staging_not_pinned"] == ""
        assert report["staging_bytes"] == 0


@given(st.integers(0, 40 * CHUNK_BYTES))
def test_pinned_memory_is_within_three_per_cent_though_each_piece_becomes_a_power_of_two(
    num_bytes: int,
) -> None:
    sizes = chunk_sizes(num_bytes)
    assert sum(sizes) == num_bytes
    taken = sum(1 << (size - 1).bit_length() for size in sizes)
    assert taken - num_bytes < SMALLEST_CHUNK_BYTES
    if num_bytes >= CHUNK_BYTES:
        assert taken <= 1.03 * num_bytes


@pytest.mark.usefixtures("small_chunks")
@given(sizes=st.lists(st.integers(0, 9 * PIECE), max_size=8))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_slab_gives_back_what_was_put_wherever_pieces_end(sizes: list[int]) -> None:
    slab = HostSlab(Cpu(), dict(enumerate(sizes)), is_pinned=True)
    for block, size in enumerate(sizes):
        begin = 0
        for segment in slab.segments(block):
            segment.copy_(packet_of(block, size)[begin : begin + segment.numel()])
            begin += segment.numel()
        assert begin == size
    for block, size in enumerate(sizes):
        for begin in {0, size // 2, max(size - 5, 0)}:
            into = torch.empty(size - begin, dtype=torch.uint8)
            slab.read(block, begin, into)
            assert torch.equal(into, packet_of(block, size)[begin:])
    assert slab.num_bytes == sum(sizes)
    slab.close()


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE, 3 * PIECE + 5])
def test_host_memory_begins_at_a_page_and_keeps_its_bytes_when_it_is_unpinned(
    num_bytes: int,
) -> None:
    """Direct reads need the one, a refused staging ring the other."""
    tensor = pageable(num_bytes)
    assert tensor.numel() == num_bytes
    assert tensor.data_ptr() % PIECE == 0
    tensor.copy_(packet_of(1, num_bytes))
    touch_(pageable(num_bytes))
    undone = []
    for undo in ({}, {"undo": lambda: undone.append(1)}):  # of the pinned allocator; registered
        made = HostBuffer(tensor, num_bytes, **undo)
        made.unpin("a test says so")
        assert made.why_not_pinned == "a test says so"
        assert torch.equal(made.tensor, packet_of(1, num_bytes))
        made.release()
        assert made.taken_bytes == made.tensor.numel() == 0
    assert undone == [1], "unregistered once"


def test_bytes_are_stated_by_tier() -> None:
    tiers: list[Tier] = ["device", "pinned", "pageable", "disk", "pinned"]
    with fake_card() as card:
        scene = Scene([100, 200, 300, 400, 50], tiers, card, slots=2)
        report = report_of(scene.ring)
        assert report["tiers"] == {"device": 100, "pinned": 250, "pageable": 300, "disk": 400}
        assert report["device_bytes"] == 100 + 2 * 400
        assert report["host_bytes"] == 250 + 300 + 3 * PIECE
        assert report["staging_bytes"] == _staging.staging_bytes(scene.sizes, tiers)
        assert scene.ring.targets(3) == []
        scene.ring.close()
