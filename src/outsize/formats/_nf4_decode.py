"""Decoding nf4 by what serves the device best, found out once per device and never silently.

bitsandbytes serves CUDA and ROCm. On a CPU plain torch is taken though bitsandbytes has kernels there: theirs took
14.7 ms for 3072x3072 in bf16 where ours took 20.1, and the import takes five seconds. On Apple's devices it may fetch
its kernels from a hub, so it is not asked.

Ask (NF4.kernel) before a decode is compiled: the answer is a dictionary entry then, and torch.compile goes
through without a break.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.formats import _nested
from outsize.formats import _nf4_kernels as kernels

_kernels: dict[tuple[str, int | None], Kernel] = {}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The implementation for one device, and what to tell people about it."""

    is_bitsandbytes: bool
    report: str


def decode(
    parts: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    group: int,
    quant_type: str,
) -> Tensor:
    """The matrix (N, K) in `dtype`; quant_type is what bitsandbytes calls this table of values."""
    codes = parts["codes"]
    is_theirs = kernel_of(codes.device.type, codes.device.index, quant_type).is_bitsandbytes
    scales = parts["scales"]
    if "offset" in parts:
        scales = _nested.decode_scales(parts, by_bitsandbytes=is_theirs)
    if not is_theirs:
        return kernels.decode_by_torch(codes, scales.float(), shape, dtype, group=group)
    return kernels.decode_by_bitsandbytes(
        codes, scales.float(), shape, dtype, group=group, quant_type=quant_type
    )


def kernel_of(device_type: str, index: int | None, quant_type: str) -> Kernel:
    """The implementation for a device; the first call on a served one imports bitsandbytes and checks its values."""
    key = (device_type, index)
    if key not in _kernels:
        device = torch.device(device_type if index is None else f"{device_type}:{index}")
        _kernels[key] = _choose(device, quant_type)
    return _kernels[key]


def _is_served(device: torch.device) -> bool:
    """A torch built for CUDA or ROCm knows no other device than these and the CPU."""
    return device.type != "cpu" and bool(torch.version.cuda or torch.version.hip)


def _choose(device: torch.device, quant_type: str) -> Kernel:
    if not _is_served(device):
        return Kernel(is_bitsandbytes=False, report="torch")
    try:
        importlib.import_module("bitsandbytes")
        version = importlib.metadata.version("bitsandbytes")
        fault = _first_difference(device, quant_type)
    except torch.OutOfMemoryError:
        raise
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # what a broken installation raises, from loader to launch
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Kernel(
            is_bitsandbytes=False,
            report=f"torch (bitsandbytes does not work on {device}: {reason})",
        )
    if fault is not None:
        return Kernel(
            is_bitsandbytes=False, report=f"torch (bitsandbytes {version} on {device}: {fault})"
        )
    return Kernel(is_bitsandbytes=True, report=f"bitsandbytes {version}")


def _first_difference(device: torch.device, quant_type: str) -> str | None:
    """How bitsandbytes' values differ from the reference on a device: every byte, with scales of many sizes."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    scales = torch.tensor([1.0, 0.3, 1e-3, 7.7, 0.0, 123.4, 2e-6, 0.1], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = kernels.decode_by_torch(codes, scales, (8, 64), dtype, group=64)
        theirs = kernels.decode_by_bitsandbytes(
            codes, scales, (8, 64), dtype, group=64, quant_type=quant_type
        )
        if not torch.equal(ours, theirs):
            return f"its {dtype} values differ from the reference"
    return None
