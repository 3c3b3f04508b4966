"""What CUDA and ROCm share: ROCm builds of torch answer to torch.cuda as well, with faults of their own."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.utils.deterministic


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
