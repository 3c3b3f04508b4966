"""Decoding nf4 by what serves the device best, found out once per device and never silently.

On a card: Triton's kernels (ours) where Triton is there, else bitsandbytes', else plain torch; each only after its values
were compared with the reference there. On a CPU plain torch is taken though bitsandbytes has kernels for it: theirs took
14.7 ms for 3072x3072 in bf16 where ours took 20.1, and the import takes five seconds. On Apple's devices bitsandbytes may
fetch its kernels from a hub, so it is not asked.

Ask (NF4.kernel) before a decode is compiled: the answer is a dictionary entry then, and torch.compile goes
through without a break.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.formats import _nested
from outsize.formats import _nf4_kernels as kernels

Decode = Callable[[Tensor, Tensor, tuple[int, ...], torch.dtype, int], Tensor]
Transpose = Callable[[Tensor, Tensor, tuple[int, ...], int], Tensor]
_LARGEST_E4M3 = 448.0
_SMALLEST_SCALE = 1e-30  # stands for that of a row of zeros
_kernels: dict[tuple[str, int | None], Kernel] = {}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The implementation for one device, and what to tell people about it.

    decode: (codes, fp32 scales, shape, dtype, group) -> matrix. transpose_e4m3: likewise, its transpose in e4m3, which only
    some have; their `decode` takes e4m3 too.
    """

    decode: Decode
    report: str
    transpose_e4m3: Transpose | None = None
    is_bitsandbytes: bool = False


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
    kernel = kernel_of(codes.device.type, codes.device.index, quant_type)
    return kernel.decode(codes, _scales(parts, kernel), shape, dtype, group)


def decode_e4m3(
    parts: Mapping[str, Tensor],
    shape: tuple[int, ...],
    *,
    group: int,
    quant_type: str,
    is_transposed: bool,
) -> tuple[Tensor, Tensor] | None:
    """The matrix or its transpose in e4m3 and the fp32 scale of each row; None where no kernel does it.

    Scales that were divided by the largest of their row (or group of columns) decode to at most 448 in size.
    """
    codes = parts["codes"]
    kernel = kernel_of(codes.device.type, codes.device.index, quant_type)
    if kernel.transpose_e4m3 is None:
        return None
    scales_NG = _scales(parts, kernel).view(shape[0], -1)
    along = 0 if is_transposed else 1
    largest = scales_NG.amax(along, keepdim=True).clamp_min(_SMALLEST_SCALE) / _LARGEST_E4M3
    ratios = (scales_NG / largest).view(-1)
    if is_transposed:
        decoded = kernel.transpose_e4m3(codes, ratios, shape, group)
        return decoded, largest.view(-1, 1).repeat_interleave(group, 0)
    return kernel.decode(codes, ratios, shape, torch.float8_e4m3fn, group), largest


def kernel_of(device_type: str, index: int | None, quant_type: str) -> Kernel:
    """The implementation for a device; the first call on a served one imports it and checks its values."""
    key = (device_type, index)
    if key not in _kernels:
        device = torch.device(device_type if index is None else f"{device_type}:{index}")
        _kernels[key] = _choose(device, quant_type)
    return _kernels[key]


def _scales(parts: Mapping[str, Tensor], kernel: Kernel) -> Tensor:
    """In fp32."""
    if "offset" in parts:
        return _nested.decode_scales(parts, by_bitsandbytes=kernel.is_bitsandbytes)
    return parts["scales"].float()


def _is_served(device: torch.device) -> bool:
    """A torch built for CUDA or ROCm knows no other device than these and the CPU."""
    return device.type != "cpu" and bool(torch.version.cuda or torch.version.hip)


def _choose(device: torch.device, quant_type: str) -> Kernel:
    """The first candidate whose values are right, with what was wrong with those before it."""
    if not _is_served(device):
        return _torch_kernel("torch")
    faults: list[str] = []
    for name, make in (("triton", _triton_kernel), ("bitsandbytes", _bitsandbytes_kernel)):
        try:
            kernel = make(device, quant_type)
            fault = _first_difference(device, kernel)
        except torch.OutOfMemoryError:
            raise
        except (
            ImportError,
            OSError,
            RuntimeError,
        ) as error:  # what a broken installation raises, from loader to launch
            fault = f"does not work on {device}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if fault is None:
            reasons = f" ({'; '.join(faults)})" if faults else ""
            return Kernel(
                kernel.decode,
                kernel.report + reasons,
                kernel.transpose_e4m3,
                kernel.is_bitsandbytes,
            )
        faults.append(f"{name} {fault}")
    return _torch_kernel(f"torch ({'; '.join(faults)})")


def _torch_kernel(report: str) -> Kernel:
    def decode_by_torch(
        codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype, group: int
    ) -> Tensor:
        return kernels.decode_by_torch(codes, scales, shape, dtype, group=group)

    return Kernel(decode_by_torch, report)


def _triton_kernel(device: torch.device, quant_type: str) -> Kernel:  # noqa: ARG001 - as its sibling
    """Ours. Raises: ImportError where Triton is not installed."""
    ours = importlib.import_module("outsize.formats._nf4_triton")
    values = torch.tensor(kernels.VALUES, device=device)

    def decode_by_triton(
        codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype, group: int
    ) -> Tensor:
        decoded: Tensor = ours.decode(codes, scales, values, list(shape), group, dtype)
        return decoded

    def transpose_by_triton(
        codes: Tensor, scales: Tensor, shape: tuple[int, ...], group: int
    ) -> Tensor:
        decoded: Tensor = ours.decode_transposed(codes, scales, values, list(shape), group)
        return decoded

    report = f"triton {ours.triton.__version__}"
    return Kernel(decode_by_triton, report, transpose_by_triton if _has_e4m3(device) else None)


def _has_e4m3(device: torch.device) -> bool:
    """Triton converts to e4m3 where the card does: NVIDIA from Ada on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _bitsandbytes_kernel(device: torch.device, quant_type: str) -> Kernel:  # noqa: ARG001
    importlib.import_module("bitsandbytes")
    version = importlib.metadata.version("bitsandbytes")

    def decode_by_theirs(
        codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype, group: int
    ) -> Tensor:
        return kernels.decode_by_bitsandbytes(
            codes, scales, shape, dtype, group=group, quant_type=quant_type
        )

    return Kernel(decode_by_theirs, f"bitsandbytes {version}", is_bitsandbytes=True)


def _first_difference(device: torch.device, kernel: Kernel) -> str | None:
    """How a kernel's values differ from the reference on a device: every byte, with scales of many sizes."""
    shape = (8, 64)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    scales = torch.tensor([1.0, 0.3, 1e-3, 7.7, 0.0, 123.4, 2e-6, 0.1], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wanted = kernels.decode_by_torch(codes, scales, shape, dtype, group=64)
        if not torch.equal(wanted, kernel.decode(codes, scales, shape, dtype, 64)):
            return f"{kernel.report} on {device}: its {dtype} values differ from the reference"
    if kernel.transpose_e4m3 is not None:
        e4m3, shape = torch.float8_e4m3fn, (48, 128)  # a part of one tile of rows, two groups wide
        codes, scales = codes.repeat(12), scales.repeat(12)
        wanted = kernels.decode_by_torch(codes, scales, shape, torch.float32, group=64)
        both = (
            kernel.decode(codes, scales, shape, e4m3, 64),
            kernel.transpose_e4m3(codes, scales, shape, 64).t(),
        )
        # one step of three mantissa bits or of the smallest subnormal: compilers round ties as they like
        allowed = wanted.abs() / 8 + 2**-9
        if not all(bool(((wanted - one.float()).abs() <= allowed).all()) for one in both):
            return f"{kernel.report} on {device}: its e4m3 values differ from the reference"
    return None
