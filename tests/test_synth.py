"""Random checkpoints: of the real names and shapes, the same for a seed, read by their own library and by us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_support import outsize, write_pictures
from safetensors.torch import load_file
from tiny_tokenizers import TOKENIZERS

from outsize.app import synth as subject
from outsize.app.synth import models_of, synthesise
from outsize.base.errors import DoesNotFit, RecipeError, SourceError
from outsize.base.journal import read_journal
from outsize.devices.protocol import open_device
from outsize.families.protocol import FAMILIES
from outsize.weights import checkpoint_writer
from outsize.weights.locate import locate_weights
from outsize.weights.source import Source

REDUCED = (
    ("flux2", "dev@2+6"),
    ("flux2", "klein-4b@1+3"),
    ("flux1", "dev@3+1"),
    ("mistral3_text", "small-24b@4"),
    ("qwen3_text", "8b@12"),
    ("t5_text", "xxl@2"),
)


def write(path: Path, name: str = "flux2.tiny", *, seed: int = 0, shard_bytes: int = 10**9) -> Path:
    """A random checkpoint with all its parts."""
    family, _, variant = name.partition(".")
    models = models_of(family, variant, path, has_parts=True)
    synthesise(models, path, seed=seed, shard_bytes=shard_bytes, device=open_device("cpu"))
    return path


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of all shards."""
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


# ---------------------------------------------------------------- reduced depth


@pytest.mark.parametrize(("family", "variant"), REDUCED)
def test_a_reduced_table_equals_upstreams_module_of_that_depth(family: str, variant: str) -> None:
    """Same widths, fewer blocks: upstream's class, built from the reduced config, has exactly these tensors."""
    plugin: Any = FAMILIES.load(family)
    table, module = plugin.table(variant), plugin.build(variant)
    ours = {spec.name: spec.shape for spec in table}
    theirs = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    assert ours == {
        name: shape for name, shape in theirs.items() if name in ours or "rotary" not in name
    }
    assert len(plugin.block_paths(variant)) == table.num_blocks
    whole = plugin.table(variant.partition("@")[0])
    assert table.num_blocks < whole.num_blocks
    shapes = {spec.shape for spec in whole}
    assert {spec.shape for spec in table} <= shapes, "widths stay"


def test_a_reduced_config_states_its_depth() -> None:
    dev: Any = FAMILIES.load("flux2")
    config = dev.config("dev@2+6")
    assert (config["num_layers"], config["num_single_layers"]) == (2, 6)
    assert config | {"num_layers": 8, "num_single_layers": 48} == dev.config("dev")
    text: Any = FAMILIES.load("mistral3_text")
    assert text.config("small-24b@4") == text.config("small-24b") | {"num_hidden_layers": 4}
    assert dev.components("dev@2+6@4")[0].variant == "small-24b@4"
    assert dev.components("dev@2+6") == dev.components("dev")


@pytest.mark.parametrize("depth", ["", "0+1", "9+1", "2", "2+6+1", "a+b", "2+6@", "-1+2"])
def test_a_depth_that_cannot_be_is_refused_with_the_real_one(depth: str) -> None:
    with pytest.raises(RecipeError, match="8 double blocks and 48 single blocks"):
        FAMILIES.load("flux2").table(f"dev@{depth}")


def test_what_has_no_depth_says_so() -> None:
    with pytest.raises(RecipeError, match="no depth to reduce"):
        FAMILIES.load("autoencoder_kl_flux2").table("flux2@2")
    with pytest.raises(RecipeError, match="no text encoder of its own"):
        FAMILIES.load("mistral3_text").table("small-24b@4@2")


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("base", ["flux1.tiny", "flux2.tiny", "flux2.tiny-klein"])
def test_every_part_is_written_as_its_family_reads_it(tmp_path: Path, base: str) -> None:
    """Also the layers above those that are read are there, in bf16, and the index holds every name."""
    path = write(tmp_path / "x", base, shard_bytes=200_000)
    family, _, variant = base.partition(".")
    for model in models_of(family, variant, path, has_parts=True):
        with Source(locate_weights(str(path), sub_folder=model.folder.name)) as source:
            mapped = source.locate(
                model.family.layouts(model.variant), model.family.table(model.variant)
            )
            assert len(mapped.extra) == len(model.published.unread)
            assert {info.dtype for info in source.tensors.values()} <= {"BF16", "F32", "I64"}
            for spec in model.family.table(model.variant):
                is_buffer = spec.role == "buffer"
                assert (mapped.info(spec.name).dtype == "BF16") is not is_buffer
        config = json.loads((model.folder / "config.json").read_text(encoding="utf-8"))
        assert model.published.upstream in {
            config.get("_class_name"),
            *config.get("architectures", ()),
        }
    index = json.loads(next((path / "transformer").glob("*.index.json")).read_text())
    assert index["weight_map"].keys() == tensors_in(path / "transformer").keys()
    assert all(
        size < 210_000 for size in (f.stat().st_size for f in path.rglob("*.safetensors")) if size
    )


def test_diffusers_reads_it_as_its_own(tmp_path: Path) -> None:
    """from_pretrained takes folder, shards and config, and finds every tensor where it expects it."""
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

    path = write(tmp_path / "x", shard_bytes=200_000)
    model, told = Flux2Transformer2DModel.from_pretrained(
        path / "transformer", output_loading_info=True, torch_dtype=torch.bfloat16
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored = tensors_in(path / "transformer")
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    codec = AutoencoderKLFlux2.from_pretrained(path / "vae")
    assert bool((codec.bn.running_var == 1).all())


def test_factors_of_whole_layers_are_one(tmp_path: Path) -> None:
    """Gemma has one for each layer; with 0 nothing of a model would be left."""
    stored = tensors_in(write(tmp_path / "x", "gemma4.tiny"))
    factors = [value for name, value in stored.items() if name.endswith("layer_scalar")]
    assert len(factors) == 4
    assert all(bool((value == 1).all()) for value in factors)


def test_values_are_those_of_the_seed_whatever_shards_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "PIECE_BYTES", 16384)  # several pieces for each tensor
    first = tensors_in(write(tmp_path / "a") / "transformer")
    monkeypatch.setattr(subject, "MAX_THREADS", 1)
    again = tensors_in(write(tmp_path / "b", shard_bytes=10**5) / "transformer")
    other = tensors_in(write(tmp_path / "c", seed=1) / "transformer")
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "transformer_blocks.0.ff.linear_in.weight"
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace(".0.", ".1.")])
    halves = first[name].float().flatten().chunk(2)
    assert not torch.equal(*halves)
    for half in halves:
        assert float(half.std()) == pytest.approx(0.02, rel=0.05)
        assert abs(float(half.mean())) < 0.001
    assert bool((first["transformer_blocks.0.attn.norm_q.weight"] == 1).all())


def test_a_folder_in_use_and_a_full_disk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x")
    with pytest.raises(SourceError, match="holds something already"):
        write(path)
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DoesNotFit, match="1000 B free"):
        write(tmp_path / "y")


def test_an_error_leaves_no_file_that_looks_whole(tmp_path: Path) -> None:
    def fail(piece: checkpoint_writer.Piece) -> memoryview:
        if piece.tensor.name == "b":
            raise ValueError(piece.tensor.name)
        return memoryview(bytes(4))

    tensors = [checkpoint_writer.NewTensor(name, "F32", (1,)) for name in "ab"]
    with pytest.raises(ValueError, match="b"):
        checkpoint_writer.write_checkpoint(
            tmp_path, "x", tensors, fail, shard_bytes=100, num_threads=2
        )
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the whole way


def test_synth_plan_prepare_and_train_by_command(tmp_path: Path) -> None:
    """What is measured on a big machine, at a size that takes seconds, in reduced depth."""
    said = outsize("synth", "flux2.tiny@1+2@2", tmp_path / "model", "--parts")
    assert said.returncode == 0, said.stderr
    TOKENIZERS["mistral3_text"](tmp_path / "model" / "tokenizer")
    write_pictures(tmp_path / "pictures")
    recipe = {
        "name": "run",
        "base": {"family": "flux2", "variant": "tiny@1+2@2", "source": str(tmp_path / "model")},
        "data": {"resolution": 64, "sets": [{"folder": "pictures"}]},
        "adapter": {"rank": 2},
        "train": {"steps": 2, "learning_rate": 1.0e-3},
        "compare": {"prompts": ["a red picture"], "steps": 2},
        "cache": "cache",
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    for command in ("plan", "prepare", "train"):
        said = outsize(command, path, *(("--device", "cpu") if command != "plan" else ()))
        assert said.returncode == 0, said.stdout + said.stderr
    events = list(read_journal(tmp_path / "runs" / "run" / "journal.jsonl"))
    assert sum(event["event"] == "step" for event in events) == 2
    stores = {folder.name.rpartition("-")[0] for folder in (tmp_path / "cache").glob("*-*")}
    assert "flux2-tiny_1_2_2-base" in stores
