"""Where memory lies: what four witnesses say, together and against each other, and when they are asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from residency_support import BUS_RATE, CARD_RATE, Clock, FakeCard, Told, blocks
from run_support import site_of, train_here, write_recipe

from outsize.app import residency as app_residency
from outsize.app import train as app_train
from outsize.app.residency import Residency
from outsize.app.sensing import Sampler
from outsize.base.errors import MachineFault
from outsize.base.journal import Journal, JournalTail, read_journal
from outsize.devices._ledger import Piece, ledger_of, owners_of
from outsize.devices.protocol import Device, open_device
from outsize.doctor.residency import Proof, prove
from outsize.placement.protocol import PLACEMENTS, PlacementSettings
from outsize.recipes.load import load_recipe
from outsize.runs.folder import RunFolder
from outsize.runs.requests import Requests

MIB, GIB = 1 << 20, 1 << 30
SIZES = [64 * MIB] * 12
TOTAL = sum(SIZES)


def ask(
    pieces: list[Piece],
    card: Device,
    reader: Told | None = None,
    *,
    rate: float = CARD_RATE,
    bus: float = BUS_RATE,
    unlisted: int = 0,
) -> Proof:
    told = Told(card_bytes=TOTAL + GIB) if reader is None else reader
    rates = {"rate_bytes_per_s": rate, "bus_bytes_per_s": bus}
    return prove(pieces, card, told, **rates, unlisted_bytes=unlisted)


@pytest.fixture
def pieces() -> list[Piece]:
    return ledger_of({"blocks": blocks(SIZES).items()})


def says(proof: Proof) -> dict[str, str]:
    return {one.name: one.says for one in proof.witnesses}


def test_a_base_on_the_card_is_proved_by_all_four_with_one_wait(pieces: list[Piece]) -> None:
    """A wait for each tensor would make the proof too slow to be made."""
    card = FakeCard()
    proof = ask(pieces, card)
    assert proof.verdict == "on the card"
    assert set(says(proof).values()) == {"agrees"}
    assert (proof.num_pieces, proof.num_bytes, proof.culprits) == (12, TOTAL, ())
    assert card.clock.num_waits == 1
    assert card.clock.reads[1:] == SIZES  # after the one that loads the kernel
    proof.require()


def test_memory_that_slid_to_the_host_is_named_though_all_counts_agree(pieces: list[Piece]) -> None:
    """What Windows' drivers do: allocator and counters go on as before, and only the clock tells."""
    card = FakeCard()
    card.clock.far = {pieces[3].address, pieces[7].address}
    proof = ask(pieces, card)
    assert says(proof) == {
        "ledger": "agrees", "allocator": "agrees", "system": "agrees", "clock": "contradicts",
    }  # fmt: skip
    assert proof.verdict == "off the card"
    assert [one.name for one in proof.culprits] == ["block 3", "block 7"]
    assert all(one.bytes_per_s == pytest.approx(BUS_RATE, rel=0.02) for one in proof.culprits)
    assert card.clock.reads[1 + len(SIZES) :] == [MIB, 64 * MIB, 64 * MIB] * 8  # they alone
    with pytest.raises(
        MachineFault, match=r"128\.0 MiB of 768\.0 MiB.*block 3 \(blocks, 64\.0 MiB\)"
    ) as caught:
        proof.require()
    assert "is read at 24.9 GB/s" in str(caught.value)
    assert "placement: {kind: stream}" in str(caught.value)


def test_a_piece_that_was_held_up_once_is_not_accused(pieces: list[Piece]) -> None:
    """Another program may take the card for a moment."""
    card = FakeCard()
    card.clock.hiccups = {pieces[5].address}
    proof = ask(pieces, card)
    assert proof.verdict == "on the card"
    assert not card.clock.hiccups
    assert card.clock.reads[1 + len(SIZES) :] == [MIB, 64 * MIB]


@pytest.mark.parametrize(
    ("reader", "verdict"),
    [
        (Told(card_bytes=TOTAL + GIB), "in doubt"),
        (Told(), "in doubt"),
        (Told(card_bytes=0), "off the card"),
    ],
    ids=["system-agrees", "system-unknown", "system-contradicts"],
)
def test_a_card_that_is_slow_altogether_needs_a_second_witness(
    pieces: list[Piece], reader: Told, verdict: str
) -> None:
    """A throttled card reads everything slowly; so does one whose whole memory slid away."""
    card = FakeCard()
    card.clock.far = {one.address for one in pieces}
    assert ask(pieces, card, reader).verdict == verdict


@pytest.mark.parametrize(
    ("card", "reader", "witness"),
    [
        (FakeCard(given_bytes=TOTAL // 2), Told(card_bytes=TOTAL), "allocator"),
        (FakeCard(), Told(card_bytes=TOTAL // 2), "system"),
        (FakeCard(), Told(used_bytes=TOTAL // 2), "system"),
    ],
    ids=["allocator", "process", "whole-card"],
)
def test_one_witness_against_the_others_is_a_doubt_and_no_pass(
    pieces: list[Piece], card: FakeCard, reader: Told, witness: str
) -> None:
    proof = ask(pieces, replace(card, clock=Clock()), reader)
    assert proof.verdict == "in doubt"
    assert [name for name, one in says(proof).items() if one == "contradicts"] == [witness]
    proof.require()  # told, but nothing is known to be away


def test_a_system_that_says_nothing_is_unknown_and_never_well(pieces: list[Piece]) -> None:
    """A full card says nothing about whose memory it is."""
    for reader in (Told(), Told(used_bytes=TOTAL + GIB)):
        proof = ask(pieces, FakeCard(), reader)
        assert says(proof)["system"] == "unknown"
        assert proof.verdict == "on the card"
        assert "system unknown: nobody knows" in str(proof)


def test_counts_within_a_hundredth_agree(pieces: list[Piece]) -> None:
    card = FakeCard(given_bytes=int(TOTAL * 0.992))
    assert says(ask(pieces, card, Told(card_bytes=int(TOTAL * 0.992))))["allocator"] == "agrees"
    assert says(ask(pieces, card, Told(card_bytes=int(TOTAL * 0.98))))["system"] == "contradicts"


def test_memory_that_nobody_lists_is_not_proved(pieces: list[Piece]) -> None:
    """A placement of somebody else's may not name its memory; what it holds must not pass unseen."""
    assert ask(pieces, FakeCard(), unlisted=GIB).verdict == "unknown"
    assert ask([], FakeCard()).verdict == "unknown"


def test_tensors_that_torch_itself_puts_elsewhere_are_named(pieces: list[Piece]) -> None:
    card = FakeCard(torch_device=torch.device("cuda"))
    proof = ask(pieces, card)
    assert proof.verdict == "off the card"
    assert len(proof.culprits) == 12
    assert "block 0 (blocks, 64.0 MiB) lies on cpu" in str(proof)
    assert card.clock.reads == []


def test_a_card_that_nobody_knows_is_judged_by_its_own_best_rate(pieces: list[Piece]) -> None:
    """The guess for an unknown card is low: memory read at 200 GB/s would pass beside one of 3,300."""
    card = FakeCard()
    assert ask(pieces, card, rate=100e9).verdict == "on the card"
    card.clock.far = {pieces[0].address}
    proof = ask(pieces, card, rate=40e9)
    assert proof.verdict == "off the card"
    assert proof.rate_bytes_per_s == pytest.approx(CARD_RATE, rel=0.5)


def test_a_processor_has_nothing_to_prove_and_does_not_pretend(pieces: list[Piece]) -> None:
    proof = ask(pieces, open_device("cpu"))
    assert proof.verdict == "nothing to prove"
    assert "the host's" in str(proof)
    proof.require()


# --- small pieces --------------------------------------------------------------------------------


def test_pieces_too_small_for_a_clock_are_never_accused_and_prove_nothing() -> None:
    """A norm is read in the time of a launch wherever it lies: a pass would be a pretence."""
    tiny = ledger_of({"small tensors": blocks([6144] * 300).items()})
    card = FakeCard(launch_s=40e-6)
    card.clock.far = {one.address for one in tiny}
    proof = ask(tiny, card)
    assert (proof.verdict, says(proof)["clock"]) == ("unknown", "unknown")
    assert "1.8 MiB of it in pieces too small to tell" in str(proof)
    assert ask(tiny + ledger_of({"blocks": blocks(SIZES).items()}), card).verdict == "on the card"


def test_small_pieces_that_a_clock_can_tell_are_named() -> None:
    small = ledger_of({"small tensors": blocks([4 * MIB] * 40).items()})
    card = FakeCard()
    card.clock.far = {small[7].address, small[9].address}
    proof = ask(small + ledger_of({"blocks": blocks(SIZES).items()}), card)
    assert proof.verdict == "off the card"
    assert [one.name for one in proof.culprits] == ["block 7", "block 9"]


def test_a_bus_as_fast_as_a_quarter_of_the_memory_leaves_the_clock_without_a_say(
    pieces: list[Piece],
) -> None:
    """Then memory over the bus would not look slow."""
    proof = ask(pieces, FakeCard(), bus=0.3 * CARD_RATE)
    assert (proof.verdict, says(proof)["clock"]) == ("unknown", "unknown")


# --- the ledger ----------------------------------------------------------------------------------


def test_a_storage_counts_once_for_whoever_names_it_first() -> None:
    """Views of a flat tensor and its owner are one piece of memory."""
    flat = torch.zeros(100)
    other = torch.zeros(10)
    pieces = ledger_of(
        {
            "adapter": [
                ("a", flat[:40]),
                ("b", flat[40:]),
                ("meta", torch.empty(3, device="meta")),
            ],
            "optimiser": [("masters", flat), ("state", other), ("empty", torch.empty(0))],
        }
    )
    assert [(one.owner, one.name, one.num_bytes) for one in pieces] == [
        ("adapter", "a and 2 more", 400),
        ("optimiser", "state", 40),
    ]
    assert [one.address for one in pieces] == [flat.data_ptr(), other.data_ptr()]
    assert owners_of(pieces) == {"adapter": 400, "optimiser": 40}


@pytest.mark.parametrize("name", PLACEMENTS.names())
def test_a_placement_lists_all_the_memory_that_it_counts(name: str) -> None:
    """What it does not list cannot be proved, and each verdict would be unknown."""
    sizes, tiers = [4096, 0, 8192, 512, 4096], ("device", "device", "pinned", "disk", "device")
    tiers_of = tiers if name == "stream" else ()
    settings = PlacementSettings(open_device("cpu"), sizes, tiers_of, 2, lambda *_: None)
    placement = PLACEMENTS.load(name)(settings)
    listed = ledger_of({"blocks": placement.buffers().items()})
    assert sum(one.num_bytes for one in listed) == placement.device_bytes() > 0
    placement.close()


def test_reading_sums_every_byte_on_the_device() -> None:
    """The real thing on the processor: it runs on sizes that no whole number of eight bytes fills, and takes time."""
    from outsize.devices._reading import read_seconds

    sizes = (1, 7, 8, 4097, 1 << 20)
    content = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    times = read_seconds(open_device("cpu"), content)
    assert len(times) == len(sizes)
    assert all(seconds >= 0 for seconds in times)
    assert read_seconds(open_device("cpu"), []) == []


# --- in a training -------------------------------------------------------------------------------


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [one for one in read_journal(run.journal) if one["event"] == kind]


def test_a_training_says_what_it_could_prove_and_what_was_asked(tmp_path: Path) -> None:
    """By the real trainer on a processor: at load, and at the step boundary after PROVE_NOW appeared."""
    recipe = write_recipe(tmp_path)
    with site_of(recipe) as (site, run):
        run.path.mkdir(parents=True, exist_ok=True)

        def watch(report: Any) -> None:
            if report.step == 3:
                run.prove_now.touch()

        app_train.train(site, run, watch)
    found = events(run, "residency")
    assert [(one["moment"], one["step"]) for one in found] == [("loaded", 0), ("asked", 3)]
    assert {one["verdict"] for one in found} == {"nothing to prove"}
    assert not run.prove_now.exists()
    assert json.dumps(found, allow_nan=False)


def train_on(card: FakeCard, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr("run_support.open_device", lambda _kind: card)
    return train_here(recipe)[1]


def test_a_training_whose_base_slid_away_ends_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps would be right, and many times slower than the plan says."""
    for name, value in {"LAUNCH_S": 0.0, "_LARGE_BYTES": 1}.items():
        monkeypatch.setattr(
            f"outsize.doctor.residency.{name}", value
        )  # else tiny blocks are too small
    card = FakeCard(launch_s=0.0)
    real = app_residency.prove

    def slid(pieces: list[Piece], *rest: Any, **more: Any) -> Proof:
        card.clock.far = {one.address for one in pieces if one.name == "block 1"}
        assert card.clock.far
        return real(pieces, *rest, **more)

    monkeypatch.setattr(app_residency, "prove", slid)
    recipe = write_recipe(tmp_path)
    with pytest.raises(MachineFault, match=r"block 1 \(blocks, .*placement: \{kind: stream\}"):
        train_on(card, recipe, monkeypatch)
    folder = RunFolder(load_recipe(recipe).run_folder())
    assert folder.state == "failed"
    assert [one["verdict"] for one in events(folder, "residency")] == ["off the card"]
    assert events(folder, "step") == []


def test_the_ledger_of_a_training_holds_all_that_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks by the plan's count of bytes, adapter and optimiser by their shapes, nothing twice."""
    run = train_on(FakeCard(), write_recipe(tmp_path), monkeypatch)
    (loaded,) = events(run, "residency")
    assert loaded["verdict"] == "unknown"  # too small for a clock
    owners = events(run, "sensors")[-1]["owners"]
    (told,) = [one for one in events(run, "loaded") if one["slot"] == "base"]
    assert owners["blocks"] == told["device_bytes"]
    assert set(owners) == {
        "blocks",
        "small tensors",
        "optimiser",
    }  # fp32 on a processor: no rounded copy


@dataclass
class Stub:
    """A residency over a few blocks, without a model."""

    card: FakeCard
    residency: Residency
    run: RunFolder
    said: list[str]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    card, run, said, held = FakeCard(), RunFolder(tmp_path), list[str](), blocks(SIZES)
    site: Any = SimpleNamespace(
        device=card,
        journal=Journal(run.journal),
        progress=SimpleNamespace(say=said.append),
        plan=SimpleNamespace(
            rates=SimpleNamespace(device_memory_bytes_per_s=CARD_RATE, bus_bytes_per_s=BUS_RATE)
        ),
    )
    placement = SimpleNamespace(buffers=lambda: held, device_bytes=lambda: TOTAL)
    model: Any = SimpleNamespace(placement=placement, small_tensors=dict)
    nothing: Any = SimpleNamespace(held=dict, parameters=dict)
    yield Stub(card, Residency(site, model, nothing, nothing, Requests(run)), run, said)
    site.journal.close()


def step(number: int, seconds: float) -> Any:
    return SimpleNamespace(step=number, seconds=seconds)


def test_a_step_of_more_than_twice_the_median_is_followed_by_a_proof(stub: Stub) -> None:
    """And not by another one right away: where one step is slow, many may be."""
    for number in range(1, 11):
        stub.residency.see(step(number, 1.0 + 0.05 * (number % 2)))
    assert events(stub.run, "residency") == []
    stub.card.clock.far = {stub.residency._pieces()[2].address}
    for number in (11, 12, 13):
        stub.residency.see(step(number, 2.2))
    (found,) = events(stub.run, "residency")
    assert (found["moment"], found["step"], found["verdict"]) == ("slow step", 11, "off the card")
    assert [one["name"] for one in found["culprits"]] == ["block 2"]
    assert len(stub.said) == 1
    assert "block 2" in stub.said[0]


def test_a_slow_step_on_a_well_card_is_only_noted(stub: Stub) -> None:
    for number, seconds in enumerate([1.0] * 10 + [9.0], 1):
        stub.residency.see(step(number, seconds))
    assert [one["verdict"] for one in events(stub.run, "residency")] == ["on the card"]
    assert stub.said == []


def test_the_first_steps_are_slow_without_a_proof(stub: Stub) -> None:
    """They compile and load kernels."""
    for number, seconds in enumerate([60.0, 1.0, 1.0, 9.0, 1.0], 1):
        stub.residency.see(step(number, seconds))
    assert events(stub.run, "residency") == []


# --- the sensors of a training -------------------------------------------------------------------


def test_sensors_are_written_while_the_training_thread_hangs(tmp_path: Path) -> None:
    """That is when they are wanted most; and nothing is written once the journal may be closed."""
    journal, copied = Journal(tmp_path / "journal.jsonl"), iter(range(0, 10**12, 10**9))
    reader = Told(card_bytes=5 * GIB, host_bytes=MIB, used_bytes=6 * GIB, power_w=321.5)
    sampler = Sampler(
        FakeCard(given_bytes=4 * GIB), journal, reader, lambda: next(copied), every_s=0.02
    )
    sampler.step, sampler.owners = 7, {"blocks": 3 * GIB}
    with sampler:
        while len([*read_journal(journal.path)]) < 3:  # this thread does nothing for the sampler
            time.sleep(0.01)
    found = [*read_journal(journal.path)]
    journal.close()
    time.sleep(0.05)
    assert len([*read_journal(journal.path)]) == len(found)
    for one in found:
        assert (one["event"], one["step"], one["power_w"]) == ("sensors", 7, 321.5)
        assert one["process"]["card_bytes"] == 5 * GIB
        assert one["allocated_bytes"] == 4 * GIB
        assert one["owners"] == {"blocks": 3 * GIB}
        assert one["host_bytes"] > 0
    assert found[0]["bus_bytes_per_s"] is None
    # a gigabyte between two looks that lie 20 ms or more apart
    assert 0 < found[1]["bus_bytes_per_s"] <= 50e9


def test_lines_of_two_threads_never_tear(tmp_path: Path) -> None:
    """Sensors and steps are written side by side."""
    journal = Journal(tmp_path / "journal.jsonl")
    seen: list[int] = []

    def write(place: int) -> None:
        for number in range(300):
            journal.write("line", place=place, number=number, filler="x" * 500)

    with journal.followed_by(lambda event: seen.append(event["place"])):
        threads = [threading.Thread(target=write, args=(place,)) for place in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    journal.close()
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == len(seen) == 1200
    for place in range(4):
        assert [one["number"] for one in found if one["place"] == place] == [*range(300)]
    assert [one["place"] for one in found] == seen  # followers are told in the order of the lines


def test_a_tail_gives_each_event_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    """Who watches reads while the trainer writes."""
    path = tmp_path / "journal.jsonl"
    tail = JournalTail(path)
    assert tail.new() == []
    path.write_bytes(b'{"event": "a"}\n{"event": "b", "text": "\xc3')
    assert [one["event"] for one in tail.new()] == ["a"]
    with path.open("ab") as file:
        file.write(b'\xa4"}\ntorn\n[1]\n{"event": "c"}\n')
    assert [(one["event"], one.get("text")) for one in tail.new()] == [("b", "\u00e4"), ("c", None)]
    assert tail.new() == []
