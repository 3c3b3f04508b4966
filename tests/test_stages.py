"""Where time went: stages within stages are counted once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from outsize.app import stages as timed
from outsize.app.stages import Stage, Stages, prepare_seconds
from outsize.base.journal import Journal, read_journal
from outsize.devices.protocol import open_device


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timed, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def test_seconds_of_nested_stages_add_up_to_the_time_that_passed(
    tmp_path: Path, clock: Clock
) -> None:
    """Caching opens an encoder, which is prepared and loaded meanwhile."""
    journal = Journal(tmp_path / "journal.jsonl")
    stages = Stages(open_device("cpu"), journal)
    with stages.stage("cache"):
        clock.now += 5
        with stages.stage("prepare"):
            with stages.stage("hash"):
                clock.now += 10
            clock.now += 1
        with stages.stage("load"):
            clock.now += 2
    journal.close()
    expected = {"hash": 10, "prepare": 1, "load": 2, "cache": 5}
    assert stages.seconds() == expected
    written = {one["name"]: one["seconds"] for one in read_journal(tmp_path / "journal.jsonl")}
    assert written == expected


def test_a_stage_that_fails_is_not_finished_and_leaves_the_next_one_right(
    tmp_path: Path, clock: Clock
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    stages = Stages(open_device("cpu"), journal)
    with pytest.raises(ValueError, match="broken"), stages.stage("one"), stages.stage("two"):
        raise ValueError("broken")
    assert stages.finished == []
    with stages.stage("three"):
        clock.now += 3
    journal.close()
    assert [(one.name, one.seconds) for one in stages.finished] == [("three", 3)]


def test_seconds_of_preparing_are_found_by_slot() -> None:
    stages = [
        Stage("prepare base", 3.0, 0, 1),
        Stage("load base", 2.0, 0, 1),
        Stage("prepare vae", 1.0, 0, 1),
    ]
    assert prepare_seconds(stages) == {"base": 3.0, "vae": 1.0}


class Card:
    """A device whose peak goes up as it is told, and down when it is reset."""

    copies_asynchronously = True

    def __init__(self) -> None:
        self.peak = 0

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = 0

    def release_cached(self) -> None: ...

    def synchronize(self) -> None: ...


def test_a_stage_keeps_the_peak_it_reached_before_a_stage_within_it(tmp_path: Path) -> None:
    card = Card()
    journal = Journal(tmp_path / "journal.jsonl")
    stages = Stages(card, journal)  # type: ignore[arg-type]
    with stages.stage("outer"):
        card.peak = 70
        with stages.stage("inner"):
            card.peak = 50
        card.peak = 60
    journal.close()
    assert {one.name: one.device_bytes for one in stages.finished} == {"inner": 50, "outer": 70}
