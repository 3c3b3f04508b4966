"""Yardstick: QLoRA steps of a 31B or 27B language model by the usual recipe, on one card, random weights.

The recipe is transformers' own class with bitsandbytes NF4 (double-quantised scales, bf16 products), peft with an adapter on
every linear of every layer, transformers' checkpointing of each layer, its own loss, fused AdamW. What it times is what
`outsize bench FAMILY.VARIANT --set data.pack=false` times of ours: rows of one document, full to the window, every token
trained, the same shapes, rank and number of rows, each step waited for, the median of some.

Nothing is downloaded, and no matrix exists in 16 bits as a whole model: each layer's linears are made on the card, quantised
there and dropped, so host memory stays at what importing takes. Every layer has its own bytes, as a real model's.

    python tools/lm_yardstick.py gemma4.31b qwen3_5.27b --windows 2048 8192
    python tools/lm_yardstick.py gemma4.tiny qwen3_5.tiny --windows 64 --device cpu --rank 4

One JSON line for each model and window: tokens a second, seconds of each step, peak bytes of the allocator, losses. Several
models run in processes of their own, one after another, so that none finds another's memory.

Needs: torch, transformers, bitsandbytes, peft; a card with bf16, or `--device cpu` to try it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import bitsandbytes as bnb
import peft
import torch
import transformers
from torch import Tensor, nn

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Model:
    """A published configuration. plain: ends of names of linears that stay in 16 bits and get no adapter."""

    cls: str
    config_cls: str
    config: dict[str, Any]
    plain: tuple[str, ...] = ("lm_head",)
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)


GEMMA = Model(
    cls="Gemma4ForCausalLM",
    config_cls="Gemma4TextConfig",
    config={
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "num_global_key_value_heads": 4,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(60)],
        "sliding_window": 1024,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    sizes={
        "31b": {},
        "tiny": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_global_key_value_heads": 1,
            "global_head_dim": 128,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "vocab_size": 640,
            "vocab_size_per_layer_input": 640,
        },
    },
)
QWEN = Model(
    cls="Qwen3_5ForCausalLM",
    config_cls="Qwen3_5TextConfig",
    config={
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(64)],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": False,
    },
    plain=("lm_head", "in_proj_a", "in_proj_b"),
    sizes={
        "27b": {},
        "tiny": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "vocab_size": 640,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
            },
        },
    },
)
MODELS = {"gemma4": GEMMA, "qwen3_5": QWEN}


def main() -> None:
    """Time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="FAMILY.VARIANT")
    parser.add_argument("--windows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--layers", type=int, help="fewer layers, to try it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vram-gib", type=float, help="cap the allocator, as a smaller card would")
    options = parser.parse_args()
    if len(options.models) > 1:
        for name in options.models:
            others = [one for one in sys.argv[1:] if one not in options.models]
            subprocess.run([sys.executable, __file__, name, *others], check=False)
        return
    device = torch.device(options.device)
    if options.vram_gib and device.type == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.vram_gib * GIB / whole)
    (name,) = options.models
    began = time.perf_counter()
    model = build(name, options.rank, options.layers, device)
    load_s = time.perf_counter() - began
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    for window in options.windows:
        told = {
            "what": "usual recipe",
            "base": name,
            "window": window,
            "batch": options.batch,
            "rank": options.rank,
            "adapter_M": round(sum(one.numel() for one in trained) / 1e6, 1),
            "load_s": round(load_s, 1),
            **measure(model, optimizer, window, options, device),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "versions": {one: importlib.metadata.version(one) for one in ("torch", "transformers", "bitsandbytes", "peft")},
        }  # fmt: skip
        print(json.dumps(told), flush=True)


def build(name: str, rank: int, num_layers: int | None, device: torch.device) -> nn.Module:
    """The model with its adapter, ready to train."""
    family, _, variant = name.partition(".")
    row = MODELS[family]
    values = {**row.config, **row.sizes[variant]}
    if num_layers is not None:
        values |= {
            "num_hidden_layers": num_layers,
            "layer_types": values["layer_types"][-num_layers:],
        }
    config = getattr(transformers, row.config_cls)(**values, use_cache=False)
    with torch.device("meta"):
        model = getattr(transformers, row.cls)._from_config(  # noqa: SLF001 - what from_pretrained calls
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    generator = torch.Generator(device).manual_seed(7)
    packed = list(pack_linears_(model, row.plain, device, generator))
    fill_rest_(model, device, generator)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # what peft.prepare_model_for_kbit_training does, without the token table and norms in fp32 (5 GiB of Gemma's)
    model.enable_input_require_grads()
    model.config.use_cache = False
    lora = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=packed, task_type="CAUSAL_LM")
    wrapped: Any = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    for one in wrapped.parameters():
        if one.requires_grad:
            one.data = one.data.to(device, torch.bfloat16)
    return wrapped.train()  # type: ignore[no-any-return]


def pack_linears_(
    model: nn.Module, plain: tuple[str, ...], device: torch.device, generator: torch.Generator
) -> Iterator[str]:
    """Replace each linear of the layers by one in 4 bits, one matrix at a time; their names."""
    for path, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or path.endswith(plain):
            continue
        shape = (linear.out_features, linear.in_features)
        weight = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        weight.mul_(linear.in_features**-0.5)
        with torch.device("meta"):
            new = bnb.nn.Linear4bit(
                *reversed(shape), bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
        new.weight = bnb.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True
        ).to(device)
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
        yield path


def fill_rest_(model: Any, device: torch.device, generator: torch.Generator) -> None:
    """Token table, head, norms and what else is small, in bf16, and buffers as transformers makes them."""
    tied = model.config.tie_word_embeddings
    for path, old in list(model.named_parameters()):
        if not old.is_meta or (tied and path == "lm_head.weight"):
            continue
        value = torch.ones(old.shape, dtype=torch.bfloat16, device=device)
        if old.ndim > 1:
            value.normal_(0, (old.numel() / old.shape[0]) ** -0.5, generator=generator)
        elif not path.endswith("weight"):
            value.zero_()  # A_log, dt_bias
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(value, requires_grad=False))
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)
    for path, old in list(model.named_buffers()):
        if not old.is_meta:
            continue
        parent, _, leaf = path.rpartition(".")
        owner = model.get_submodule(parent)
        if leaf == "embed_scale":
            value = torch.tensor(owner.scalar_embed_scale, device=device)
        elif leaf == "layer_scalar":
            value = torch.ones(old.shape, device=device, dtype=torch.bfloat16)
        else:
            raise SystemExit(f"no value known for {path}")
        setattr(owner, leaf, value)


def measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: int,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Seconds, tokens a second, peaks; or the fault that ended it."""
    is_card = device.type == "cuda"
    if is_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    vocabulary = int(model.get_submodule("base_model.model").config.vocab_size)  # type: ignore[union-attr,arg-type]
    generator = torch.Generator().manual_seed(7)
    seconds, losses = [], []
    try:
        for _ in range(options.warmup + options.steps):
            ids = torch.randint(0, vocabulary, (options.batch, window), generator=generator)
            began = time.perf_counter()
            losses.append(step(model, optimizer, ids.to(device)))
            if is_card:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError as error:
        return {"fault": " ".join(str(error).split())[:200]}
    step_s = statistics.median(seconds[options.warmup :])
    found = {
        "step_s": round(step_s, 4),
        "steps_s": [round(one, 4) for one in seconds[options.warmup :]],
        "first_step_s": round(seconds[0], 2),
        "tokens_per_s": round(options.batch * window / step_s, 1),
        "losses": [round(float(one), 4) for one in losses],
    }
    if is_card:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """One update on all tokens of some rows; transformers shifts the labels itself."""
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()  # type: ignore[no-untyped-call] # torch's own
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


if __name__ == "__main__":
    main()
