"""A training whose card stalls is saved, stopped and told of; one that hangs is ended, and goes on in a fresh process if asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_support import checkpoint_bytes, command, environment, train_here, write_recipe
from tiny import write_tiny

from outsize.app import supervise as supervising
from outsize.app.stall_watch import STACKS_NAME, StallWatch
from outsize.app.supervise import MOST_RESTARTS, supervise
from outsize.base.errors import EXIT_STOPPED, Stalled
from outsize.base.journal import Journal, read_journal
from outsize.runs.checkpoint import all_checkpoints
from outsize.runs.folder import RunFolder
from outsize.runs.requests import Requests
from outsize.train.loop import Split, StepReport
from outsize.train.stalls import Limits

HOOKS = Path(__file__).parent / "stall_hooks"
SHORT = Limits(every_s=0.02, hung_s=0.3, frozen_s=0.3, first_s=0.3, grace_s=0.2, patience=5.0)
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
    """Its first value that is not empty, within ten seconds."""
    end = time.monotonic() + 10
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
    time.sleep(1.0)  # three times what a step may take
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

    monkeypatch.setattr(
        stall_watch,
        "LIMITS",
        Limits(every_s=0.1, first_s=1.0, frozen_s=1.0, hung_s=1.0, patience=0.0),
    )
    grad_norm, calls = Update.grad_norm, iter(range(99))

    def slow(update: Update) -> Any:
        if next(calls) == 2:
            time.sleep(2.0)
        return grad_norm(update)

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


@pytest.mark.parametrize(
    ("ends", "code", "num_starts"),
    [
        ([(12, 4), (12, 8), (0, 9)], 0, 3),  # code, step of the newest checkpoint
        ([(11, 4)], 11, 1),
        ([(-9, 4)], -9, 1),
        ([(12, 4), (12, 4), (12, 4)], 12, 3),  # two restarts made no progress
        ([(12, 0), (12, 0), (12, 2), (12, 2), (12, 2)], 12, 5),
        ([(12, n + 1) for n in range(MOST_RESTARTS + 1)], 12, MOST_RESTARTS + 1),
    ],
    ids=["cured", "another fault", "killed", "in vain", "in vain, later", "ten times"],
)
def test_restarts_are_bounded_and_need_progress(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[tuple[int, int]],
    code: int,
    num_starts: int,
) -> None:
    run, starts = RunFolder(tmp_path), []

    def child(_parent: Any, arguments: list[str]) -> int:
        ended, step = ends[len(starts)]
        starts.append(arguments)
        (run.checkpoints / f"{step:08d}").mkdir(parents=True, exist_ok=True)
        return ended

    monkeypatch.setattr(supervising._Parent, "child", child)
    assert supervise(run, ["train", "x"], lambda _text: None) == code
    assert starts == [["train", "x"]] * num_starts
    restarted = [one for one in read_journal(run.journal) if one["event"] == "restarted"]
    assert len(restarted) == num_starts - 1


def test_a_stall_that_a_fresh_process_does_not_cure_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = RunFolder(tmp_path), []
    journal = Journal(run.journal)
    journal.write("stall", kind="evicted memory", is_restarted=False)
    journal.close()
    monkeypatch.setattr(supervising._Parent, "child", lambda *_: 12)
    assert supervise(run, [], said.append) == 12
    assert said == ["not started again: a fresh process does not cure `evicted memory`"]


def hanging(folder: Path, *, at: int, where: str) -> dict[str, str]:
    """The environment of a process, one step of which hangs, "any", or a "supervised" one alone."""
    path = os.pathsep.join([str(HOOKS), environment()["PYTHONPATH"]])
    own = {
        "PYTHONPATH": path,
        "HANG_AT": str(at),
        "HANG_ONCE": str(folder / "hung"),
        "HANG_IN": where,
    }
    return environment() | own


def test_a_hung_training_ends_with_its_own_code_and_the_last_checkpoint_stands(
    model: Path, tmp_path: Path
) -> None:
    """As a user meets it: the command comes back, says what was seen and what was kept."""
    recipe = write_recipe(tmp_path, model=model)
    done = subprocess.run(
        command("train", recipe, "--device", "cpu"), env=hanging(tmp_path, at=4, where="any"),
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == Stalled.exit_code, done.stderr
    assert "Stalled: frozen: no step has ended for" in done.stderr
    assert "newest checkpoint: step 2" in done.stderr
    run = RunFolder(tmp_path / "runs" / "run")
    assert [one.name for one in all_checkpoints(run.checkpoints)] == ["00000002"]
    assert "sitecustomize.py" in (run.path / STACKS_NAME).read_text()
    assert json.loads((run.path / "state.json").read_text())["error"] == "Stalled"
    assert "stalled at step 3" in run.report.read_text()


@pytest.mark.slow
def test_on_stall_resume_ends_with_the_bytes_of_an_undisturbed_run(
    model: Path, tmp_path: Path
) -> None:
    _, undisturbed = train_here(write_recipe(tmp_path, model=model, name="undisturbed"))
    recipe = write_recipe(tmp_path, model=model, on_stall="resume")
    done = subprocess.run(
        command("train", recipe, "--device", "cpu"), env=hanging(tmp_path, at=4, where="supervised"),
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "starting a fresh process after step 2 (1 of at most 10)" in done.stderr
    assert (tmp_path / "hung").exists()
    run = RunFolder(tmp_path / "runs" / "run")
    assert checkpoint_bytes(run) == checkpoint_bytes(undisturbed)
    kinds = [one["event"] for one in read_journal(run.journal)]
    assert [kinds.count(kind) for kind in ("stall", "restarted", "resumed", "completed")] == [1] * 4
    assert "a fresh process was started after step 2" in run.report.read_text()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_a_parent_that_is_asked_to_stop_asks_its_child(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model=model, on_stall="resume", train={"steps": 5000})
    parent = subprocess.Popen(
        command("train", recipe, "--device", "cpu"), env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    run = RunFolder(tmp_path / "runs" / "run")
    end = time.monotonic() + 120
    while not all_checkpoints(run.checkpoints) and time.monotonic() < end:
        time.sleep(0.1)
    parent.send_signal(signal.SIGTERM)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == EXIT_STOPPED, said
    assert run.state == "stopped"
    assert not run.stop_now.exists()
