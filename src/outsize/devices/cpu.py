"""The host's processor: always present, computes in fp32.

bf16 products are a hundred times slower than fp32 on processors without bf16 units (measured: 256x3072x3072 backward
11.1 s against 0.155 s), so the compute type is fp32 whatever the weights are stored in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import psutil
import torch

from outsize.base.errors import MachineFault
from outsize.devices._host import HostBuffer, pageable
from outsize.devices._reading import read_bytes


@dataclass(frozen=True, slots=True)
class Now:
    """A moment: work is done when it returns."""

    at_s: float

    def seconds_after(self, earlier: Now) -> float:
        return self.at_s - earlier.at_s


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor as a device."""

    kind: str = "cpu"
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compute_dtype: torch.dtype = torch.float32
    copies_asynchronously: bool = False

    @property
    def name(self) -> str:
        return f"CPU, {torch.get_num_threads()} threads"

    @property
    def has_own_memory(self) -> bool:
        return False

    @property
    def card(self) -> None:
        """There is none."""

    def compute_exactly(self, *, is_wanted: bool) -> None:
        """It always does."""

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        """The host's memory is watched elsewhere."""

    def peak_reserved_bytes(self) -> int:
        return 0

    def allocated_bytes(self) -> int:
        return 0

    def reserved_bytes(self) -> int:
        return 0

    def read(self, content_u8: torch.Tensor) -> None:
        read_bytes(content_u8)

    def mark(self) -> Now:
        return Now(time.perf_counter())

    def recorder(self) -> None:
        """Nothing is launched."""

    def limit_memory(self, num_bytes: int) -> int:  # noqa: ARG002 - the protocol's signature
        raise MachineFault(
            "--vram-limit caps the memory of a card, and here the processor computes; leave it out, or name a card with "
            "--device"
        )

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def release_cached(self) -> None:
        """The system's allocator keeps no cache of ours."""

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        return HostBuffer(pageable(num_bytes), num_bytes)


class CpuKind:
    """The plug-in."""

    rank = 0

    def is_present(self) -> bool:
        return True

    def open(self, index: int = 0) -> Cpu:
        assert index == 0, "there is one processor"
        return Cpu()


plugin = CpuKind()
