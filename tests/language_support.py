"""Tiny language models beside their twins in transformers, rows of documents, and the loss of a step over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from engine_support import TinyBase
from torch import Tensor, nn

from outsize.adapters.adapter import Adapter, AdapterShape
from outsize.families.protocol import FAMILIES
from outsize.layers.model import FrozenModel

NAMES = ("gemma4", "llama", "mistral3", "qwen3_5")
ROLES = ("attention", "mlp", "linear_attention")
FP32 = ("plain", {"dtype": "fp32"})


def upstream_class(family: str) -> Any:
    """The class of transformers that a family says it is published as."""
    import transformers

    plugin: Any = FAMILIES.load(family)
    return getattr(transformers, plugin.published("tiny").upstream)


def upstream_model(family: str, tensors: Mapping[str, Tensor]) -> Any:
    """That class as transformers makes it, with these weights; nothing of ours is in it."""
    plugin: Any = FAMILIES.load(family)
    made = upstream_class(family)
    model = made(made.config_class(**plugin.config("tiny"))).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.requires_grad_(False)


def rows(lengths: Sequence[Sequence[int]], *, seed: int = 0, padding: int = 0) -> dict[str, Tensor]:
    """One packed row for each list of documents' lengths, all equally long; labels are the next token of the document."""
    generator = torch.Generator().manual_seed(seed)
    keys = ("input_ids", "labels", "position_ids", "segments")
    found: dict[str, list[Tensor]] = {key: [] for key in keys}
    for documents in lengths:
        parts: dict[str, list[Tensor]] = {key: [] for key in keys}
        for number, length in enumerate(documents):
            ids = torch.randint(0, 640, (length,), generator=generator)
            parts["input_ids"].append(ids)
            parts["labels"].append(torch.cat([ids[1:], torch.tensor([-100])]))
            parts["position_ids"].append(torch.arange(length))
            parts["segments"].append(torch.full((length,), number))
        for key, value in zip(keys, (0, -100, 0, -1), strict=True):
            parts[key].append(torch.full((padding,), value))
            found[key].append(torch.cat(parts[key]))
    return {key: torch.stack(one) for key, one in found.items()}


def separate(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Every document of a packed batch as a row of its own, in order."""
    return [
        {key: one[row : row + 1, segments == number] for key, one in batch.items()}
        for row, segments in enumerate(batch["segments"])
        for number in range(int(segments.max()) + 1)
    ]


def logits_of(base: TinyBase, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, T, V), plainly: the whole of them."""
    hidden = base.family.hidden(
        base.variant, module, batch["input_ids"], batch["position_ids"], batch["segments"]
    )
    weight, softcap = base.family.head(base.variant, module)
    logits = hidden @ weight.T
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def loss_of(base: TinyBase, model: FrozenModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean over the trained tokens of a step that begins here."""
    model.begin("train")
    logits = logits_of(base, model.module, batch)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def attach(base: TinyBase, model: FrozenModel) -> Adapter:
    """Rank 4 on every role, B away from zero, so that A gets a gradient as well."""
    roles = {spec.role for spec in base.family.table(base.variant).linears()}
    shape = AdapterShape(4, 8.0, tuple(role for role in ROLES if role in roles))
    adapter = Adapter(model.module, base.family.table(base.variant), shape)
    adapter.materialise_(seed=3, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, one in adapter.parameters().items():
            if name.endswith("lora_B"):
                one.copy_(torch.randn(one.shape, generator=generator) * 0.02)
    return adapter
