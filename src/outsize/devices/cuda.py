"""NVIDIA cards through torch.cuda."""

from __future__ import annotations

import torch

from outsize.devices._torch_gpu import TorchGpu, grow_segments, open_gpu


class CudaKind:
    """The plug-in."""

    rank = 20

    def is_present(self) -> bool:
        return torch.version.hip is None and torch.cuda.is_available()

    def open(self, index: int = 0) -> TorchGpu:
        grow_segments()
        return open_gpu("cuda", index, can_record=True)


plugin = CudaKind()
