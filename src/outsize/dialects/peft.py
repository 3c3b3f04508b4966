"""A PEFT folder: `adapter_model.safetensors` under `base_model.model.<our module>` and `adapter_config.json`.

alpha stays a number of the configuration, so both factors are written as they were trained; rsLoRA's root of the rank is in
it, since not every program that reads such folders asks for `use_rslora`. The modules are named by
one regular expression that PEFT matches in full: entries of a list would match every module whose path ends like them,
so that an adapter on `proj_out` would also wrap `blocks.0.proj_out`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.base.errors import AdapterError
from outsize.base.layout import Layout
from outsize.dialects._factors import (
    num_claimed,
    read_factors,
    scaled,
    write_factors,
    write_lengths,
)
from outsize.dialects.protocol import AdapterFile, AdapterWeights, JsonFile, LoraPair, TensorFile

_PREFIX = "base_model.model."
_TENSORS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class PeftDialect:
    """PEFT's folder."""

    is_folder: bool = True

    def write(
        self,
        adapter: AdapterWeights,
        layouts: Sequence[Layout],  # noqa: ARG002 - PEFT uses upstream's names, which are ours
        metadata: Mapping[str, str],
    ) -> dict[str, AdapterFile]:
        """Give the two files; see the protocol."""
        tensors = write_factors(adapter.pairs, _PREFIX) | write_lengths(adapter, _PREFIX)
        return {
            _TENSORS: TensorFile(tensors, dict(metadata)),
            _CONFIG: JsonFile(_config(adapter, metadata)),
        }

    def read(
        self,
        files: Mapping[str, AdapterFile],
        layouts: Sequence[Layout],  # noqa: ARG002
    ) -> AdapterWeights:
        """Give the adapter; ranks and alphas of single modules that differ in scale are multiplied into their B."""
        tensors, config = files.get(_TENSORS), files.get(_CONFIG)
        if not isinstance(tensors, TensorFile) or not isinstance(config, JsonFile):
            raise AdapterError(
                f"a PEFT adapter is {_TENSORS} and {_CONFIG}; got {', '.join(sorted(files))}"
            )
        rank, alpha = _plain_lora(config.value)
        found = read_factors(tensors.tensors, _PREFIX)
        if bool(config.value.get("use_dora")) != bool(found.lengths):
            raise AdapterError(
                f"{_CONFIG} says use_dora: {config.value.get('use_dora', False)}, but {_TENSORS} has lengths of rows for "
                f"{len(found.lengths)} of {len(found.pairs)} modules"
            )
        pairs = {name: scaled(pair, found.scales[name]) for name, pair in found.pairs.items()}
        return AdapterWeights(
            {
                module: _rescaled(module, pair, config.value, alpha / rank)
                for module, pair in pairs.items()
            },
            rank,
            alpha,
            found.lengths,
        )

    def claims(self, keys: Sequence[str]) -> int:
        """Keys of its kind."""
        return num_claimed(keys, _PREFIX)


def _config(adapter: AdapterWeights, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What `LoraConfig.from_pretrained` reads; fields left out have PEFT's defaults."""
    odd = {
        f"^{re.escape(m)}": pair.rank
        for m, pair in sorted(adapter.pairs.items())
        if pair.rank != adapter.rank
    }
    return {
        "peft_type": "LORA",
        "task_type": metadata.get("outsize.task"),
        "base_model_name_or_path": metadata.get("outsize.source"),
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": bool(adapter.lengths),
        "target_modules": "|".join(re.escape(module) for module in sorted(adapter.pairs)),
        "rank_pattern": odd,
        "alpha_pattern": {module: adapter.scale * rank for module, rank in odd.items()},
    }


def _plain_lora(config: Any) -> tuple[int, float]:
    """Rank and alpha of a configuration that says no more than what our adapters hold."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{_CONFIG} does not describe a LoRA adapter")
    unheld = [
        key for key in ("lora_bias", "modules_to_save", "target_parameters") if config.get(key)
    ]
    if unheld:
        raise AdapterError(
            f"{_CONFIG} sets {', '.join(unheld)}, which plain low-rank pairs cannot hold"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise AdapterError(
            f"{_CONFIG} has r={rank!r}, lora_alpha={alpha!r}; both must be numbers, r at least 1"
        )
    return rank, float(alpha)


def _rescaled(module: str, pair: LoraPair, config: Mapping[str, Any], scale: float) -> LoraPair:
    """The pair as seen under one scale for the whole adapter, where PEFT's own scale of this module differs."""
    patterns = config.get("alpha_pattern") or {}
    # As PEFT does it: the first pattern that matches the end of the path.
    alpha = next(
        (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)),
        config["lora_alpha"],
    )
    own = alpha / (math.sqrt(pair.rank) if config.get("use_rslora") else pair.rank)
    return scaled(pair, own / scale) if not math.isclose(own, scale, rel_tol=1e-12) else pair


plugin = PeftDialect()
