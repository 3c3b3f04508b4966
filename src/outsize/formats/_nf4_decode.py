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
from typing import Protocol

import torch
from torch import Tensor

from outsize.formats import _nested
from outsize.formats import _nf4_kernels as kernels
from outsize.formats._hadamard import make_tables, turn, turn_back, turn_rows_back
from outsize.formats._nf4_values import VALUES

Decode = Callable[[Tensor, Tensor, tuple[int, ...], torch.dtype, int], Tensor]
_LARGEST_E4M3 = 448.0
_SMALLEST_SCALE = 1e-30  # stands for that of a row of zeros
_CPU_PIECE = 2**18  # numbers that are turned back at once; these stay in the cache
_CARD_PIECE = 2**24
_kernels: dict[tuple[str, int | None], Kernel] = {}


class DecodeE4m3(Protocol):
    """From codes and scales to the matrix, or its transpose, in e4m3, each row of the result divided by its scale."""

    def __call__(
        self,
        codes: Tensor,
        scales: Tensor,
        row_scales: Tensor,
        shape: tuple[int, ...],
        group: int,
        *,
        is_transposed: bool,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """The implementation for one device, and what to tell people about it.

    decode: (codes, scales, shape, dtype, group) -> matrix. decode_e4m3: only some have it.
    """

    decode: Decode
    report: str
    decode_e4m3: DecodeE4m3 | None = None
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


def decode_back(
    parts: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    group: int,
    quant_type: str,
) -> Tensor:
    """As `decode`, of a matrix that was turned before it was encoded; some rows at a time, since turning takes fp32."""
    codes = parts["codes"].reshape(-1)
    kernel = kernel_of(codes.device.type, codes.device.index, quant_type)
    scales, num_columns = _scales(parts, kernel), shape[1]
    make_tables(codes.device)
    out_NK = torch.empty(shape, dtype=dtype, device=codes.device)
    step = max(1, (_CPU_PIECE if codes.device.type == "cpu" else _CARD_PIECE) // num_columns)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        some = codes[start * num_columns // 2 : stop * num_columns // 2]
        some_scales = scales[start * num_columns // group : stop * num_columns // group]
        rows = kernel.decode(some, some_scales, (stop - start, num_columns), torch.float32, group)
        out_NK[start:stop] = turn_rows_back(rows)
    return out_NK


@dataclass(frozen=True, slots=True)
class Turned:
    """Products with a matrix as it is kept, its inputs turned; see protocol.py."""

    group: int
    quant_type: str

    def turn(self, x: Tensor) -> Tensor:
        """Activations (..., K) to match."""
        return turn(x)

    def turn_back(self, grad: Tensor) -> Tensor:
        """The gradient of what was turned."""
        return turn_back(grad)

    def decode(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The matrix (N, K) as it is kept."""
        return decode(parts, shape, dtype, group=self.group, quant_type=self.quant_type)


def e4m3_scales(
    parts: Mapping[str, Tensor], shape: tuple[int, ...], *, group: int, quant_type: str
) -> tuple[Tensor, Tensor] | None:
    """Scales (N, 1) and (K, 1) fp32 with which the matrix and its transpose fit e4m3; None where no kernel decodes to it.

    A row's is its largest group's; a column's that of its group of columns.
    """
    codes = parts["codes"]
    kernel = kernel_of(codes.device.type, codes.device.index, quant_type)
    if kernel.decode_e4m3 is None:
        return None
    scales_NG = _scales(parts, kernel).float().view(shape[0], -1)
    rows_N1, columns_G = (
        scales_NG.amax(along).clamp_min(_SMALLEST_SCALE).div(_LARGEST_E4M3) for along in (1, 0)
    )
    return rows_N1.view(-1, 1), columns_G.repeat_interleave(group).view(-1, 1)


def decode_e4m3(
    parts: Mapping[str, Tensor],
    shape: tuple[int, ...],
    row_scales: Tensor,
    *,
    group: int,
    quant_type: str,
    is_transposed: bool,
) -> Tensor:
    """The matrix (N, K) or its transpose (K, N) in e4m3, by scales that `e4m3_scales` gave."""
    codes = parts["codes"]
    kernel = kernel_of(codes.device.type, codes.device.index, quant_type)
    assert kernel.decode_e4m3 is not None, "there were scales for it"
    return kernel.decode_e4m3(
        codes, _scales(parts, kernel), row_scales, shape, group, is_transposed=is_transposed
    )


def kernel_of(device_type: str, index: int | None, quant_type: str) -> Kernel:
    """The implementation for a device; the first call on a served one imports it and checks its values."""
    key = (device_type, index)
    if key not in _kernels:
        device = torch.device(device_type if index is None else f"{device_type}:{index}")
        _kernels[key] = _choose(device, quant_type)
    return _kernels[key]


def _scales(parts: Mapping[str, Tensor], kernel: Kernel) -> Tensor:
    """One for each group, fp32 or as stored."""
    if "offset" in parts:
        return _nested.decode_scales(parts, by_bitsandbytes=kernel.is_bitsandbytes)
    return parts["scales"]


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
                kernel.decode_e4m3,
                kernel.is_bitsandbytes,
            )
        faults.append(f"{name} {fault}")
    return _torch_kernel(f"torch ({'; '.join(faults)})")


def _torch_kernel(report: str) -> Kernel:
    def decode_by_torch(
        codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype, group: int
    ) -> Tensor:
        return kernels.decode_by_torch(codes, scales.float(), shape, dtype, group=group)

    return Kernel(decode_by_torch, report)


def _triton_kernel(device: torch.device, quant_type: str) -> Kernel:  # noqa: ARG001 - as its sibling
    """Ours. Raises: ImportError where Triton is not installed."""
    ours = importlib.import_module("outsize.formats._nf4_triton")
    values = torch.tensor(VALUES, device=device)

    def decode_by_triton(
        codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype, group: int
    ) -> Tensor:
        decoded: Tensor = ours.decode(codes, scales, values, list(shape), group, dtype)
        return decoded

    def e4m3_by_triton(
        codes: Tensor,
        scales: Tensor,
        row_scales: Tensor,
        shape: tuple[int, ...],
        group: int,
        *,
        is_transposed: bool,
    ) -> Tensor:
        operator = ours.decode_columns if is_transposed else ours.decode_rows
        decoded: Tensor = operator(codes, scales, row_scales, values, list(shape), group)
        return decoded

    report = f"triton {ours.triton.__version__}"
    return Kernel(decode_by_triton, report, e4m3_by_triton if _has_e4m3(device) else None)


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
            codes, scales.float(), shape, dtype, group=group, quant_type=quant_type
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
    if kernel.decode_e4m3 is not None and not _is_e4m3_right(device, kernel):
        return f"{kernel.report} on {device}: its e4m3 values differ from the reference"
    return None


def _is_e4m3_right(device: torch.device, kernel: Kernel) -> bool:
    """Every byte again, in a part of one tile of rows and two groups: one step of three mantissa bits is allowed.

    Compilers round ties, and divide, as they like.
    """
    assert kernel.decode_e4m3 is not None
    shape = (48, 128)
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(12)
    scales = torch.linspace(0.01, 3.0, 96, device=device)
    wanted_NK = kernels.decode_by_torch(codes, scales, shape, torch.float32, group=64)
    for is_transposed in (False, True):
        wanted = wanted_NK.t() if is_transposed else wanted_NK
        row_scales = torch.linspace(0.01, 0.02, len(wanted), device=device).view(-1, 1)
        if is_transposed:  # the same within a group
            row_scales = row_scales[::64].repeat_interleave(64, 0)
        found = kernel.decode_e4m3(
            codes, scales, row_scales, shape, 64, is_transposed=is_transposed
        )
        off = (wanted / row_scales - found.float()).abs()
        if not bool((off <= (wanted / row_scales).abs() / 8 + 2**-9).all()):
            return False
    return True
