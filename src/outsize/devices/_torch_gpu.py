"""What CUDA and ROCm share: ROCm builds of torch answer to torch.cuda as well, with faults of their own."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from outsize.base.errors import MachineFault
from outsize.base.units import format_bytes
from outsize.devices._graphs import StreamRecorder
from outsize.devices._host import HostBuffer, pageable, touch_
from outsize.devices._reading import read_bytes
from outsize.devices._sensors import CardId

_PORTABLE = (
    1  # cudaHostRegisterPortable, hipHostRegisterPortable: pinned for every context of the process
)


# A context with the kernels of matmul, attention and convolution loaded takes about 700 MiB on an H200 (plan/pools.py);
# when it is fresh less, and kernels are loaded as they are used.
CONTEXT_BYTES = 700 << 20
# No context was seen to take more; what is beyond it belongs to other programs on the card.
LARGEST_CONTEXT_BYTES = 3 << 29


@dataclass(frozen=True, slots=True)
class Point:
    """An event in a stream."""

    event: torch.cuda.Event

    def seconds_after(self, earlier: Point) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000


@dataclass(slots=True)
class TorchGpu:
    """A card behind torch.cuda.

    can_record: CUDA graphs were verified on such cards. allowed_bytes: what the allocator may take at most; None: all.
    """

    kind: str
    torch_device: torch.device
    compute_dtype: torch.dtype = torch.bfloat16
    copies_asynchronously: bool = True
    can_record: bool = False
    allowed_bytes: int | None = None
    _recorder: StreamRecorder | None = None

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    @property
    def has_own_memory(self) -> bool:
        found: Any = torch.cuda.get_device_properties(self.torch_device)
        return not found.is_integrated

    @property
    def card(self) -> CardId:
        return card_id(
            torch.cuda.get_device_properties(self.torch_device), is_amd=bool(torch.version.hip)
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def compute_exactly(self, *, is_wanted: bool) -> None:
        # Without it the backward of flash attention adds in whatever order its blocks finish. An operation that has no
        # exact kernel is then an error, not a silent difference.
        torch.use_deterministic_algorithms(is_wanted)

    def peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        # what a recording computes on the way counts as allocated only while it is made
        return peak if self._recorder is None else max(peak, self._recorder.peak_bytes())

    def reset_peak(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call] # torch's stub; before, there is nothing to reset
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device)

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.torch_device)

    def read(self, content_u8: Tensor) -> None:
        read_bytes(content_u8)

    def mark(self) -> Point:
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        point = Point(event(enable_timing=True))
        point.event.record(torch.cuda.current_stream(self.torch_device))
        return point

    def recorder(self) -> StreamRecorder | None:
        self._recorder = StreamRecorder(self.torch_device) if self.can_record else None
        return self._recorder

    def limit_memory(self, num_bytes: int) -> int:
        torch.cuda.init()  # type: ignore[no-untyped-call] # torch's stub
        free, total = torch.cuda.mem_get_info(self.torch_device)  # opens the context
        taken = total - free - torch.cuda.memory_reserved(self.torch_device)
        context = min(max(taken, CONTEXT_BYTES), LARGEST_CONTEXT_BYTES)
        left = min(num_bytes, total) - context
        if left <= 0:
            raise MachineFault(
                f"a limit of {format_bytes(num_bytes)} leaves nothing for tensors: the driver's context and libraries "
                f"take {format_bytes(context)}; raise --vram-limit"
            )
        torch.cuda.set_per_process_memory_fraction(left / total, self.torch_device)
        self.allowed_bytes = left
        return left

    def free_bytes(self) -> int:
        free = torch.cuda.mem_get_info(self.torch_device)[0]
        if self.allowed_bytes is None:
            return free
        return min(free, self.allowed_bytes - torch.cuda.memory_reserved(self.torch_device))

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


def card_id(properties: Any, *, is_amd: bool) -> CardId:
    """Which card torch's properties are of; older releases of torch tell less of it."""
    pci = ""
    if hasattr(properties, "pci_bus_id"):
        domain, place = properties.pci_domain_id, properties.pci_device_id
        pci = f"{domain:04x}:{properties.pci_bus_id:02x}:{place:02x}.0"
    if is_amd:  # what ROCm calls a uuid no tool knows
        return CardId("amd", pci)
    uuid = str(getattr(properties, "uuid", ""))
    return CardId("nvidia", pci, f"GPU-{uuid.removeprefix('GPU-')}" if uuid else "")


def registered_buffer(num_bytes: int, device: torch.device) -> HostBuffer:
    """Memory that is touched first and page-locked in place; ordinary memory, with the reason, where that is refused."""
    tensor = pageable(num_bytes)
    if num_bytes == 0:  # there is nothing to lock, and the runtime would refuse it
        return HostBuffer(tensor, 0)
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


def grow_segments() -> None:
    """Let the allocator's segments grow in place, so that memory that is free in one size serves another.

    Streaming Flux.2-dev, the allocator otherwise took a tenth more than tensors held at most (docs/performance.md). For CUDA on
    Linux alone: Windows, WSL and Jetson refuse it, ROCm has it since 2026 and with reports of zeros. What a user has set stays.
    """
    is_set = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    is_verified = platform.system() == "Linux" and platform.machine() == "x86_64"
    if is_set or not is_verified or "microsoft" in platform.release().lower():
        return
    configure = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if configure is not None:
        configure("expandable_segments:True")


def open_gpu(kind: str, index: int, *, can_record: bool = False) -> TorchGpu:
    """A card of that kind, computing exactly until told otherwise. can_record: as in TorchGpu."""
    # what torch asks for with cuBLAS, before the first work on a card
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # torch would write every new buffer twice
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a property
    torch.backends.cudnn.benchmark = False  # picks kernels by a stopwatch
    # torch's own name for an AMD card's device type is "cuda" too
    gpu = TorchGpu(kind, torch.device("cuda", index), can_record=can_record)
    gpu.compute_exactly(is_wanted=True)
    return gpu
