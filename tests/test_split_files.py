"""A recipe over the files that ComfyUI users have: one file for each model, in 8 bits, tokenizers wherever they are."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import adapter_of, train_here, write_recipe
from scaled_support import COMFYUI_OLD, quantised, save
from tiny import bfl_names, published_names, random_tensors, write_tiny
from torch import Tensor

from outsize.app.parts import parts_of
from outsize.app.planning import quantised_sources
from outsize.base.errors import SourceError
from outsize.families.protocol import FAMILIES
from outsize.recipes.load import load_recipe
from outsize.weights.locate import locate_folder, parse_hub_id

SLOTS = {
    "text_encoder": ("clip_text", "text_encoders/clip_l.safetensors"),
    "text_encoder_2": ("t5_text", "text_encoders/t5xxl_fp8_e4m3fn_scaled.safetensors"),
    "vae": ("autoencoder_kl", "vae/ae.safetensors"),
}
BASE = "diffusion_models/flux1-dev-fp8.safetensors"


def published(family: str, number: int) -> dict[str, Tensor]:
    """A tiny model's tensors under the names that are published in single files."""
    plugin: Any = FAMILIES.load(family)
    tensors = random_tensors(plugin.table("tiny"), number, torch.bfloat16)
    if family in ("flux1", "autoencoder_kl"):
        return bfl_names(family, tensors)
    return published_names(family, "tiny", tensors, number)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's folders twice: `scaled` in 8 bits, `exact` with the same numbers in fp32; and tokenizers."""
    root = tmp_path_factory.mktemp("comfyui")
    all_files = {BASE: "flux1"} | {file: family for family, file in SLOTS.values()}
    for number, (file, family) in enumerate(all_files.items()):
        tensors = published(family, number)
        scaled, exact = quantised(tensors, COMFYUI_OLD)
        if family in ("clip_text", "autoencoder_kl"):  # published in 16 bits
            scaled, exact = tensors, {name: one.float() for name, one in tensors.items()}
        save(root / "scaled" / file, scaled)
        save(root / "exact" / file, exact)
    write_tiny("flux1", "tiny", root / "tokenizers")
    return root


def recipe_of(files: Path, folder: Path, kind: str, **base: Any) -> Path:
    """A recipe that names each file; its tokenizers lie in a repository's folder."""
    components: dict[str, Any] = {
        slot: {"source": str(files / kind / file)} for slot, (_, file) in SLOTS.items()
    }
    for slot in ("text_encoder", "text_encoder_2"):
        components[slot]["tokenizer"] = str(files / "tokenizers")
    source = str(files / kind / BASE)
    return write_recipe(
        folder,
        "flux1",
        model=files,
        base={"source": source, "components": components, **base},
        train={"steps": 2, "learning_rate": 1.0e-2, "seed": 5, "exact": True},
    )


def test_training_on_split_files_in_8_bits_is_that_on_the_numbers_they_stand_for(
    files: Path, tmp_path: Path
) -> None:
    """From the recipe to the adapter, byte for byte: base, both text encoders and codec from single files."""
    found = []
    for kind in ("scaled", "exact"):
        _, run = train_here(recipe_of(files, tmp_path / kind, kind))
        found.append(adapter_of(run))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
    assert any(one.abs().max() > 0 for name, one in found[0].items() if "lora_B" in name)


def test_a_plan_counts_the_bytes_that_are_there(files: Path, tmp_path: Path) -> None:
    """8 bits are read in half the time that the table's 16 would take."""
    path = recipe_of(files, tmp_path, "scaled")
    found = quantised_sources(load_recipe(path))
    assert set(found) == {"base", "text_encoder_2"}
    assert found["base"].adopted == frozenset()
    size = (files / "scaled" / BASE).stat().st_size
    assert 0.7 * size < found["base"].source_bytes < size


def test_a_scale_that_is_not_understood_stops_the_plan(files: Path, tmp_path: Path) -> None:
    """Before anything is prepared."""
    shutil.copytree(files / "scaled", tmp_path / "scaled")
    scaled, _ = quantised(published("flux1", 0), COMFYUI_OLD)
    name = next(one for one in scaled if one.endswith(".scale_weight"))
    scaled[name.replace("scale_weight", "weight_offset")] = torch.zeros(1)
    save(tmp_path / "scaled" / BASE, scaled)
    (tmp_path / "tokenizers").mkdir()
    with pytest.raises(SourceError, match="weight_offset beside it"):
        quantised_sources(load_recipe(recipe_of(tmp_path, tmp_path / "r", "scaled")))


def test_a_single_file_without_a_tokenizer_says_where_to_name_one(
    files: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match="`tokenizer` of a component"):
        locate_folder(str(files / "scaled" / SLOTS["text_encoder_2"][1]), "tokenizer_2")
    folder = files / "tokenizers" / "tokenizer_2"
    assert locate_folder(str(files / "tokenizers"), "tokenizer_2") == folder
    assert locate_folder(str(folder), "tokenizer_2") == folder, "the folder itself"
    parts = parts_of(load_recipe(recipe_of(files, tmp_path, "scaled")))
    assert parts["text_encoder_2"].tokenizer_source == str(files / "tokenizers")


def test_a_tokenizer_leaves_the_numbers_of_earlier_runs_as_they_were(
    files: Path, tmp_path: Path
) -> None:
    """A recipe with components that says nothing of tokenizers resumes what was trained before there was the field."""
    component = {"text_encoder_2": {"source": "a/b"}}
    recipe = load_recipe(recipe_of(files, tmp_path, "scaled", components=component))
    dumped = recipe.to_json()["base"]["components"]["text_encoder_2"]
    assert dumped["tokenizer"] is None
    named = {"text_encoder_2": {"source": "a/b", "tokenizer": "c/d"}}
    other = load_recipe(recipe_of(files, tmp_path, "scaled", components=named))
    assert recipe.numbers_digest() != other.numbers_digest()
    from outsize.recipes.numbers import _without_unused_additions

    kept = _without_unused_additions(recipe, recipe.to_json())
    assert "tokenizer" not in kept["base"]["components"]["text_encoder_2"]


def test_a_tokenizer_beside_the_recipe_is_a_path(files: Path, tmp_path: Path) -> None:
    """As a source is: named as it lies from the recipe, or a hub id."""
    (tmp_path / "words").mkdir()
    named = {
        "text_encoder": {"tokenizer": "words"},
        "text_encoder_2": {"tokenizer": "google/t5-v1_1-xxl"},
    }
    parts = parts_of(load_recipe(recipe_of(files, tmp_path, "scaled", components=named)))
    assert parts["text_encoder"].tokenizer_source == str(tmp_path / "words")
    assert parts["text_encoder_2"].tokenizer_source == "google/t5-v1_1-xxl"


def test_a_revision_stands_behind_the_name_of_the_repository(files: Path, tmp_path: Path) -> None:
    """Also where the source is one file of it: the tokenizer is of the same revision as the weights."""
    part = parts_of(load_recipe(recipe_of(files, tmp_path, "scaled")))["text_encoder_2"]
    for source, named in (
        ("own/name/t5/x.safetensors", "own/name@v2/t5/x.safetensors"),
        ("own/name", "own/name@v2"),
    ):
        found = replace(part, source=source, revision="v2").named_source
        assert found == named
        assert parse_hub_id(found) is not None
