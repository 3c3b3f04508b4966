"""The trainable delta: PEFT's LoRA on the linears of chosen roles, initialised by seed and name.

Attachment goes by the shape table, not by name patterns: the roles asked for give a list of modules, and PEFT must match
exactly these. Initial values come from a generator per tensor, so they do not depend on order, device or placement.

PEFT is imported when an adapter is made: importing it takes seconds, in which the base's blocks are read already.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outsize.base.errors import AdapterError
from outsize.base.table import ShapeTable

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

NAME = "default"  # PEFT's own name for the first adapter


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """rank and alpha as PEFT means them: the delta is alpha / rank x B A."""

    rank: int
    alpha: float
    roles: tuple[str, ...]


class Adapter:
    """LoRA matrices inside a model.

    parameters: "<module path>.lora_A" (rank, in) and ".lora_B" (out, rank), in table order, in the type they compute
    in. The optimiser keeps fp32 masters of its own where that type is smaller.
    """

    def __init__(self, module: nn.Module, table: ShapeTable, shape: AdapterShape) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        self.shape = shape
        self.paths = tuple(spec.module for spec in table.linears(shape.roles))
        if not self.paths:
            have = sorted({spec.role for spec in table.linears()})
            raise AdapterError(
                f"no linear has one of the roles {', '.join(shape.roles)}; this family has {', '.join(have)}"
            )
        pattern = "|".join(re.escape(path) for path in self.paths)
        config = LoraConfig(
            r=shape.rank, lora_alpha=shape.alpha, target_modules=pattern, lora_dropout=0.0
        )
        inject_adapter_in_model(config, module, adapter_name=NAME, low_cpu_mem_usage=True)
        self._layers = {path: _lora_layer(module, path) for path in self.paths}

    def materialise_(
        self, *, seed: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Give every matrix its initial value: A uniform as PEFT draws it, B zero.

        Returns the values in fp32 on the host, unrounded: the masters of training start from them.
        """
        initial: dict[str, Tensor] = {}
        for path, layer in self._layers.items():
            down, up = layer.lora_A[NAME], layer.lora_B[NAME]
            # PEFT: kaiming_uniform with a = sqrt(5), which is uniform within 1 / sqrt(fan_in)
            bound = 1 / math.sqrt(down.in_features)
            generator = torch.Generator().manual_seed(_seed(seed, path))
            values = torch.rand(down.weight.shape, generator=generator) * (2 * bound) - bound
            initial[f"{path}.lora_A"] = values
            initial[f"{path}.lora_B"] = torch.zeros(up.weight.shape)
            down.weight = nn.Parameter(values.to(device, dtype))
            up.weight = nn.Parameter(initial[f"{path}.lora_B"].to(device, dtype))
        return initial

    def parameters(self) -> dict[str, nn.Parameter]:
        """All matrices by name."""
        named = {}
        for path, layer in self._layers.items():
            named[f"{path}.lora_A"] = layer.lora_A[NAME].weight
            named[f"{path}.lora_B"] = layer.lora_B[NAME].weight
        return named

    def load_(self, values: dict[str, Tensor]) -> None:
        """Take values for all matrices.

        Raises: AdapterError naming every missing, unknown and misshapen one.
        """
        own = self.parameters()
        faults = [f"missing {name}" for name in own if name not in values]
        faults += [f"unknown {name}" for name in values if name not in own]
        faults += [
            f"{name} is {tuple(values[name].shape)}, not {tuple(own[name].shape)}"
            for name in own
            if name in values and values[name].shape != own[name].shape
        ]
        if faults:
            raise AdapterError(f"the adapter does not fit the model: {'; '.join(faults[:20])}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(values[name])

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within the block the model is the base alone, exactly."""
        for layer in self._layers.values():
            layer.enable_adapters(enabled=False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(enabled=True)

    @property
    def num_parameters(self) -> int:
        """Trainable numbers."""
        return sum(one.numel() for one in self.parameters().values())


def _lora_layer(module: nn.Module, path: str) -> LoraLayer:
    from peft.tuners.lora import LoraLayer

    layer = module.get_submodule(path)
    if not isinstance(layer, LoraLayer):
        raise AdapterError(f"PEFT attached nothing to {path}, a {type(layer).__name__}")
    return layer


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def delta_norms(values: dict[str, Tensor], paths: Sequence[str], scale: float) -> dict[str, float]:
    """Frobenius norm of scale x B A by module path, from the small products alone.

    |BA|^2 = trace(A A' B' B), so nothing of the weight's size is built.
    """
    norms = {}
    for path in paths:
        a, b = values[f"{path}.lora_A"].double(), values[f"{path}.lora_B"].double()
        norms[path] = scale * math.sqrt(max(float(((a @ a.T) * (b.T @ b).T).sum()), 0.0))
    return norms
