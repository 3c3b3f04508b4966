"""Whole runs of every kind of adapter, optimiser and average: streamed = resident, resumed = unbroken, and the right weights used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import checkpoint_bytes, site_of, train_here, write_recipe
from safetensors.torch import load_file
from tiny import write_tiny

from outsize.app.attached import adapted, load_adapter_
from outsize.app.export import trained_adapter
from outsize.base.errors import RecipeError
from outsize.base.journal import read_journal
from outsize.plan.work import work_of
from outsize.recipes.load import load_recipe
from outsize.runs.checkpoint import all_checkpoints

RULES = [{"roles": ["mlp"], "rank": 2}, {"match": "*to_out*", "rank": 3, "alpha": 5.0}]
LOSS = {"kind": "huber", "c": 0.3, "c_schedule": "snr", "weighting": "bell"}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "dora, average, huber": {
        "adapter": {"kind": "dora", "scaling": "sqrt_rank", "ranks": RULES},
        "train": {"ema": 0.9, "loss": LOSS, "accumulate": 2, "batch": 2},
    },
    "prodigy, average": {
        "adapter": {"ranks": RULES},
        "train": {
            "optimizer": "prodigy",
            "learning_rate": 1.0,
            "optimizer_options": {"d0": 1e-3, "bias_correction": True},
            "ema": 0.9,
        },
    },
    "schedule-free, range of levels": {
        "adapter": {"kind": "dora"},
        "train": {
            "optimizer": "schedulefree",
            "warmup_steps": 2,
            "accumulate": 2,
            "timesteps": {"law": "uniform", "lowest": 0.2, "highest": 0.9},
        },
    },
    "8 bits, linear": {
        "adapter": {"scaling": "sqrt_rank"},
        "train": {
            "optimizer": "adamw8bit",
            "schedule": "linear",
            "schedule_floor": 0.1,
            "ema": 0.5,
        },
    },
}
# a falling schedule counts to the last step, so a run that stops earlier is another one
RESUMED = [name for name, one in KINDS.items() if "schedule" not in one["train"]]


def _first_is_fast(names: list[str]) -> list[Any]:
    """The first as it is, the others only with --slow."""
    return [names[0], *(pytest.param(one, marks=pytest.mark.slow) for one in names[1:])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("model"))


def recipe_of(folder: Path, model: Path, kind: str, name: str, **changes: Any) -> Path:
    sections = {key: {**value} for key, value in KINDS[kind].items()}
    for key, value in changes.items():
        sections[key] = {**sections.get(key, {}), **value}
    sections["train"] = {"steps": 4, **sections["train"]}
    return write_recipe(folder, model=model, name=name, **sections)


@pytest.mark.parametrize("kind", _first_is_fast(list(KINDS)))
def test_streamed_equals_resident_bit_for_bit(kind: str, model: Path, tmp_path: Path) -> None:
    found = []
    for placement in ("resident", "stream"):
        recipe = recipe_of(
            tmp_path, model, kind, placement,
            placement={"kind": placement, "slots": 2, "recompute": False},
        )  # fmt: skip
        trained, run = train_here(recipe)
        assert trained.outcome == "completed"
        found.append(checkpoint_bytes(run))
    assert found[0] == found[1]
    names = {name for one in found for name in one}
    assert "averaged.safetensors" in names


@pytest.mark.parametrize("kind", _first_is_fast(RESUMED))
def test_resume_gives_the_same_bytes_as_an_unbroken_run(
    kind: str, model: Path, tmp_path: Path
) -> None:
    """Averages, estimated step sizes, lengths of rows and half-made sums included; stopped after every possible step."""
    _, run = train_here(recipe_of(tmp_path, model, kind, "whole"))
    expected = checkpoint_bytes(run)
    for k in range(1, 4):
        train_here(recipe_of(tmp_path, model, kind, f"part{k}", train={"steps": k}))
        trained, run = train_here(recipe_of(tmp_path, model, kind, f"part{k}"))
        assert trained.resumed_at == k
        assert checkpoint_bytes(run) == expected


def test_a_falling_schedule_is_gone_on_with_after_a_stop(model: Path, tmp_path: Path) -> None:
    """As it is stopped on request: the recipe says the same number of steps."""
    kind = "8 bits, linear"
    _, run = train_here(recipe_of(tmp_path, model, kind, "whole"))
    expected = checkpoint_bytes(run)
    recipe = recipe_of(tmp_path, model, kind, "stopped")
    with site_of(recipe) as (site, run):
        from outsize.app.train import train

        stopped = train(
            site, run, lambda report: run.stop_now.touch() if report.step == 2 else None
        )
    assert (stopped.outcome, stopped.step) == ("stopped", 2)
    _, run = train_here(recipe)
    assert checkpoint_bytes(run) == expected


@pytest.mark.parametrize(
    "kind", _first_is_fast(["dora, average, huber", "schedule-free, range of levels"])
)
def test_averaged_weights_are_used_unless_the_recipe_wants_raw_ones(
    kind: str, model: Path, tmp_path: Path
) -> None:
    """Sampled, compared and exported; the choice may change between runs, since it changes no number."""
    recipe = recipe_of(tmp_path, model, kind, "run")
    _, run = train_here(recipe)
    folder = all_checkpoints(run.checkpoints)[0]
    files = {
        "averaged": load_file(folder / "averaged.safetensors"),
        "raw": load_file(folder / "adapter.safetensors"),
    }
    assert files["averaged"].keys() == files["raw"].keys()
    moved = [n for n, one in files["raw"].items() if not torch.equal(one, files["averaged"][n])]
    assert len(moved) > len(files["raw"]) / 2
    for which, values in files.items():
        chosen = recipe_of(tmp_path, model, kind, "run", checkpoints={"weights": which})
        loaded = load_recipe(chosen)
        with site_of(chosen) as (site, _), adapted(site) as (_, adapter, _):
            load_adapter_(loaded, run, adapter)
            assert all(torch.equal(one, values[name]) for name, one in adapter.parameters().items())
        weights = trained_adapter(loaded, run, takes_lengths=True).weights
        for module, pair in weights.pairs.items():
            assert torch.equal(pair.A, values[f"{module}.lora_A"])
        for module, lengths in weights.lengths.items():
            assert torch.equal(lengths, values[f"{module}.magnitude"])
        assert train_here(chosen)[0].resumed_at == 4


def test_another_kind_of_adapter_is_not_taken_for_the_trained_one(
    model: Path, tmp_path: Path
) -> None:
    kind = "dora, average, huber"
    _, run = train_here(recipe_of(tmp_path, model, kind, "run"))
    for adapter, told in (({"scaling": "rank"}, "scaling is rank, was sqrt_rank"), ({"ranks": []}, "ranks is")):  # fmt: skip
        recipe = load_recipe(recipe_of(tmp_path, model, kind, "run", adapter=adapter))
        with pytest.raises(RecipeError, match=told):
            trained_adapter(recipe, run, takes_lengths=True)


def test_a_plan_counts_what_averages_lengths_and_estimates_take(
    model: Path, tmp_path: Path
) -> None:
    """Against the files of a real run: what is planned to be saved is what is saved, alignment aside."""
    for kind in KINDS:
        recipe = recipe_of(tmp_path / kind.replace(",", ""), model, kind, "run")
        _, run = train_here(recipe)
        folder = all_checkpoints(run.checkpoints)[0]
        work = work_of(load_recipe(recipe), has_gpu=False)
        adapter = load_file(folder / "adapter.safetensors")
        assert work.num_adapter_elements == sum(one.numel() for one in adapter.values()), kind
        saved = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
        told = next(one for one in read_journal(run.journal) if one["event"] == "adapter")
        assert told["parameters"] == work.num_adapter_elements
        # headers, and places aligned to 256 numbers in the optimiser's flat state
        most = 1 << 20
        assert work.checkpoint_bytes <= saved <= work.checkpoint_bytes + most, kind


def test_masters_alone_are_saved_where_nothing_is_averaged(model: Path, tmp_path: Path) -> None:
    _, run = train_here(write_recipe(tmp_path, model=model, train={"steps": 2}))
    names = {one.name for one in all_checkpoints(run.checkpoints)[0].iterdir()}
    assert names == {"adapter.safetensors", "optimizer.safetensors", "state.json"}
