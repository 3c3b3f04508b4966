"""What is wrong with a quantised checkpoint, or is no such checkpoint at all: named whole, with the reason and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prepare_support import LAYOUTS
from quantised_support import (
    STATE,
    altered,
    as_state,
    packing_of,
    source_of,
    state_of,
    tensors_in,
    want,
    write_plain,
    write_quantised,
)
from safetensors.torch import save_file
from torch import Tensor

from outsize.base.errors import SourceError
from outsize.base.table import ShapeTable, TensorSpec
from outsize.formats._packing import assign
from outsize.formats.protocol import make_format
from outsize.weights.locate import locate_weights
from outsize.weights.source import Source

pytest.importorskip("bitsandbytes", exc_type=ImportError)

FAMILY = "mistral3"
ONE = "model.layers.1.mlp.up_proj.weight"  # (128, 64): 128 scales
Change = dict[str, Tensor | None]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the same model in bf16 ("plain"), in nf4 ("single", "double") and in fp4 ("fp4")."""
    folder = tmp_path_factory.mktemp("mistral")
    plain = write_plain(FAMILY, folder / "plain")
    write_quantised(FAMILY, plain, folder / "single", is_double=False)
    write_quantised(FAMILY, plain, folder / "double", is_double=True)
    write_quantised(FAMILY, plain, folder / "fp4", is_double=False, bnb_4bit_quant_type="fp4")
    return folder


@pytest.fixture(scope="module")
def parts(root: Path) -> dict[str, Tensor]:
    """The parts of one matrix with double scales, by the end of their names; "" is the codes."""
    return {
        name.removeprefix(ONE): one
        for name, one in tensors_in(root / "double").items()
        if name.startswith(ONE)
    }


def refused(folder: Path, name: str = "nf4", **options: object) -> str:
    """The message with which a checkpoint is refused."""
    with source_of(folder) as source, pytest.raises(SourceError) as caught:
        want(source, FAMILY, folder, packing_of(FAMILY, name, **options))
    return str(caught.value)


# ---------------------------------------------------------------- states


def with_json(parts: dict[str, Tensor], **values: Any) -> Change:
    """The JSON with other values; None takes one out."""
    state = state_of(parts[f".{STATE}"]) | values
    return {f"{ONE}.{STATE}": as_state({k: v for k, v in state.items() if v is not None})}


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Change], str]] = {
    "no scales": (lambda _: {f"{ONE}.absmax": None}, "lacks absmax"),
    "no weight": (
        lambda _: {ONE: None},
        "is not there, absmax, nested_absmax, nested_quant_map, quant_map, quant_state.bitsandbytes__nf4 of it are",
    ),
    "no state": (
        lambda parts: {f"{ONE}{end}": None for end in parts if end},
        "is 4-bit bytes without a quantisation state",
    ),
    "no JSON": (lambda _: {f"{ONE}.{STATE}": None}, "lacks quant_state.bitsandbytes__*"),
    "not packed": (
        lambda _: {ONE: torch.zeros(128, 64, dtype=torch.bfloat16)},
        "is BF16 and not packed, yet absmax,",
    ),
    "too few scales": (
        lambda parts: {f"{ONE}.absmax": parts[".absmax"][:5]},
        "has 5 U8 in .absmax, expected 128 U8",
    ),
    "scales of another type": (
        lambda parts: {f"{ONE}.absmax": parts[".absmax"].float()},
        "has 128 F32 in .absmax, expected 128 U8",
    ),
    "too few codes": (
        lambda parts: {ONE: parts[""][:-8]},
        "has shape [4088, 1] in U8, expected the 4-bit codes of [128, 64]",
    ),
    "half of the nested state": (
        lambda _: {f"{ONE}.nested_absmax": None},
        "lacks nested_absmax\n",
    ),
    "no nested state": (
        lambda _: {f"{ONE}.nested_absmax": None, f"{ONE}.nested_quant_map": None},
        "lacks nested_absmax, nested_quant_map, of which its state speaks",
    ),
    "nested state unsaid": (
        lambda parts: with_json(parts, nested_blocksize=None),
        "has nested_absmax, nested_quant_map, of which its state says nothing",
    ),
    "another nested group": (
        lambda parts: with_json(parts, nested_blocksize=512),
        "has a scale for each 512 of its scales",
    ),
    "another group": (
        lambda parts: (
            with_json(parts, blocksize=128) | {f"{ONE}.absmax": parts[".absmax"][:64].clone()}
        ),
        "is in groups of 128, not of 64: no option has them",
    ),
    "another shape": (
        lambda parts: with_json(parts, shape=[64, 128]),
        "has shape [64, 128] in its state, expected [128, 64]",
    ),
    "another type in the JSON": (
        lambda parts: with_json(parts, quant_type="fp4"),
        "is fp4 in its state, nf4 in the state's name",
    ),
    "other values of the codes": (
        lambda parts: {f"{ONE}.quant_map": parts[".quant_map"] * 0.9},
        "has a quant_map whose values are not those of nf4",
    ),
    "two states": (
        lambda parts: {f"{ONE}.{STATE}"[:-3] + "fp4": parts[f".{STATE}"].clone()},
        "has several states (quant_state.bitsandbytes__fp4, quant_state.bitsandbytes__nf4)",
    ),
    "no JSON in the JSON": (
        lambda _: {f"{ONE}.{STATE}": torch.zeros(20, dtype=torch.uint8)},
        "that cannot be read",
    ),
    "an offset that is no number": (
        lambda parts: with_json(parts, nested_offset=float("nan")),
        "that cannot be read (ValueError('offset nan'))",
    ),
    "a type that is not decoded to": (
        lambda parts: with_json(parts, dtype="float64"),
        "is to be decoded to float64",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_state_that_does_not_fit_is_named(
    root: Path, parts: dict[str, Tensor], tmp_path: Path, damage: str
) -> None:
    change, fault = DAMAGE[damage]
    message = refused(altered(root / "double", tmp_path / "x", change(parts)))
    assert f"  {ONE} " in message
    assert fault in message
    assert "matrices in 4 bits that cannot be taken as they are" in message
    assert message.endswith("which any format can be made of.")


def test_all_faulty_states_are_named_at_once(root: Path, tmp_path: Path) -> None:
    """Another fault in each layer, one of them in all: one error, numbered names drawn together."""
    names = [f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in range(3) for kind in "qk"]
    change: Change = {f"{name}.absmax": None for name in names}
    change["model.layers.0.mlp.down_proj.weight"] = None
    change["model.layers.2.mlp.up_proj.weight.nested_quant_map"] = None
    message = refused(altered(root / "double", tmp_path / "x", change))
    assert "in 4 bits (8):" in message
    for line in (
        "  model.layers.{0..2}.self_attn.q_proj.weight (3) lacks absmax",
        "  model.layers.{0..2}.self_attn.k_proj.weight (3) lacks absmax",
        "  model.layers.0.mlp.down_proj.weight is not there",
        "  model.layers.2.mlp.up_proj.weight lacks nested_quant_map",
    ):
        assert line in message, message


def test_fp4_is_refused_by_name(root: Path) -> None:
    message = refused(root / "fp4")
    assert "model.layers.{0..2}.mlp.up_proj.weight (3) is fp4, which nf4 cannot take" in message


@pytest.mark.parametrize(
    ("kind", "name", "options", "reason"),
    [
        ("double", "int4", {}, "is nf4, which int4 cannot take: set `format` to nf4"),
        ("double", "plain", {}, "is nf4, which plain cannot take: set `format` to nf4"),
        ("double", "nf4", {"group": 32}, "is in groups of 64, not of 32: set `group` to 64"),
        ("double", "nf4", {"scales": "fp16"}, "fp16 would round: set `scales` to fp32 or double"),
        ("single", "nf4", {"scales": "double"}, "double would round: set `scales` to fp32"),
    ],
)
def test_a_format_that_is_not_the_files_own_is_refused_with_the_remedy(
    root: Path, kind: str, name: str, options: dict[str, object], reason: str
) -> None:
    message = refused(root / kind, name, **options)
    assert reason in message
    assert "in 4 bits (21):" in message
    assert (
        "Change the format in the recipe where a line says how; else take the model's bf16 files"
        in message
    )


def test_matrices_fused_with_others_are_not_cut(tmp_path: Path) -> None:
    """A layout whose file holds queries and keys in one: the codes could be cut, their scales of scales not."""
    specs = (
        TensorSpec("b.0.q.weight", (4, 64), "attention", 0, is_linear=True),
        TensorSpec("b.0.k.weight", (4, 64), "attention", 0, is_linear=True),
    )
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 64]}
    name = "model.blocks.0.qk.weight"
    tensors = {
        name: torch.zeros(256, 1, dtype=torch.uint8),
        f"{name}.absmax": torch.ones(8),
        f"{name}.quant_map": torch.zeros(16),
        f"{name}.{STATE}": as_state(state),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    packing = assign(ShapeTable(specs), make_format("nf4"), make_format("plain"))
    with (
        Source([tmp_path / "x.safetensors"]) as source,
        pytest.raises(SourceError, match="together with others, which cannot be cut apart"),
    ):
        source.locate(LAYOUTS, ShapeTable(specs), packing.adopts)


# ---------------------------------------------------------------- kinds that are not read


def foreign(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """The message with which a folder of these tensors is refused."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return refused(folder)


def parts_of(*ends: str, weight: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors of one linear with these ends of names, and its weight in a type."""
    linear = "model.layers.0.mlp.up_proj"
    found = {f"{linear}.{end}": torch.zeros(4, 4, dtype=torch.int32) for end in ends}
    return found if weight is None else {f"{linear}.weight": torch.zeros(4, 4).to(weight)} | found


NAMED: dict[str, dict[str, Tensor]] = {
    "AWQ": parts_of("qweight", "qzeros", "scales"),
    "GPTQ": parts_of("qweight", "qzeros", "scales", "g_idx"),
    "HQQ": parts_of("W_q", "scale", "zero"),
    "EXL2": parts_of("q_weight", "q_scale", "q_invperm"),
    "EXL3": parts_of("trellis", "mcg"),
    "MLX": parts_of("scales", "biases", weight=torch.uint32),
    "NVFP4": parts_of("weight_scale", "weight_scale_2", weight=torch.uint8),
    "MXFP4": {
        f"model.layers.0.mlp.experts.up_{end}": torch.zeros(4) for end in ("blocks", "scales")
    },
    "compressed-tensors": parts_of("weight_packed", "weight_scale", "weight_shape"),
    "FP8 in blocks": parts_of("weight_scale_inv", weight=torch.float8_e4m3fn),
    "bitsandbytes 8-bit": parts_of("SCB", weight=torch.int8),
}


@pytest.mark.parametrize("kind", NAMED)
def test_kinds_that_are_not_read_are_known_by_their_names(tmp_path: Path, kind: str) -> None:
    message = foreign(tmp_path / "x", NAMED[kind], {})
    assert f"is quantised as {kind}, which is not read" in message
    assert "take the bf16 files" in message
    assert "\n" not in message, "one sentence"


STATED: dict[str, dict[str, Any]] = {
    "AWQ": {"quantization_config": {"quant_method": "awq", "bits": 4}},
    "GPTQ": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "AutoRound": {"quantization_config": {"quant_method": "auto-round"}},
    "HQQ": {"text_config": {"quantization_config": {"quant_method": "hqq"}}},
    "EXL2": {"quantization_config": {"quant_method": "exl2"}},
    "MLX": {"quantization": {"group_size": 64, "bits": 4}},
    "FP8 in blocks": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    },
    "NVFP4 (ModelOpt)": {
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    },
    "NVFP4 (compressed-tensors)": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
        }
    },
    "torchao": {"quantization_config": {"quant_method": "torchao"}},
    "bitsandbytes 8-bit": {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}
    },
}


@pytest.mark.parametrize("kind", STATED)
def test_kinds_that_are_not_read_are_known_by_their_config(tmp_path: Path, kind: str) -> None:
    message = foreign(tmp_path / "x", {"model.layers.0.x": torch.zeros(1)}, STATED[kind])
    assert f"is quantised as {kind}, which is not read" in message
    assert "\n" not in message, "one sentence"


def test_float8_scaled_in_an_unknown_way_is_not_taken_for_a_plain_cast(
    root: Path, tmp_path: Path
) -> None:
    """Every name and shape fits; the scales, under a name that nobody knows, would be left out."""
    tensors = tensors_in(root / "plain")
    name = "model.layers.0.mlp.up_proj.weight"
    scaled = {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_factor": torch.ones(1)}
    config = {"quantization_config": {"quant_method": "fp8"}}
    message = foreign(tmp_path / "x", tensors | scaled, config)
    assert "is quantised as FP8, which is not read" in message


def test_gguf_is_refused_as_a_file_and_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "m-Q4_K_M.gguf").write_bytes(b"GGUF")
    for source in (tmp_path, tmp_path / "m-Q4_K_M.gguf", Path("owner/name/m.gguf")):
        with pytest.raises(SourceError, match="is quantised as GGUF, which is not read") as caught:
            locate_weights(str(source), offline=True)
        assert "take the bf16 files" in str(caught.value)


# ---------------------------------------------------------------- another model, shards, an index


def sharded(root: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """The bf16 model in three shards with an index, and where the index places each tensor."""
    folder.mkdir()
    tensors = tensors_in(root / "plain")
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    places = {name: names[number * 3 // len(tensors)] for number, name in enumerate(tensors)}
    for shard in names:
        save_file({n: one for n, one in tensors.items() if places[n] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    return folder, places


def test_a_checkpoint_of_another_family_is_called_by_its_name(root: Path, tmp_path: Path) -> None:
    """Most names are the same in all families of transformers; what the config says tells them apart."""
    tensors = {
        name.replace("self_attn", "attention"): one
        for name, one in tensors_in(root / "plain").items()
    }
    config = {"architectures": ["OtherForCausalLM"]}
    message = foreign(tmp_path / "x", tensors, config)
    assert "missing (12 of" in message
    assert (
        "check `family` and `variant` in the recipe (its config.json says OtherForCausalLM)"
        in message
    )
    message = foreign(tmp_path / "y", {"transformer.h.0.w": torch.zeros(1)}, config)
    assert "This looks like another model (its config.json says OtherForCausalLM)" in message


def test_a_shard_that_the_index_names_and_nobody_has(root: Path, tmp_path: Path) -> None:
    folder, _ = sharded(root, tmp_path / "x")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SourceError, match=r"1 are missing: model-00002-of-00003\.safetensors"):
        locate_weights(str(folder))


def test_a_tensor_that_the_index_places_where_it_is_not(root: Path, tmp_path: Path) -> None:
    folder, places = sharded(root, tmp_path / "x")
    shard = places[ONE]
    there = tensors_in(root / "plain")
    save_file(
        {n: there[n] for n, place in places.items() if place == shard and n != ONE}, folder / shard
    )
    message = refused(folder)
    assert message.splitlines()[-1] == (
        f"model.safetensors.index.json names shards that lack what it places there: {ONE} is not in {shard}. "
        "Download these shards again."
    )


def test_a_shard_that_the_index_does_not_name(root: Path, tmp_path: Path) -> None:
    folder, places = sharded(root, tmp_path / "x")
    shard = places[ONE]
    index = folder / "model.safetensors.index.json"
    known = {name: place for name, place in places.items() if place != shard}
    index.write_text(json.dumps({"weight_map": known}), encoding="utf-8")
    assert f"model.safetensors.index.json does not name {shard}" in refused(folder)
