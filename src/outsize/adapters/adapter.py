"""The trainable delta: PEFT's LoRA or DoRA on the linears of chosen roles, initialised by seed and name.

Attachment goes by the shape table: roles and rules give a list of modules with their ranks, and PEFT must match exactly
these. Initial values come from a generator per tensor, so they do not depend on order, device or placement.

With DoRA (arXiv 2402.09353) each row of W + BA is brought to a learned length; `_dora.py` computes it over a weight that
is packed, with PEFT's gradients.

PEFT is imported when an adapter is made: importing it takes seconds, in which the base's blocks are read already.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from outsize.base.errors import AdapterError
from outsize.base.table import ShapeTable

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

NAME = "default"  # PEFT's own name for the first adapter


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """rank and alpha as PEFT means them: the delta is alpha / rank x B A.

    ranks: other ranks and alphas by module path; rank 0: none. scaling: what alpha is divided by.
    """

    rank: int
    alpha: float
    roles: tuple[str, ...]
    ranks: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    scaling: Literal["rank", "sqrt_rank"] = "rank"
    kind: Literal["lora", "dora"] = "lora"

    def of(self, path: str) -> tuple[int, float]:
        """Rank and alpha of a module."""
        return self.ranks.get(path, (self.rank, self.alpha))


class Adapter:
    """LoRA matrices inside a model.

    parameters: "<module path>.lora_A" (rank, in) and ".lora_B" (out, rank), in table order, in the type they compute
    in; with DoRA ".magnitude" (out) as well, in fp32: the steps that it learns by are finer than bf16. The optimiser keeps
    fp32 masters of its own where a type is smaller. shown: within its block, the adapter computes with the weights that are
    to be shown, where those that are trained are others; who trains sets it.
    """

    def __init__(self, module: nn.Module, table: ShapeTable, shape: AdapterShape) -> None:
        from peft import inject_adapter_in_model

        self.shape = shape
        self.shown: Callable[[], AbstractContextManager[None]] = nullcontext
        self.paths = tuple(
            spec.module for spec in table.linears(shape.roles) if shape.of(spec.module)[0]
        )
        if not self.paths:
            have = sorted({spec.role for spec in table.linears()})
            raise AdapterError(
                f"no linear has one of the roles {', '.join(shape.roles)}; this family has {', '.join(have)}"
            )
        inject_adapter_in_model(
            _config(self.paths, shape), module, adapter_name=NAME, low_cpu_mem_usage=True
        )
        self._layers = {path: _lora_layer(module, path) for path in self.paths}
        if shape.kind == "dora":
            from outsize.adapters._dora import use_packed_weights_

            for layer in self._layers.values():
                use_packed_weights_(layer, NAME)

    @property
    def needs_row_squares(self) -> bool:
        """Whether `materialise_` must be told the squared lengths of the frozen matrices' rows."""
        return self.shape.kind == "dora"

    def scale_of(self, path: str) -> float:
        """What a module's BA is multiplied with."""
        rank, alpha = self.shape.of(path)
        return alpha / (math.sqrt(rank) if self.shape.scaling == "sqrt_rank" else rank)

    def materialise_(
        self,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        row_squares: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Give every matrix its initial value: A uniform as PEFT draws it, B zero, magnitudes the lengths of W's rows.

        row_squares: for DoRA, by module path, the squared length of each row of W (out), fp32.
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
            if self.needs_row_squares:
                from outsize.adapters._dora import begin_

                assert row_squares is not None, "magnitudes begin as the lengths of W's rows"
                initial[f"{path}.magnitude"] = begin_(layer, NAME, row_squares[path].to(device))
        return initial

    def parameters(self) -> dict[str, nn.Parameter]:
        """All matrices by name."""
        named = {}
        for path, layer in self._layers.items():
            named[f"{path}.lora_A"] = layer.lora_A[NAME].weight
            named[f"{path}.lora_B"] = layer.lora_B[NAME].weight
            if self.needs_row_squares:
                named[f"{path}.magnitude"] = layer.lora_magnitude_vector[NAME].weight
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

    @contextmanager
    def neutral(self) -> Iterator[None]:
        """Within the block every B is zero and every magnitude that of W: the base, exactly, run with the adapter's code."""
        named = {key: one for key, one in self.parameters().items() if not key.endswith(".lora_A")}
        kept = {key: one.detach().clone() for key, one in named.items()}
        with torch.no_grad():
            for one in named.values():
                one.zero_()
            if self.needs_row_squares:
                from outsize.adapters._dora import reset_

                for layer in self._layers.values():
                    reset_(layer, NAME)
        try:
            yield
        finally:
            with torch.no_grad():
                for key, one in named.items():
                    one.copy_(kept[key])

    @property
    def num_parameters(self) -> int:
        """Trainable numbers."""
        return sum(one.numel() for one in self.parameters().values())


def _config(paths: tuple[str, ...], shape: AdapterShape) -> Any:
    """PEFT's configuration. A module of another rank is named by a pattern of its own, which PEFT matches at the end."""
    from peft import LoraConfig

    ranks = {path: shape.of(path) for path in paths}
    odd = {path: one for path, one in ranks.items() if one != (shape.rank, shape.alpha)}
    return LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules="|".join(re.escape(path) for path in paths),
        rank_pattern={f"^{re.escape(path)}": rank for path, (rank, _) in odd.items()},
        alpha_pattern={f"^{re.escape(path)}": alpha for path, (_, alpha) in odd.items()},
        use_rslora=shape.scaling == "sqrt_rank",
        use_dora=shape.kind == "dora",
        lora_dropout=0.0,
    )


def _lora_layer(module: nn.Module, path: str) -> LoraLayer:
    from peft.tuners.lora import LoraLayer

    layer = module.get_submodule(path)
    if not isinstance(layer, LoraLayer):
        raise AdapterError(f"PEFT attached nothing to {path}, a {type(layer).__name__}")
    return layer


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def delta_norms(values: dict[str, Tensor], scales: Mapping[str, float]) -> dict[str, float]:
    """Frobenius norm of scale x B A by module path, from the small products alone.

    |BA|^2 = trace(A A' B' B), so nothing of the weight's size is built.
    """
    norms = {}
    for path, scale in scales.items():
        a, b = values[f"{path}.lora_A"].double(), values[f"{path}.lora_B"].double()
        norms[path] = scale * math.sqrt(max(float(((a @ a.T) * (b.T @ b).T).sum()), 0.0))
    return norms
