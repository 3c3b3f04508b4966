"""Tiny models in the layouts that real ones are published in, for every test that reads a checkpoint.

    folder = write_tiny("flux2", "tiny", tmp_path)                   # a diffusers repository
    folder = write_tiny("flux2", "tiny", tmp_path, layout="bfl")     # flux2-tiny.safetensors, ae.safetensors, ...

Weights are random but seeded, of sizes at which activations neither die nor explode. Neither diffusers nor transformers
is imported, so that a model takes a tenth of a second. Names and shapes come from our tables, which test_families.py and
test_conditioners.py hold equal to upstream's; BFL's names are written out here, apart from our layouts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tiny_tokenizers import TOKENIZERS

from outsize.base.table import TensorSpec
from outsize.families.protocol import FAMILIES

LayoutName = Literal["diffusers", "bfl"]

_CLASSES = {
    "flux1": "FluxTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "autoencoder_kl": "AutoencoderKL",
    "autoencoder_kl_flux2": "AutoencoderKLFlux2",
    "clip_text": "CLIPTextModel",
    "t5_text": "T5EncoderModel",
    "mistral3_text": "Mistral3ForConditionalGeneration",
    "qwen3_text": "Qwen3ForCausalLM",
}
_MODEL_TYPES = {"clip_text": "clip_text_model", "t5_text": "t5", "qwen3_text": "qwen3"}


def write_tiny(
    family: str,
    variant: str,
    path: Path,
    *,
    layout: LayoutName = "diffusers",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    num_shards: int = 1,
) -> Path:
    """Write a base with all its conditioners, tokenizers and scheduler below `path`; give that folder.

    layout: "diffusers" is the folder of a hub repository. "bfl" has the base and the codec as single files
    (`<family>-<variant>.safetensors`, `ae.safetensors`), text encoders and tokenizers in folders as before. dtype:
    of all floating tensors but running statistics, which are fp32. num_shards: of the base's weights, with an index.
    """
    base: Any = FAMILIES.load(family)
    path.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(base.table(variant), seed, dtype)
    if layout == "bfl":
        save_file(bfl_names(family, tensors), path / f"{family}-{variant}.safetensors")
    else:
        folder = path / "transformer"
        _write_config(folder, _CLASSES[family], base.config(variant))
        _save(tensors, folder, "diffusion_pytorch_model", num_shards)
    for number, component in enumerate(base.components(variant), start=1):
        write_tiny_component(
            component.family,
            component.variant,
            path,
            slot=component.slot,
            tokenizer=component.tokenizer,
            layout=layout,
            seed=seed + number,
            dtype=dtype,
        )
    _write_config(
        path / "scheduler",
        "FlowMatchEulerDiscreteScheduler",
        scheduler_config(family, variant),
        name="scheduler_config.json",
    )
    _write_index(base, family, variant, path)
    return path


def scheduler_config(family: str, variant: str) -> dict[str, Any]:
    """What the published scheduler_config.json says; the other values are diffusers' defaults."""
    is_shifted = variant not in {"schnell", "teaching"}
    config: dict[str, Any] = {
        "num_train_timesteps": 1000,
        "shift": 3.0 if is_shifted else 1.0,
        "use_dynamic_shifting": is_shifted,
    }
    line = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256}
    return config | line | {"max_image_seq_len": 4096} if family == "flux1" else config


def write_tiny_component(
    family: str,
    variant: str,
    path: Path,
    *,
    slot: str,
    tokenizer: str | None = None,
    layout: LayoutName = "diffusers",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write one conditioner to `path/slot` (and `path/tokenizer`); give the folder or file of its weights."""
    plugin: Any = FAMILIES.load(family)
    tensors = published_names(
        family, variant, random_tensors(plugin.table(variant), seed, dtype), seed
    )
    if tokenizer is not None:
        TOKENIZERS[family](path / tokenizer)
    if layout == "bfl" and tokenizer is None:
        save_file(bfl_names(family, tensors), path / "ae.safetensors")
        return path / "ae.safetensors"
    folder = path / slot
    is_text = tokenizer is not None
    _write_config(folder, _CLASSES[family], _published_config(family, plugin.config(variant)))
    _save(tensors, folder, "model" if is_text else "diffusion_pytorch_model", 1)
    return folder


def random_tensors(
    specs: Iterable[TensorSpec], seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Seeded weights by name: linears and convolutions of unit gain, norms near one, statistics as of real pictures."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: _random_tensor(spec, generator, dtype) for spec in specs}


def _random_tensor(
    spec: TensorSpec, generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    if not spec.shape:
        return torch.tensor(7)  # BatchNorm's count of batches
    values = torch.randn(spec.shape, generator=generator)
    if spec.role == "buffer":
        return values.square() + 0.5 if spec.name.endswith("var") else 0.3 * values
    if len(spec.shape) == 1:
        is_scale = spec.role == "norm" and spec.name.endswith("weight")
        return (0.1 * values + (1.0 if is_scale else 0.0)).to(dtype)
    gain = 0.5 if "embed" in spec.name and not spec.is_linear else math.prod(spec.shape[1:]) ** -0.5
    return (gain * values).to(dtype)


def published_names(
    family: str, variant: str, tensors: Mapping[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """A conditioner's tensors as its repository holds them, with those that nobody reads."""
    if family == "clip_text":
        return {f"text_model.{name}": tensor for name, tensor in tensors.items()}
    if family == "t5_text":
        shared = tensors["encoder.embed_tokens.weight"]
        rest = {name: one for name, one in tensors.items() if "embed_tokens" not in name}
        return {"shared.weight": shared, **rest}
    if family not in ("mistral3_text", "qwen3_text"):
        return dict(tensors)
    whole = dict(tensors) | unread_tensors(family, variant, tensors, seed)
    decoder = "language_model.model." if family == "mistral3_text" else "model."
    head = "language_model." if family == "mistral3_text" else ""
    named = {
        (head if name == "lm_head.weight" else decoder) + name: tensor
        for name, tensor in whole.items()
    }
    if family == "mistral3_text":
        named["vision_tower.patch_conv.weight"] = torch.zeros(8, 3, 2, 2)
        named["multi_modal_projector.linear_1.weight"] = torch.zeros(8, 8)
    return named


def unread_tensors(
    family: str, variant: str, tensors: Mapping[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """What lies above the last layer of a decoder that is read: more layers, the final norm, the head."""
    plugin: Any = FAMILIES.load(family)
    config, num_read = plugin.config(variant), len(plugin.block_paths(variant))
    width, dtype = config["hidden_size"], tensors["embed_tokens.weight"].dtype
    layer = [spec for spec in plugin.table(variant) if spec.name.startswith("layers.0.")]
    specs = [
        TensorSpec(spec.name.replace("layers.0.", f"layers.{i}.", 1), spec.shape, spec.role)
        for i in range(num_read, config["num_hidden_layers"])
        for spec in layer
    ]
    specs.append(TensorSpec("norm.weight", (width,), "norm"))
    specs.append(TensorSpec("lm_head.weight", (config["vocab_size"], width), "head"))
    return random_tensors(specs, seed + 1000, dtype)


def _published_config(family: str, config: dict[str, Any]) -> dict[str, Any]:
    if family == "mistral3_text":
        return {"model_type": "mistral3", "text_config": {"model_type": "mistral", **config}}
    return ({"model_type": _MODEL_TYPES[family]} if family in _MODEL_TYPES else {}) | config


def _write_config(
    folder: Path, upstream: str, config: Mapping[str, Any], name: str = "config.json"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    is_transformers = upstream.endswith(("Generation", "LM", "TextModel", "EncoderModel"))
    head = {"architectures": [upstream]} if is_transformers else {"_class_name": upstream}
    (folder / name).write_text(json.dumps(head | dict(config), indent=2), encoding="utf-8")


def _write_index(base: Any, family: str, variant: str, path: Path) -> None:
    entries: dict[str, Any] = {
        "_class_name": {"flux1": "FluxPipeline", "flux2": "Flux2Pipeline"}.get(family, family),
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", _CLASSES.get(family, family)],
    }
    for one in base.components(variant):
        library = "transformers" if one.kind == "text" else "diffusers"
        entries[one.slot] = [library, _CLASSES[one.family]]
    (path / "model_index.json").write_text(json.dumps(entries, indent=2), encoding="utf-8")


def _save(tensors: Mapping[str, torch.Tensor], folder: Path, stem: str, num_shards: int) -> None:
    if num_shards == 1:
        save_file(dict(tensors), folder / f"{stem}.safetensors")
        return
    names = list(tensors)
    weight_map = {}
    for k in range(num_shards):
        file = f"{stem}-{k + 1:05}-of-{num_shards:05}.safetensors"
        chosen = names[k::num_shards]
        save_file({name: tensors[name] for name in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


# Ours -> theirs, as diffusers' converters spell it, written out in the other direction.
_TRANSFORMER_NAMES = (
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^time_(text|guidance)_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
    (r"^time_(text|guidance)_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
    (r"^time_(text|guidance)_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
    (r"^time_(text|guidance)_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
    (r"(stream_modulation\w*)\.linear", r"\1.lin"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks", "double_blocks"),
    (r"^single_transformer_blocks", "single_blocks"),
    (r"(double_blocks\.\d+)\.norm1\.linear", r"\1.img_mod.lin"),
    (r"(double_blocks\.\d+)\.norm1_context\.linear", r"\1.txt_mod.lin"),
    (r"(double_blocks\.\d+)\.attn\.norm_q\.weight", r"\1.img_attn.norm.query_norm.scale"),
    (r"(double_blocks\.\d+)\.attn\.norm_k\.weight", r"\1.img_attn.norm.key_norm.scale"),
    (r"(double_blocks\.\d+)\.attn\.norm_added_q\.weight", r"\1.txt_attn.norm.query_norm.scale"),
    (r"(double_blocks\.\d+)\.attn\.norm_added_k\.weight", r"\1.txt_attn.norm.key_norm.scale"),
    (r"(double_blocks\.\d+)\.attn\.to_out\.0", r"\1.img_attn.proj"),
    (r"(double_blocks\.\d+)\.attn\.to_add_out", r"\1.txt_attn.proj"),
    (r"(double_blocks\.\d+)\.ff\.(net\.0\.proj|linear_in)", r"\1.img_mlp.0"),
    (r"(double_blocks\.\d+)\.ff\.(net\.2|linear_out)", r"\1.img_mlp.2"),
    (r"(double_blocks\.\d+)\.ff_context\.(net\.0\.proj|linear_in)", r"\1.txt_mlp.0"),
    (r"(double_blocks\.\d+)\.ff_context\.(net\.2|linear_out)", r"\1.txt_mlp.2"),
    (r"(single_blocks\.\d+)\.attn\.norm_q\.weight", r"\1.norm.query_norm.scale"),
    (r"(single_blocks\.\d+)\.attn\.norm_k\.weight", r"\1.norm.key_norm.scale"),
    (r"(single_blocks\.\d+)\.norm\.linear", r"\1.modulation.lin"),
    (r"(single_blocks\.\d+)\.(proj_out|attn\.to_out)", r"\1.linear2"),
    (r"(single_blocks\.\d+)\.attn\.to_qkv_mlp_proj", r"\1.linear1"),
)
_FUSED = (
    (r"double_blocks\.\d+\.", "attn.", ("to_q", "to_k", "to_v"), "img_attn.qkv"),
    (r"double_blocks\.\d+\.", "attn.", ("add_q_proj", "add_k_proj", "add_v_proj"), "txt_attn.qkv"),
    (r"single_blocks\.\d+\.", "", ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "linear1"),
)
_CODEC_NAMES = (
    (r"^quant_conv", "encoder.quant_conv"),
    (r"^post_quant_conv", "decoder.post_quant_conv"),
    (r"conv_norm_out", "norm_out"),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0\.group_norm", "mid.attn_1.norm"),
    (r"mid_block\.attentions\.0\.to_out\.0", "mid.attn_1.proj_out"),
    (r"mid_block\.attentions\.0\.to_([qkv])", r"mid.attn_1.\1"),
    (r"down_blocks\.(\d+)\.resnets", r"down.\1.block"),
    (r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample"),
    (r"up_blocks\.(\d+)\.resnets", r"up.\1.block"),
    (r"up_blocks\.(\d+)\.upsamplers\.0", r"up.\1.upsample"),
    (r"conv_shortcut", "nin_shortcut"),
)


def bfl_names(family: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A base's or codec's tensors as Black Forest Labs' single file holds them."""
    return _bfl_codec(tensors) if family.startswith("autoencoder") else _bfl_base(tensors)


def _renamed(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _bfl_base(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {_renamed(name, _TRANSFORMER_NAMES): tensor for name, tensor in tensors.items()}
    for name in [one for one in named if "adaLN" in one]:
        scale, shift = named[name].chunk(2)
        named[name] = torch.cat([shift, scale])
    for at, prefix, parts, fused in _FUSED:
        pattern = rf"({at}){re.escape(prefix + parts[0])}\.(weight|bias)"
        for match in [m for m in (re.fullmatch(pattern, one) for one in list(named)) if m]:
            slabs = [named.pop(f"{match[1]}{prefix}{part}.{match[2]}") for part in parts]
            named[f"{match[1]}{fused}.{match[2]}"] = torch.cat(slabs)
    return named


def _bfl_codec(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    num_levels = 1 + max(
        int(m[1]) for m in (re.match(r"decoder\.up_blocks\.(\d+)", one) for one in tensors) if m
    )
    named = {}
    for name, tensor in tensors.items():
        theirs = _renamed(name, _CODEC_NAMES)
        theirs = re.sub(r"(?<=\.up\.)\d+", lambda m: str(num_levels - 1 - int(m[0])), theirs)
        is_attention = re.search(r"attn_1\.(q|k|v|proj_out)\.weight", theirs)
        named[theirs] = tensor[:, :, None, None].clone() if is_attention else tensor
    return named
