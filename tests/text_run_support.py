"""A whole recipe of text on disk: tiny language model as transformers saves it, tokenizer, conversations, YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from language_support import upstream_model
from tiny_tokenizers import write_qwen

from outsize.families.protocol import FAMILIES

_COLOURS = ("red", "green", "blue", "yellow")
_ANIMALS = ("cat", "dog", "bird")


def write_language(folder: Path, family: str = "llama", *, seed: int = 7) -> Path:
    """The tiny variant as transformers writes it, in bf16, with a tokenizer that knows turns."""
    plugin: Any = FAMILIES.load(family)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in plugin.table("tiny"):
        noise = torch.randn(spec.shape, generator=generator)
        is_scale = spec.role == "norm" and not spec.name.endswith("bias")
        is_scale = is_scale or spec.name.endswith("layer_scalar")
        tensors[spec.name] = (1 + 0.1 * noise if is_scale else 0.08 * noise).bfloat16()
    upstream_model(family, tensors).to(torch.bfloat16).save_pretrained(folder)
    write_qwen(folder)
    return folder


def write_talks(path: Path, count: int = 24) -> Path:
    """Conversations of one or two turns about animals, one a line."""
    lines = []
    for number in range(count):
        colour = _COLOURS[number % len(_COLOURS)]
        animal = _ANIMALS[number % len(_ANIMALS)]
        messages = [
            {"role": "user", "content": f"a photo of the {animal} {number}"},
            {"role": "assistant", "content": f"the {animal} an {colour} picture"},
        ]
        lines.append(json.dumps({"messages": messages * (1 + number % 2)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_text_recipe(
    folder: Path, family: str = "llama", *, model: Path | None = None, **changes: Mapping[str, Any]
) -> Path:
    """A recipe for the tiny variant; sections in `changes` are merged over the defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    model = write_language(folder / "model", family) if model is None else model
    if not (folder / "talks.jsonl").exists():
        write_talks(folder / "talks.jsonl")
    recipe: dict[str, Any] = {
        "name": "run",
        "base": {"family": family, "variant": "tiny", "source": str(model)},
        "data": {"sets": [{"path": "talks.jsonl"}], "window": 128, "held_out": 0.2},
        "adapter": {"rank": 4},
        "train": {"steps": 6, "learning_rate": 1.0e-2, "seed": 5, "exact": True},
        "checkpoints": {"every": 2, "keep": 20},
        "evaluate": {"every": 2},
        "compare": {"prompts": ["a red cat"], "controls": ["the dog"], "max_tokens": 8},
        "cache": "cache",
    }
    for section, values in changes.items():
        old = recipe.get(section)
        recipe[section] = {**old, **values} if isinstance(old, dict) else values
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path
