"""Trackers are told what the journal is told, change nothing, and cannot end a training."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from run_support import checkpoint_bytes, command, environment, outsize, train_here, write_recipe
from tiny import write_tiny

from outsize.base.errors import RecipeError
from outsize.base.journal import Journal, read_journal
from outsize.plan.names import check_names
from outsize.recipes.load import load_recipe
from outsize.runs.folder import RunFolder
from outsize.runs.trackers.protocol import TRACKERS, scalars_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("models") / "flux2")


class Recording:
    """Keeps what it is told; breaks at a step, if asked to."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.seen: list[Mapping[str, Any]] = []
        self.closed = 0
        self._breaks_at = breaks_at

    def __call__(self, _run: RunFolder, recipe: Mapping[str, Any]) -> Recording:
        self.recipe = recipe
        return self

    def see(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == self._breaks_at:
            raise ConnectionError("the server is away")
        self.seen.append(event)

    def close(self) -> None:
        self.closed += 1


def _recipe(folder: Path, model: Path, **changes: Any) -> Path:
    return write_recipe(folder, model=model, train={"steps": 4}, **changes)


def test_a_tracker_hears_what_the_journal_holds_and_no_bit_changes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plain = train_here(_recipe(tmp_path, model, name="plain"))
    found = Recording()
    monkeypatch.setattr("outsize.app.tracking.TRACKERS", _Only(found))
    _, run = train_here(_recipe(tmp_path, model, track=["tensorboard"]))
    assert checkpoint_bytes(run) == checkpoint_bytes(plain)
    told = [dict(one) for one in found.seen]
    held = list(read_journal(run.journal))
    assert told == [one for one in held if one in told]
    assert [one["step"] for one in told if one["event"] == "step"] == [1, 2, 3, 4]
    assert found.closed == 1
    assert found.recipe["name"] == "run"


class _Only:
    """A catalogue of one."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def load(self, _name: str) -> Any:
        return self._plugin


def test_a_tracker_that_fails_is_said_to_have_and_training_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Recording(breaks_at=2)
    monkeypatch.setattr("outsize.app.tracking.TRACKERS", _Only(found))
    trained, run = train_here(_recipe(tmp_path, model, track=["tensorboard"]))
    assert trained.outcome == "completed"
    warnings = [one["what"] for one in read_journal(run.journal) if one["event"] == "warning"]
    assert warnings == [
        "the tracker tensorboard failed and is told nothing more: ConnectionError: the server is away"
    ]
    assert [one["step"] for one in found.seen if one["event"] == "step"] == [1]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_slow(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TRACKERS.names():
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        recipe = _recipe(tmp_path, model, track=[name], name=name)
        with pytest.raises(RecipeError, match=rf'pip install "outsize\[{name}\]"'):
            train_here(recipe)
        events = list(read_journal(tmp_path / "runs" / name / "journal.jsonl"))
        assert [one["event"] for one in events] == ["device", "failed"]


def test_an_unknown_tracker_is_refused_with_the_nearest_name(model: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, model, track=["tensorbord"])
    with pytest.raises(
        RecipeError, match=r"track: no tracker is called 'tensorbord'; did you mean"
    ):
        check_names(load_recipe(recipe), origin=str(recipe))


def test_trackers_are_no_part_of_what_decides_numbers(model: Path, tmp_path: Path) -> None:
    plain = load_recipe(_recipe(tmp_path, model))
    tracked = load_recipe(_recipe(tmp_path, model, track=["trackio"]))
    assert plain.numbers_digest() == tracked.numbers_digest()


def test_followers_are_told_after_the_line_is_written_and_no_more_after_the_block(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    seen: list[Any] = []

    def look(event: dict[str, Any]) -> None:
        seen.append((event["event"], len(list(read_journal(journal.path)))))

    with journal.followed_by(look):
        journal.write("one")
        journal.write("two")
    journal.write("three")
    journal.close()
    assert seen == [("one", 1), ("two", 2)]


def test_numbers_of_events_are_named() -> None:
    step = {"event": "step", "step": 3, "loss": 0.5, "host_s": 0.1, "learning_rate": None}
    assert scalars_of(step) == {"train/loss": 0.5, "time/host_s": 0.1}
    held = {"event": "evaluated", "what": "base", "step": 3, "loss": 2, "perplexity": 7.0}
    assert scalars_of(held) == {"held_out/base_loss": 2.0, "held_out/base_perplexity": 7.0}
    assert scalars_of({"event": "stage", "seconds": 1.0}) == {}


@pytest.mark.slow
def test_tensorboard_reads_back_what_was_journaled(model: Path, tmp_path: Path) -> None:
    """By TensorBoard's own reader, across a stop: what a resumed run takes again replaces what was there.

    In a process of its own, as users have it: TensorBoard's libraries warn of themselves when they are imported.
    """
    pytest.importorskip("tensorboard.compat")
    previews = {"every": 2, "steps": 1, "width": 32, "height": 32}
    recipe = _recipe(tmp_path, model, track=["tensorboard"], previews=previews)
    done = outsize("train", recipe, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "runs" / "run")
    for later in (run.checkpoints / "00000003", run.checkpoints / "00000004"):
        if later.exists():
            later.rename(tmp_path / later.name)
    again = outsize("train", recipe, "--device", "cpu")
    assert again.returncode == 0, again.stderr
    program = (
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(sys.argv[1], size_guidance={'images': 0}).Reload()\n"
        "tags = found.Tags()\n"
        "print(json.dumps({'scalars': {tag: [(one.step, one.value) for one in found.Scalars(tag)]\n"
        "    for tag in tags['scalars']}, 'images': [one.step for one in found.Images('previews')]}))\n"
    )
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(run.path / "tensorboard")],
        capture_output=True, text=True, check=True, env=environment(),
    )  # fmt: skip
    found = json.loads(child.stdout.splitlines()[-1])
    steps = [one for one in read_journal(run.journal) if one["event"] == "step"]
    expected = {one["step"]: one["loss"] for one in steps}
    losses = found["scalars"]["train/loss"]
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert dict(losses) == pytest.approx(expected, rel=1e-6)
    assert {"train/grad_norm", "train/learning_rate", "time/compute_s", "memory/host_bytes"} <= {
        *found["scalars"]
    }
    assert set(found["images"]) >= {0, 2}


def test_trackio_keeps_what_was_journaled(model: Path, tmp_path: Path) -> None:
    """By trackio's own reader, from a store in a folder of the test's."""
    pytest.importorskip("trackio")
    recipe = _recipe(tmp_path, model, track=["trackio"])
    own = environment() | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        command("train", recipe, "--device", "cpu"),
        capture_output=True, text=True, check=False, env=own,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    program = (
        "import json\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "print(json.dumps(SQLiteStorage.get_logs('outsize', 'run'), default=str))\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=own
    )
    logs = json.loads(child.stdout.splitlines()[-1])
    losses = {one["step"]: one["train/loss"] for one in logs if "train/loss" in one}
    run = RunFolder(tmp_path / "runs" / "run")
    steps = [one for one in read_journal(run.journal) if one["event"] == "step"]
    assert losses == pytest.approx({one["step"]: one["loss"] for one in steps})
