"""A tiny base with an adapter that is not zero, and the loss of one step over it."""

from __future__ import annotations

from typing import Any

import torch
from engine_support import TinyBase
from torch import Tensor

from outsize.adapters.adapter import Adapter, AdapterShape
from outsize.layers.model import FrozenModel


def attach(base: TinyBase, model: FrozenModel) -> Adapter:
    """Rank 4 on attention and feed-forward, B away from zero, so that A gets a gradient as well."""
    table = base.family.table(base.variant)
    adapter = Adapter(model.module, table, AdapterShape(4, 8.0, ("attention", "mlp")))
    adapter.materialise_(seed=3, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, one in adapter.parameters().items():
            if name.endswith("lora_B"):
                one.copy_(torch.randn(one.shape, generator=generator) * 0.02)
    return adapter


def loss_of(base: TinyBase, model: FrozenModel, inputs: dict[str, Any]) -> Tensor:
    """Of a training step that begins here, towards a fixed random target."""
    target = torch.randn(inputs["noisy_BCHW"].shape, generator=torch.Generator().manual_seed(5))
    model.begin("train")
    predicted: Tensor = base.family.predict(base.variant, model.module, **inputs)
    return (predicted - target).square().mean()
