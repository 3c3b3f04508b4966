"""What CUDA and ROCm share: ROCm builds of torch answer to torch.cuda as well, with faults of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.deterministic

from outsize.base.units import format_bytes
from outsize.devices._host import HostBuffer, pageable, touch_

_PORTABLE = (
    1  # cudaHostRegisterPortable, hipHostRegisterPortable: pinned for every context of the process
)


@dataclass(frozen=True, slots=True)
class TorchGpu:
    """A card behind torch.cuda."""

    kind: str
    torch_device: torch.device
    compute_dtype: torch.dtype = torch.bfloat16
    copies_asynchronously: bool = True

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        registered = registered_buffer(num_bytes, self.torch_device)
        if not registered.why_not_pinned:
            return registered
        try:
            return allocated_buffer(num_bytes)
        except RuntimeError:  # refused as well: what was touched already is used as it is
            return registered


def registered_buffer(num_bytes: int, device: torch.device) -> HostBuffer:
    """Memory that is touched first and page-locked in place; ordinary memory, with the reason, where that is refused."""
    tensor = pageable(num_bytes)
    touch_(tensor)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's stub
    address = tensor.data_ptr()

    def undo() -> None:
        _in_own_thread(device, lambda: int(runtime.cudaHostUnregister(address)))

    code = _in_own_thread(
        device, lambda: int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))
    )
    if code == 0:
        return HostBuffer(tensor, num_bytes, undo=undo)
    why = f"page-locking {format_bytes(num_bytes)} was refused (error {code} of the runtime)"
    return HostBuffer(tensor, num_bytes, why)


def allocated_buffer(num_bytes: int) -> HostBuffer:
    """Memory of torch's pinned allocator, which takes the next power of two.

    Raises: RuntimeError where the system refuses.
    """
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return HostBuffer(tensor, 1 << (num_bytes - 1).bit_length() if num_bytes else 0)


def _in_own_thread(device: torch.device, act: Callable[[], int]) -> int:
    """The error code of a call of the runtime, made in a thread of its own.

    A refused call leaves its error behind in the calling thread, where torch would find it at the next kernel and take it
    for that kernel's; there is no call in torch to clear it.
    """
    codes: list[int] = []

    def run() -> None:
        with torch.cuda.device(device):
            codes.append(act())

    thread = threading.Thread(target=run, name="host-register")
    thread.start()
    thread.join()
    return codes[0] if codes else -1


def compute_exactly() -> None:
    """Ask torch for kernels that give the same bits each time: resume and placement promise equal bytes.

    Without it the backward of flash attention adds in whatever order its blocks finish. An operation that has no exact
    kernel is then an error, not a silent difference. Must come before the first work on a card.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for with cuBLAS
    torch.use_deterministic_algorithms(True)
    # torch would write every new buffer twice
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a property
    torch.backends.cudnn.benchmark = False  # picks kernels by a stopwatch
