"""Checkpoints in 8-bit floats as ComfyUI, Black Forest Labs and trainers lay them out, and what they stand for in fp64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

Kind = Literal["tensor", "row", "group"]
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_GROUP = 16


@dataclass(frozen=True)
class Spelling:
    """How a program names what lies beside a weight.

    marker: the tensor that says that a file is scaled. has_marks: JSON beside each weight. shape: of one scale for all.
    """

    weight: str
    activations: str | None = None
    marker: str | None = None
    has_marks: bool = False
    shape: tuple[int, ...] = ()


COMFYUI_OLD = Spelling("scale_weight", "scale_input", marker="scaled_fp8")
COMFYUI = Spelling("weight_scale", "input_scale", has_marks=True)
BFL = Spelling("weight_scale")
MUSUBI = Spelling("scale_weight", marker="scaled_fp8", shape=(1,))
SPELLINGS = (COMFYUI_OLD, COMFYUI, BFL, MUSUBI)


def quantised(
    tensors: Mapping[str, Tensor],
    spelling: Spelling,
    kind: Kind = "tensor",
    *,
    values: Literal["e4m3", "e5m2"] = "e4m3",
    scale_dtype: torch.dtype = torch.float32,
    prefix: str = "",
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's file, matrices in 8 bits, and the same file in fp32 with what they stand for: the product, rounded once.

    Norms, biases, embeddings and every fourth matrix are kept as they are, as such files do.
    """
    file: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    matrices = [name for name, one in tensors.items() if _is_scaled(name, one)]
    for name, one in tensors.items():
        at = prefix + name
        if name not in matrices or matrices.index(name) % 4 == 3:
            file[at], exact[at] = one, one.float() if one.is_floating_point() else one
            continue
        codes, scale = _encode(one, kind, DTYPES[values], scale_dtype)
        module = at.removesuffix("weight")
        file[at] = codes
        spread = (
            scale.double()
            if kind == "tensor"
            else scale.double().repeat_interleave(one.shape[1] // scale.shape[1], 1)
        )
        exact[at] = (codes.double() * spread).float()
        is_one = scale.numel() == 1
        file[f"{module}{spelling.weight}"] = scale.reshape(spelling.shape) if is_one else scale
        if spelling.activations is not None:
            file[f"{module}{spelling.activations}"] = torch.tensor(0.37)
        if spelling.has_marks:
            word = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[values]
            file[f"{module}comfy_quant"] = mark(format=word, full_precision_matrix_mult=True)
    if spelling.marker is not None:
        file[prefix + spelling.marker] = torch.zeros(2).to(DTYPES[values])
    return file, exact


def mark(**words: object) -> Tensor:
    """JSON as bytes, as ComfyUI keeps it."""
    return torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8)


def save(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> Path:
    """One file; views become tensors of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path, metadata or None)
    return path


def _is_scaled(name: str, one: Tensor) -> bool:
    is_table = any(word in name for word in ("embed", "shared", "relative_attention", "norm"))
    return one.ndim == 2 and name.endswith(".weight") and not is_table


def _encode(
    matrix: Tensor, kind: Kind, dtype: torch.dtype, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes (N, K), and scales () or (N, groups)."""
    wide = matrix.float()
    groups = wide.reshape(1, 1, -1)
    if kind != "tensor":
        groups = wide.reshape(len(wide), wide.shape[1] // _GROUP if kind == "group" else 1, -1)
    scale = (groups.abs().amax(2) / torch.finfo(dtype).max * 1.03).to(scale_dtype)
    codes = (groups / scale.float()[..., None]).to(dtype).view(matrix.shape)
    return codes, scale
