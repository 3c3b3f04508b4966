"""Which implementation decodes nf4 on a device, found out once per device and never silently.

Ask (nf4.kernel_in_use) before a decode is compiled: the answer is a dictionary entry then, and torch.compile goes
through without a break.

bitsandbytes serves CUDA and ROCm (torch calls both "cuda"). On a CPU plain torch is taken though bitsandbytes has
kernels there: theirs took 14.7 ms for 3072x3072 in bf16 where ours took 20.1, and the import takes five seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass

import torch

from outsize.formats import _nf4_kernels as kernels

_SERVED = ("cuda",)
_kernels: dict[tuple[str, int | None], Kernel] = {}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The implementation for one device, and what to tell people about it."""

    is_bitsandbytes: bool
    report: str


def kernel_of(device_type: str, index: int | None) -> Kernel:
    """The implementation for a device; the first call on a served one imports bitsandbytes and checks its values."""
    key = (device_type, index)
    if key not in _kernels:
        _kernels[key] = _choose(
            torch.device(device_type if index is None else f"{device_type}:{index}")
        )
    return _kernels[key]


def _choose(device: torch.device) -> Kernel:
    if device.type not in _SERVED:
        return Kernel(is_bitsandbytes=False, report="torch")
    try:
        importlib.import_module("bitsandbytes")
        version = importlib.metadata.version("bitsandbytes")
        fault = _first_difference(device)
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


def _first_difference(device: torch.device) -> str | None:
    """How bitsandbytes' values differ from the reference on a device: every byte, with scales of many sizes."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    scales = torch.tensor([1.0, 0.3, 1e-3, 7.7, 0.0, 123.4, 2e-6, 0.1], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = kernels.decode_by_torch(codes, scales, (8, 64), dtype, group=64)
        theirs = kernels.decode_by_bitsandbytes(codes, scales, (8, 64), dtype, group=64)
        if not torch.equal(ours, theirs):
            return f"its {dtype} values differ from the reference"
    return None
