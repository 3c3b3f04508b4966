"""`outsize resize` on a trained run and on files, through the real command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from run_support import outsize, train_here, write_recipe
from safetensors.torch import load_file
from test_combine import deltas

from outsize.app.adapter_files import read_adapter, recognised_adapter


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resize")
    recipe = write_recipe(folder, "flux2")
    train_here(recipe)
    return folder


def test_a_runs_adapter_is_written_at_a_lower_rank_and_the_stated_loss_is_that_of_the_file(
    trained: Path,
) -> None:
    whole, low = trained / "whole.safetensors", trained / "low.safetensors"
    assert (
        outsize("export", trained / "recipe.yaml", "--to", "kohya", "--out", whole).returncode == 0
    )
    told = outsize("resize", trained / "runs" / "run", "--rank", "2", "--to", "kohya", "--out", low)
    assert told.returncode == 0, told.stderr
    before, after = (deltas(read_adapter(one, "flux2", "tiny").weights) for one in (whole, low))
    norm = sum(float(one.square().sum()) for one in before.values()) ** 0.5
    lost = sum(float((after[name] - one).square().sum()) for name, one in before.items()) ** 0.5
    assert f"{lost / norm:.4%} of the deltas' norm lost" in told.stdout
    assert "rank 2 to 2" in told.stdout
    assert 0.001 < lost / norm < 0.9


def test_a_file_is_resized_without_a_recipe_in_its_own_dialect(trained: Path) -> None:
    """Into a PEFT folder as well, whose configuration then names the ranks of single modules."""
    whole = trained / "own.safetensors"
    assert (
        outsize("export", trained / "recipe.yaml", "--to", "comfyui", "--out", whole).returncode
        == 0
    )
    low = trained / "own-low.safetensors"
    told = outsize("resize", whole, "--energy", "0.999", "--out", low)
    assert told.returncode == 0, told.stderr
    assert "as comfyui" in told.stdout
    assert set(load_file(low)) == set(load_file(whole))
    found = recognised_adapter(low)
    told = outsize("resize", low, "--rank", "1", "--to", "peft", "--out", trained / "peft")
    assert told.returncode == 0, told.stderr
    config = json.loads((trained / "peft" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["r"] == 1
    one = recognised_adapter(trained / "peft")
    assert set(one.weights.pairs) == set(found.weights.pairs)
    for name, delta in deltas(found.weights).items():
        values = torch.linalg.svdvals(delta)
        left = float((deltas(one.weights)[name] - delta).norm())
        assert left == pytest.approx(float(values[1:].norm()), abs=1e-6)


def test_what_cannot_be_resized_is_told(trained: Path) -> None:
    nothing = trained / "nothing.safetensors"
    for arguments, complaint in (
        (["recipe.yaml", "--out", nothing], "name a rank, or the share"),
        (["none.safetensors", "--rank", "2", "--out", nothing], "none.safetensors"),
        (
            ["own.safetensors", "--rank", "2", "--base", "flux1.tiny", "--out", nothing],
            "it is an adapter of flux2.tiny",
        ),
        (
            ["own.safetensors", "--rank", "2", "--base", "flux1", "--out", nothing],
            "names no variant",
        ),
    ):
        told = outsize("resize", *arguments, cwd=trained)
        assert told.returncode in {2, 9}, told.stderr
        assert complaint in told.stderr
        assert "Traceback" not in told.stderr
    assert not nothing.exists()
