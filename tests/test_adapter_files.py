"""Adapters from files of any client: strictly, under our paths, and the base that they are of is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_dialects import TINY, adapter_for, deltas

from outsize.app.adapter_files import (
    Found,
    Worn,
    fused_with,
    parse_worn,
    read_adapter,
    read_worn,
    recognised_adapter,
)
from outsize.base.errors import AdapterError, RecipeError
from outsize.base.layout import Layout
from outsize.dialects.protocol import DIALECTS, AdapterWeights
from outsize.export.export import export_adapter
from outsize.families.protocol import FAMILIES


def written(
    folder: Path, family: str, variant: str, dialect: str, *, stated: str | None = None, **how: Any
) -> Path:
    """An adapter in a file as the client writes it: our header is taken out unless it is to be there."""
    is_folder = DIALECTS.load(dialect).is_folder
    target = folder / (f"{family}-{dialect}" + ("" if is_folder else ".safetensors"))
    adapter = adapter_for(family, variant, **how)
    layouts = FAMILIES.load(family).layouts(variant)
    export_adapter(adapter, dialect, layouts, target, {"base": stated or f"{family}.{variant}"})
    tensors = target / "adapter_model.safetensors" if is_folder else target
    if stated is None:
        save_file(load_file(tensors), tensors)
    return target


def assert_same(found: Found, wanted: AdapterWeights) -> None:
    got, expected = deltas(found.weights), deltas(wanted)
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dialect", DIALECTS.names())
@pytest.mark.parametrize(("family", "variant"), TINY)
def test_a_file_of_any_client_is_read_without_being_told_what_it_is(
    family: str, variant: str, dialect: str, tmp_path: Path
) -> None:
    path = written(tmp_path, family, variant, dialect, alpha=2.0)
    found = read_adapter(path, family, variant)
    assert_same(found, adapter_for(family, variant, alpha=2.0))
    assert len(found.digest) == 64


@pytest.mark.parametrize("dialect", ["comfyui", "kohya", "diffusers", "peft"])
def test_an_adapter_of_another_base_is_refused_with_that_bases_name(
    dialect: str, tmp_path: Path
) -> None:
    path = written(tmp_path, "flux1", "tiny", dialect)
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, "flux2", "tiny")
    assert "is no adapter of flux2.tiny; it is an adapter of flux1.tiny" in str(caught.value)


def test_an_adapter_of_another_size_of_the_same_family_is_told_by_its_shapes(
    tmp_path: Path,
) -> None:
    """A file of klein is no file of dev: names are the same, rows are not; every shape is named."""
    path = written(tmp_path, "flux2", "klein-4b", "comfyui", rank=1, blocks=1)
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, "flux2", "dev")
    message = str(caught.value)
    assert "it is an adapter of flux2.klein-4b" in message
    assert (
        "transformer_blocks.0.attn.to_q: is for a weight of 3072 x 3072, the base's is 6144 x 6144"
        in message
    )
    num_modules = len(adapter_for("flux2", "klein-4b", rank=1, blocks=1).pairs)
    assert f"{num_modules} of {num_modules} modules do not fit" in message


def test_every_module_that_is_not_there_is_named_and_one_outside_the_blocks_is_told_apart(
    tmp_path: Path,
) -> None:
    tensors = {}
    for module in (
        "transformer_blocks.0.attn.to_qq",
        "x_embedder",
        "transformer_blocks.0.attn.to_q",
    ):
        tensors[f"transformer.{module}.lora_A.weight"] = torch.ones(1, 64)
        tensors[f"transformer.{module}.lora_B.weight"] = torch.ones(64, 1)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(AdapterError) as caught:
        read_adapter(tmp_path / "x.safetensors", "flux2", "tiny")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("is no adapter of flux2.tiny: 2 of 3 modules do not fit:")
    assert lines[1].strip() == "transformer_blocks.0.attn.to_qq: no such module"
    assert lines[2].strip() == "x_embedder: lies outside the blocks, where no adapter is attached"
    assert len(lines) == 3


def test_a_file_that_no_dialect_knows_says_what_it_looks_like(tmp_path: Path) -> None:
    save_file({"diffusion_model.x.lokr_w1": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(
        AdapterError, match=r"as in diffusion_model\.x\.lokr_w1; low-rank pairs are read"
    ):
        read_adapter(tmp_path / "x.safetensors", "flux2", "tiny")


@pytest.mark.parametrize("place", ["model.", "model.language_model.", "language_model.model.", ""])
def test_a_language_adapter_is_read_wherever_its_class_keeps_the_decoder(
    place: str, tmp_path: Path
) -> None:
    ours = adapter_for_language()
    named = {name.replace("model.", place, 1): pair for name, pair in ours.pairs.items()}
    export_adapter(
        AdapterWeights(named, ours.rank, ours.alpha), "peft", (Layout("client"),),
        tmp_path / "x", {"base": "llama.tiny"},
    )  # fmt: skip
    found = read_adapter(tmp_path / "x", "llama", "tiny")
    assert_same(found, ours)
    assert set(found.names.values()) == set(named)


def adapter_for_language() -> AdapterWeights:
    from test_dialects import pair

    table = FAMILIES.load("llama").table("tiny")
    pairs = {s.module: pair(s.shape[1], s.shape[0], 2, n) for n, s in enumerate(table.linears())}
    return AdapterWeights(pairs, 2, 4.0)


def test_the_base_of_a_file_is_recognised_by_its_modules_or_its_header(tmp_path: Path) -> None:
    """The tiny variants are for tests and no answer where a real one fits; dev and schnell have the same shapes."""
    for family, variant, base in (
        ("flux2", "klein-4b", "flux2.klein-4b"),
        ("flux1", "dev", "flux1.dev"),
        ("flux2", "tiny", "flux2.tiny"),
    ):
        path = written(tmp_path / base, family, variant, "kohya", rank=1, blocks=1)
        assert recognised_adapter(path).base == base
    path = written(tmp_path, "flux1", "schnell", "kohya", rank=1, blocks=1, stated="flux1.schnell")
    assert recognised_adapter(path).base == "flux1.schnell"
    save_file(
        {
            "transformer.x.lora_A.weight": torch.ones(1, 3),
            "transformer.x.lora_B.weight": torch.ones(3, 1),
        },
        tmp_path / "x.safetensors",
    )
    with pytest.raises(AdapterError, match="fits no base that there is; name a recipe"):
        recognised_adapter(tmp_path / "x.safetensors")


def test_a_folder_of_diffusers_is_its_one_file_and_a_folder_of_several_is_refused(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "folder"
    written(folder, "flux2", "tiny", "diffusers")
    assert_same(read_adapter(folder, "flux2", "tiny"), adapter_for("flux2", "tiny"))
    written(folder, "flux2", "tiny", "kohya")
    with pytest.raises(
        AdapterError, match=r"flux2-diffusers\.safetensors, flux2-kohya\.safetensors"
    ):
        read_adapter(folder, "flux2", "tiny")


def test_a_weight_stands_behind_the_last_colon(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b:c.safetensors", "d:0.5"):
        (tmp_path / name).write_bytes(b"")
    assert parse_worn(f"{tmp_path}/a.safetensors") == Worn(tmp_path / "a.safetensors")
    assert parse_worn(f"{tmp_path}/a.safetensors:0.8") == Worn(tmp_path / "a.safetensors", 0.8)
    assert parse_worn(f"{tmp_path}/a.safetensors:-1") == Worn(tmp_path / "a.safetensors", -1.0)
    assert parse_worn(f"{tmp_path}/b:c.safetensors") == Worn(tmp_path / "b:c.safetensors")
    with pytest.raises(RecipeError, match="no such adapter"):
        parse_worn(f"{tmp_path}/none.safetensors:0.8")
    with pytest.raises(RecipeError, match="the weight is nan"):
        parse_worn(f"{tmp_path}/a.safetensors:nan")


def test_several_files_of_different_clients_are_added_by_weight(tmp_path: Path) -> None:
    first = written(tmp_path, "flux1", "tiny", "kohya", alpha=2.0)
    second = written(tmp_path, "flux1", "tiny", "peft", rank=2, alpha=2.0)
    got = deltas(read_worn([Worn(first, 0.5), Worn(second, -2.0)], "flux1", "tiny"))
    one, other = (deltas(adapter_for("flux1", "tiny", rank=rank, alpha=2.0)) for rank in (4, 2))
    for name in one:
        assert torch.equal(got[name], 0.5 * one[name] - 2 * other[name])


def test_a_part_that_is_zero_in_a_fused_matrix_is_told_from_one_that_is_missing() -> None:
    layouts = FAMILIES.load("flux1").layouts("tiny")
    assert fused_with("transformer_blocks.0.attn.to_k", ["transformer_blocks.0.attn.to_q"], layouts)
    assert not fused_with(
        "transformer_blocks.0.attn.to_k", ["transformer_blocks.1.attn.to_q"], layouts
    )
    assert not fused_with(
        "transformer_blocks.0.ff.net.2", ["transformer_blocks.0.attn.to_q"], layouts
    )
