"""Training as a whole, on tiny models: exact under placement, kill and resume; heard when asked to stop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import (
    adapter_of,
    checkpoint_bytes,
    killed_after_step,
    outsize,
    outsize_started,
    site_of,
    train_here,
    wait_for_step,
    write_pictures,
    write_recipe,
)
from tiny import write_tiny

from outsize.app.encode import build_corpus
from outsize.app.train import train
from outsize.base.errors import NotFinite, RecipeError
from outsize.base.journal import read_journal
from outsize.data import media

FAMILY_NAMES = ("flux1", "flux2")
FORMATS: tuple[Any, ...] = (
    "nf4",
    {"name": "nf4", "group": 32, "scales": "fp16"},
    {"name": "nf4", "scales": "double"},
    {"name": "nf4", "group": 32, "scale_search": True, "rotation": "hadamard"},
    "int4",
    "int8",
    "fp8",
    "plain",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny(family, "tiny", root / family) for family in FAMILY_NAMES}


@pytest.mark.parametrize(
    ("fmt", "family"),
    [
        pytest.param(fmt, family, id=f"{fmt}-{family}", marks=() if is_fast else pytest.mark.slow)
        for fmt in FORMATS
        for family in FAMILY_NAMES
        for is_fast in [fmt == "nf4" or (family == "flux2" and isinstance(fmt, str))]
    ],
)
def test_streamed_training_equals_resident_training_bit_for_bit(
    models: dict[str, Path], family: str, fmt: Any, tmp_path: Path
) -> None:
    """20 steps; the placement may change when bytes move, never a number.

    The resident run keeps its activations, the streamed one cannot: recomputing changes no number either.
    """
    found = []
    for kind in ("resident", "stream"):
        recipe = write_recipe(
            tmp_path, family, model=models[family], base={"format": fmt}, name=kind,
            train={"steps": 20}, placement={"kind": kind, "slots": 2, "recompute": False},
            checkpoints={"every": 100},
        )  # fmt: skip
        trained, run = train_here(recipe)
        assert trained.outcome == "completed"
        found.append(checkpoint_bytes(run))
    assert found[0] == found[1]


def test_resume_gives_the_same_bytes_as_an_unbroken_run(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Accumulation, caption dropout, batches and 8-bit state included; stopped after every possible step."""
    settings = {
        "steps": 5,
        "accumulate": 2,
        "batch": 2,
        "warmup_steps": 3,
        "optimizer": "adamw8bit",
    }
    whole = write_recipe(tmp_path, model=models["flux2"], name="whole", train=settings)
    _, run = train_here(whole)
    expected = checkpoint_bytes(run)
    for k in range(1, 5):
        part = write_recipe(
            tmp_path, model=models["flux2"], name=f"part{k}", train=settings | {"steps": k}
        )
        train_here(part)
        rest = write_recipe(tmp_path, model=models["flux2"], name=f"part{k}", train=settings)
        trained, run = train_here(rest)
        assert trained.resumed_at == k
        assert checkpoint_bytes(run) == expected


@pytest.mark.slow
def test_a_run_killed_at_random_and_resumed_equals_an_unbroken_one(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Kill -9 of the real command, anywhere between its start and its end."""
    settings = {"steps": 30}
    every = {"every": 1, "keep": 2}
    whole = write_recipe(
        tmp_path, model=models["flux2"], name="whole", train=settings, checkpoints=every
    )
    _, run = train_here(whole)
    expected = checkpoint_bytes(run)
    dice = random.Random(3)
    for number in range(6):
        recipe = write_recipe(
            tmp_path,
            model=models["flux2"],
            name=f"killed{number}",
            train=settings,
            checkpoints=every,
        )
        k = dice.randrange(1, 29)
        killed_after_step(k, recipe, "--device", "cpu")
        done = outsize("train", recipe, "--device", "cpu")
        assert done.returncode == 0, done.stderr
        assert checkpoint_bytes(_run(tmp_path, f"killed{number}")) == expected


def _run(folder: Path, name: str) -> Any:
    from outsize.runs.folder import RunFolder

    return RunFolder(folder / "runs" / name)


@pytest.mark.parametrize("how", [pytest.param("signal", marks=pytest.mark.slow), "file"])
def test_a_request_to_stop_saves_and_the_next_start_goes_on(
    models: dict[str, Path], tmp_path: Path, how: str
) -> None:
    recipe = write_recipe(
        tmp_path, model=models["flux2"], train={"steps": 100_000}, checkpoints={"every": 100_000}
    )
    run = _run(tmp_path, "run")
    log = tmp_path / "log"
    child = outsize_started("train", recipe, "--device", "cpu", log=log)
    wait_for_step(child, run.journal, 2)
    if how == "signal":
        child.terminate()
    else:
        run.stop_now.touch()
    child.join(60)
    said = log.read_text(encoding="utf-8")
    assert child.exitcode == 3, said
    assert "stopped after step" in said
    assert run.state == "stopped"
    steps = [one["step"] for one in read_journal(run.journal) if one["event"] == "step"]
    assert int(max(run.checkpoints.iterdir()).name) == steps[-1]
    shorter = write_recipe(tmp_path, model=models["flux2"], train={"steps": steps[-1] + 1})
    trained, _ = train_here(shorter)
    assert (trained.resumed_at, trained.step) == (steps[-1], steps[-1] + 1)


def test_save_now_writes_a_checkpoint_and_goes_on(models: dict[str, Path], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model=models["flux2"], checkpoints={"every": 100})
    run = _run(tmp_path, "run")
    run.path.mkdir(parents=True)
    run.save_now.touch()
    trained, _ = train_here(recipe)
    assert trained.outcome == "completed"
    assert {int(one.name) for one in run.checkpoints.iterdir()} == {1, 6}


def test_a_run_is_not_resumed_with_other_numbers(models: dict[str, Path], tmp_path: Path) -> None:
    train_here(write_recipe(tmp_path, model=models["flux2"]))
    changed = write_recipe(tmp_path, model=models["flux2"], train={"learning_rate": 0.5})
    with pytest.raises(RecipeError, match="the recipe changed since"):
        train_here(changed)
    (tmp_path / "pictures" / "00.txt").write_text("something else", encoding="utf-8")
    with pytest.raises(RecipeError, match="the pictures or captions changed since"):
        train_here(write_recipe(tmp_path, model=models["flux2"]))


def test_placement_may_change_between_stop_and_resume(
    models: dict[str, Path], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, model=models["flux2"], train={"steps": 3})
    train_here(recipe)
    recipe = write_recipe(
        tmp_path, model=models["flux2"], train={"steps": 6}, placement={"kind": "stream"}
    )
    trained, run = train_here(recipe)
    assert trained.resumed_at == 3
    whole = write_recipe(tmp_path, model=models["flux2"], name="whole")
    _, unbroken = train_here(whole)
    assert checkpoint_bytes(run) == checkpoint_bytes(unbroken)


def test_a_gradient_that_is_no_number_stops_before_the_update(
    models: dict[str, Path], tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path, model=models["flux2"], train={"learning_rate": 1e30, "clip_norm": None}
    )
    with pytest.raises(NotFinite, match=r"not updated"):
        train_here(recipe)
    run = _run(tmp_path, "run")
    assert run.state == "failed"
    for path in run.checkpoints.glob("*"):
        values = adapter_of(run, int(path.name))
        assert all(torch.isfinite(one).all() for one in values.values())


def test_roles_that_match_nothing_are_refused_by_the_plan(
    models: dict[str, Path], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, model=models["flux2"], adapter={"roles": ["head"]})
    with pytest.raises(RecipeError, match=r"adapter\.roles \['head'\] match no linear"):
        train_here(recipe)


def test_the_second_start_opens_no_encoder_and_decodes_no_picture(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, model=models["flux2"])
    train_here(recipe)
    again = write_recipe(tmp_path, model=models["flux2"], name="again")
    monkeypatch.setattr(media, "inspect", lambda _content: pytest.fail("a picture was decoded"))
    with site_of(again) as (site, run):
        train(site, run, lambda _report: None)
        loaded = [one.name for one in site.stages.finished if one.name.startswith("load")]
    assert loaded == ["load base"]


def test_regularisation_pictures_are_drawn_by_their_share_and_weighed(
    models: dict[str, Path], tmp_path: Path
) -> None:
    write_pictures(tmp_path / "others", 4)
    sets = [
        {"folder": "pictures"},
        {"folder": "others", "is_regularisation": True, "share": 0.25, "loss_weight": 0.5},
    ]
    recipe = write_recipe(tmp_path, model=models["flux2"], data={"sets": sets, "resolution": 32})
    with site_of(recipe) as (site, _):
        corpus = build_corpus(site)
    others = [Path(*corpus.pictures_of(step)).parent.name == "others" for step in range(40)]
    assert sum(others) == 10
    for step in (others.index(True), others.index(False)):
        (weight,) = corpus.batch(step, 0).loss_weight_B.tolist()
        assert weight == (0.5 if others[step] else 1.0)
