"""A training whose card stalls is asked to save and stop, and the reason told; one that hangs is written down and ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from run_support import train_here, write_recipe
from tiny import write_tiny

from outsize.app.stall_watch import STACKS_NAME, StallWatch
from outsize.base.errors import Stalled
from outsize.base.journal import Journal, read_journal
from outsize.runs.checkpoint import all_checkpoints
from outsize.runs.folder import RunFolder
from outsize.runs.requests import Requests
from outsize.train.loop import Split, StepReport
from outsize.train.stalls import Limits

SHORT = Limits(every_s=0.02, hung_s=1.0, frozen_s=1.0, first_s=1.0, grace_s=0.2, patience=5.0)
HEALTHY = {"busy": 1.0, "memory_busy": 0.4, "power_w": 380.0, "clock_mhz": 2500.0}
PROCESS = {"card_bytes": 20 << 30, "evicted_ms": 0}
STEP_S = 0.01


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("models") / "flux2")


@dataclass
class Told:
    """Keeps what a person is told."""

    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.said.append(text)


@dataclass
class Training:
    """A training's thread, a card whose sensors a test sets, and the watcher beside them."""

    run: RunFolder
    run_journal: Journal
    sensors: dict[str, Any]
    watch: StallWatch
    requests: Requests
    told: Told
    ended: list[int]
    num_steps: int = 0
    spilled_bytes: int = 0

    def steps(self, num: int, seconds: float = STEP_S) -> None:
        for _ in range(num):
            self.watch.doing("step")
            for _ in range(round(seconds / STEP_S)):
                time.sleep(STEP_S)
                self.tell()
            self.watch.doing("between")
            self.num_steps += 1
            split = Split(seconds, 0.0, 0.0)
            self.watch.see(StepReport(self.num_steps, 1000, 1.0, 1.0, 1.0, seconds, split))

    def tell(self) -> None:
        """What app/sensing.py writes."""
        known = dict.fromkeys(HEALTHY) | self.sensors
        process = PROCESS | {"host_bytes": self.spilled_bytes}
        self.run_journal.write("sensors", **known, process=process, host_bytes=1 << 34)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in read_journal(self.run.journal) if one["event"] == kind]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    run, told, sensors, ended = RunFolder(tmp_path / "run"), Told(), dict(HEALTHY), []
    site: Any = SimpleNamespace(
        run=run, journal=Journal(run.journal), progress=told,
        plan=SimpleNamespace(step=SimpleNamespace(seconds=STEP_S)),
        device=SimpleNamespace(copies_asynchronously=True),
    )  # fmt: skip
    requests = Requests(run)
    watch = StallWatch(site, requests, limits=SHORT, end=ended.append)
    with watch.watching():
        yield Training(run, site.journal, sensors, watch, requests, told, ended)
    site.journal.close()


def until(what: Callable[[], Any]) -> Any:
    """Its first value that is not empty, within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not come")


def learned(training: Training) -> None:
    """Steps until the watcher knows what is healthy."""
    until(lambda: (training.steps(1), training.events("stall_baseline"))[1])


def test_a_poisoned_card_is_asked_to_save_and_stop_and_the_reason_is_told(
    training: Training,
) -> None:
    learned(training)
    training.sensors.update(power_w=230.0, clock_mhz=3100.0, memory_busy=0.05)
    request = until(lambda: (training.steps(1, 0.1), training.requests.look())[1])
    assert request == ("stop", "stall: poisoned context")
    assert training.events("stall")[0]["kind"] == "poisoned context"
    assert any("a second context" in one for one in training.told.said)
    with pytest.raises(Stalled, match=r"poisoned context: a step takes .* Saved after step \d+; "):
        training.watch.watched(lambda: "stopped", 41)
    assert not training.ended  # it answers, so it ends by itself


def test_a_card_at_its_lowest_clock_is_told_of_and_goes_on(training: Training) -> None:
    """Neither a stop nor a fresh process raises a clock; a night at a third of the speed is better than none."""
    learned(training)
    training.sensors.update(power_w=50.0, clock_mhz=41.0)
    request = until(lambda: (training.steps(1, 0.1), training.requests.look())[1])
    assert request == ("save", "stall: clock at its floor")
    training.steps(5, 0.1)
    assert training.requests.look() is None
    assert training.watch.watched(lambda: "stopped", 9) == "stopped"  # as somebody asked


def test_a_thread_that_does_not_answer_is_written_down_and_ended(
    training: Training, capfd: pytest.CaptureFixture[str]
) -> None:
    learned(training)
    training.watch.doing("step")
    assert until(lambda: training.ended) == [Stalled.exit_code]
    said = capfd.readouterr().err
    assert "Stalled: frozen: no step has ended for" in said
    assert "newest checkpoint: none" in said
    assert "test_a_thread_that_does_not_answer" in (training.run.path / STACKS_NAME).read_text()
    assert training.run.state == "failed"
    assert "Stalled" in training.run.report.read_text()


def test_what_happens_between_steps_takes_what_it_takes(training: Training) -> None:
    learned(training)
    time.sleep(2.0)  # twice what a step may take
    assert training.events("stall") == []
    assert not training.ended


def test_slow_steps_whose_cause_nobody_can_tell_are_journaled_as_that(training: Training) -> None:
    learned(training)
    training.sensors.pop("memory_busy")
    training.sensors.update(power_w=230.0, clock_mhz=3100.0)
    told = until(lambda: (training.steps(1, 0.1), training.events("stall_undecided"))[1])
    assert told[0]["undecided"]["poisoned context"] == ["memory_busy"]
    training.steps(8, 0.1)
    assert len(training.events("stall_undecided")) == 1


@pytest.mark.parametrize("verdict", ["off the card", "on the card"])
def test_growth_on_the_host_is_proved_before_the_run_is_stopped(
    training: Training, verdict: str
) -> None:
    """A proof that is older than the growth says nothing of it."""
    learned(training)
    training.run_journal.write("residency", moment="loaded", verdict="on the card")
    training.spilled_bytes = 2 << 30
    until(lambda: (training.steps(1, 0.05), training.requests.take_proof())[1])
    assert training.events("stall") == []
    training.run_journal.write("residency", moment="asked", verdict=verdict)
    training.steps(6, 0.05)
    stalls = [one["kind"] for one in training.events("stall")]
    assert stalls == (["spilled memory"] if verdict == "off the card" else [])


def test_a_watcher_that_fails_is_said_to_have_and_ends_nothing(training: Training) -> None:
    training.run_journal.write("sensors", process=None)
    training.watch.doing("step")
    told = until(lambda: training.events("warning"))
    assert told[0]["what"].startswith("stalls are not watched for any more: ")
    assert training.told.said == [f"warning: {told[0]['what']}"]
    assert not training.ended


def test_a_step_that_comes_back_in_time_is_saved_and_the_run_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may recover; what it computed is worth a checkpoint, and the reason is told."""
    from outsize.app import stall_watch
    from outsize.train.update import Update

    short = Limits(every_s=0.1, first_s=4.0, frozen_s=4.0, hung_s=4.0, grace_s=60.0, patience=0.0)
    monkeypatch.setattr(stall_watch, "LIMITS", short)
    grad_norm, calls = Update.grad_norm, iter(range(99))
    ask, is_asked = Requests.ask, Event()

    def heard(*asked: Any) -> None:
        ask(*asked)
        is_asked.set()

    def slow(update: Update) -> Any:
        if next(calls) == 2:
            assert is_asked.wait(60.0)
        return grad_norm(update)

    monkeypatch.setattr(Requests, "ask", heard)
    monkeypatch.setattr(Update, "grad_norm", slow)
    recipe = write_recipe(tmp_path, model=model)
    with pytest.raises(Stalled, match="Saved after step 3"):
        train_here(recipe)
    run = RunFolder(tmp_path / "runs" / "run")
    assert all_checkpoints(run.checkpoints)[0].name == "00000003"
    assert [one["reason"] for one in read_journal(run.journal) if one["event"] == "checkpoint"] == [
        "schedule", "stall: frozen",
    ]  # fmt: skip
    assert run.state == "failed"
