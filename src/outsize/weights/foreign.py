"""Quantised checkpoints of kinds that are not read: recognised, so that one sentence says why and what to take instead.

Known by what config.json states (`quantization_config.quant_method`), and without it by the names of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from outsize.base.files import parse_json

GGUF_END = ".gguf"
_OURS = "bitsandbytes"
_REMEDY = "take the bf16 files that it was made from, or a copy in bitsandbytes' 4-bit NF4, which is taken as it is"

# As people call them; a quant_method is one of these without dashes, or is called by its own name.
_KINDS = (
    "GPTQ",
    "AWQ",
    "AutoRound",
    "HQQ",
    "EXL2",
    "EXL3",
    "MLX",
    "FP8",
    "NVFP4",
    "MXFP4",
    "ModelOpt",
)
# Of methods that write several kinds, these words in what they say of it.
_FINER = ("NVFP4", "MXFP4", "FP8")
# Ends of names that only one kind has, in the order in which they are looked for; the first whose ends are all there.
_ENDS = (
    ("GPTQ", ("qweight", "qzeros", "g_idx")),
    ("AWQ", ("qweight", "qzeros", "scales")),
    ("EXL2", ("q_weight", "q_scale")),
    ("EXL3", ("trellis",)),
    ("HQQ", ("W_q",)),
    ("MXFP4", ("_blocks", "_scales")),
    ("NVFP4", ("weight_packed", "weight_global_scale")),
    ("NVFP4", ("weight", "weight_scale", "weight_scale_2")),
    ("compressed-tensors", ("weight_packed", "weight_scale")),
    ("FP8 in blocks", ("weight_scale_inv",)),
    ("MLX", ("weight", "scales", "biases")),
    ("bitsandbytes 8-bit", ("weight", "SCB")),
)


def foreign_fault(files: Sequence[Path], names: Collection[str]) -> str | None:
    """Why files in another kind of few bits cannot be used and what to take; None when they seem to be of no such kind."""
    kind = _stated(config_beside(files)) or _named(names)
    return None if kind is None else refusal(str(files[0]), kind)


def refusal(where: str, kind: str) -> str:
    """The one sentence."""
    return f"{where} is quantised as {kind}, which is not read, since it would have to be rounded a second time; {_REMEDY}"


def config_beside(files: Sequence[Path]) -> dict[str, Any]:
    """The config.json in the folder of the files; empty where there is none that can be read."""
    try:
        values = parse_json((files[0].parent / "config.json").read_bytes())
    except (OSError, ValueError, IndexError):
        return {}
    return values if isinstance(values, dict) else {}


def _stated(config: Mapping[str, Any]) -> str | None:
    """The kind that a config.json states, if it is not ours."""
    settings = config.get("quantization_config")
    inner = config.get("text_config")
    if not isinstance(settings, dict) and isinstance(inner, dict):
        settings = inner.get("quantization_config")
    if not isinstance(settings, dict):
        settings = config.get("quantization")  # MLX's own word, without a method
        is_theirs = isinstance(settings, dict) and "group_size" in settings
        return "MLX" if is_theirs else None
    method = str(settings.get("quant_method") or "").lower()
    if method == _OURS:
        return "bitsandbytes 8-bit" if settings.get("load_in_8bit") else None
    if not method:  # MLX writes its settings under this name too
        return "MLX" if {"group_size", "bits"} <= set(settings) else None
    plain = method.rpartition("/")[2].replace("-", "")
    kind = next((name for name in _KINDS if name.lower() == plain), method)
    if settings.get("weight_block_size"):
        return f"{kind} in blocks"
    detail = f"{settings.get('format', '')} {settings.get('quant_algo', '')}".upper()
    finer = next((name for name in _FINER if name in detail), kind)
    return kind if finer == kind else f"{finer} ({kind})"


def _named(names: Collection[str]) -> str | None:
    """The kind that names of tensors betray."""
    ends = {name.rpartition(".")[2] for name in names}
    # Experts are no modules: "experts.down_proj_blocks".
    ends |= {f"_{end.rpartition('_')[2]}" for end in ends}
    return next((kind for kind, wanted in _ENDS if ends.issuperset(wanted)), None)
