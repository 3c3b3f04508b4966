"""Names of an exported adapter's modules: those of the class that opens the source, asked of transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from text_run_support import write_text_recipe
from torch import nn

from outsize.app.text_naming import naming_of
from outsize.families.protocol import FAMILIES
from outsize.recipes.load import load_recipe

CLASSES = {
    "gemma4": ["Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"],
    "llama": ["LlamaForCausalLM"],
    "mistral3": ["Mistral3ForConditionalGeneration", "MistralForCausalLM"],
    "qwen3_5": ["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"],
}
CASES = [(family, name) for family, names in CLASSES.items() for name in names]


def upstream(family: str, name: str) -> nn.Module:
    """The class with the tiny text part, on meta; towers as they are by default."""
    import transformers

    plugin: Any = FAMILIES.load(family)
    made: Any = getattr(transformers, name)
    values = plugin.config("tiny")
    config_class = made.config_class
    if "ForConditional" in name:
        config = config_class()
        own = type(config.get_text_config())
        config.text_config = own(**values)
    else:
        config = config_class(**values)
    with torch.device("meta"):
        model: nn.Module = made(config)
    return model


@pytest.mark.parametrize(("family", "name"), CASES)
def test_every_adapted_linear_is_a_module_of_the_class_that_opens_the_source(
    family: str, name: str, tmp_path: Path
) -> None:
    """Elsewhere an adapter under other names loads and does nothing."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": [name]}), encoding="utf-8")
    naming = naming_of(load_recipe(write_text_recipe(tmp_path, family, model=model)))
    assert naming.named_for == name
    modules = dict(upstream(family, name).named_modules())
    plugin: Any = FAMILIES.load(family)
    for spec in plugin.table("tiny").linears():
        path = naming.path_of(spec.module)
        assert isinstance(modules.get(path), nn.Linear), path
        assert tuple(modules[path].weight.shape) == spec.shape
