"""A training that hangs is ended with its own exit code, and goes on in a fresh process where the recipe says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from run_support import checkpoint_bytes, command, environment, train_here, write_recipe
from tiny import write_tiny

from outsize.app import supervise as supervising
from outsize.app.stall_watch import STACKS_NAME
from outsize.app.supervise import MOST_RESTARTS, supervise
from outsize.base.errors import EXIT_STOPPED, Stalled
from outsize.base.journal import Journal, read_journal
from outsize.recipes.load import load_recipe
from outsize.runs.checkpoint import all_checkpoints
from outsize.runs.folder import RunFolder

HOOKS = Path(__file__).parent / "stall_hooks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("models") / "flux2")


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


@pytest.mark.slow
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


def test_on_stall_is_no_part_of_what_decides_numbers(model: Path, tmp_path: Path) -> None:
    """A run that stalled once may be told to go on by itself from then on."""
    plain = load_recipe(write_recipe(tmp_path, model=model))
    resumed = load_recipe(write_recipe(tmp_path, model=model, on_stall="resume"))
    assert plain.numbers_digest() == resumed.numbers_digest()


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
