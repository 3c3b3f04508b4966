"""Kill -9 at random moments of a training with everything on: resumed to the end, it has the bytes of one never killed."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_support import checkpoint_bytes, outsize_started, wait_for_step
from test_picture_runs import everything
from tiny import write_tiny

from outsize.recipes.load import load_recipe
from outsize.runs.checkpoint import newest_checkpoint
from outsize.runs.folder import RunFolder

STEPS = 8
# A kill takes five seconds, nearly all of them a start; fifty at least once for every release.
NUM_KILLS = int(os.environ.get("OUTSIZE_KILLS", "12"))
CHANGES: dict[str, Any] = {
    "train": {
        "steps": STEPS, "batch": 2, "accumulate": 2, "ema": 0.9, "learning_rate": 1e-2, "seed": 5,
        "loss": {"kind": "huber"}, "optimizer": "adamw8bit",
    },
    "checkpoints": {"every": 1, "keep": 2},
    "previews": {"every": 3, "prompts": ["a red picture"], "steps": 1, "width": 32, "height": 32},
}  # fmt: skip


def run_of(recipe: Path) -> RunFolder:
    return RunFolder(load_recipe(recipe).run_folder())


def finish(recipe: Path, log: Path) -> float:
    """Let it train to the end; the seconds it took."""
    began = time.monotonic()
    child = outsize_started("train", recipe, log=log)
    child.join(300)
    assert child.exitcode == 0, log.read_text(encoding="utf-8")[-4000:]
    assert run_of(recipe).state == "completed"
    return time.monotonic() - began


def step_of(run: RunFolder) -> int:
    path, faults = newest_checkpoint(run.checkpoints)
    assert not faults, "a checkpoint is whole or is not there"
    return 0 if path is None else int(path.name)


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [NUM_KILLS])
def test_a_run_killed_at_random_and_resumed_equals_an_unbroken_one_with_everything_on(
    tmp_path: Path, num_kills: int
) -> None:
    """Masks, resolutions, flips, weights, regularisation, dropout, accumulation, an average, previews, 8-bit state."""
    model, dice = write_tiny("flux2", "tiny", tmp_path / "model"), random.Random(7)
    unbroken = everything(tmp_path / "data", model, name="whole", cache="whole", **CHANGES)
    finish(unbroken, tmp_path / "whole.log")  # the server's imports are in this one
    expected = checkpoint_bytes(run_of(unbroken))
    again = everything(tmp_path / "data", model, name="again", cache="whole", **CHANGES)
    span = finish(again, tmp_path / "again.log")
    assert checkpoint_bytes(run_of(again)) == expected
    reached: Counter[int] = Counter()
    kills = runs = 0
    while kills < num_kills:
        # Each run has a cache of its own: the first kills fall on preparing and encoding.
        name = f"killed{runs}"
        log = tmp_path / f"{name}.log"
        recipe = everything(tmp_path / "data", model, name=name, cache=name, **CHANGES)
        runs += 1
        while kills < num_kills:
            child = outsize_started("train", recipe, log=log)
            if kills % 2:  # anywhere, most of it before the first step
                child.join(dice.uniform(0.05, 1.2) * span)
            else:
                next_step = step_of(run_of(recipe)) + dice.randrange(1, 3)
                wait_for_step(child, run_of(recipe).journal, next_step)
                child.join(dice.uniform(0, 0.2))  # anywhere in that one or the next
            if child.exitcode is not None:
                assert child.exitcode == 0, log.read_text(encoding="utf-8")[-4000:]
                break
            child.kill()
            child.join()
            kills += 1
            reached[step_of(run_of(recipe))] += 1
        finish(recipe, log)
        assert checkpoint_bytes(run_of(recipe)) == expected, f"after {kills} kills"
    at = dict(sorted(reached.items()))
    print(f"{kills} kills in {runs} runs of {span:.1f} s, at steps {at}")  # noqa: T201
    assert len(reached) > 2, "the kills came at different moments"
    assert reached[0] < kills, "and not only before the first step"
