"""Every block stays on the device: the fastest placement, where it fits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outsize.placement.protocol import PlacementSettings, Sweep


class Resident:
    """One device buffer per block."""

    def __init__(self, settings: PlacementSettings) -> None:
        self._device = settings.device.torch_device
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for size in settings.sizes
        ]

    def targets(self, block: int) -> Sequence[Tensor]:
        """The block's buffer."""
        return [self._buffers[block]]

    def put(self, block: int, packet: Tensor) -> None:
        self._buffers[block].copy_(packet)

    def begin(self, sweep: Sweep) -> None:
        """Nothing moves, so the order does not matter."""

    def acquire(self, block: int) -> Tensor:
        return self._buffers[block]

    def release(self, block: int) -> None:
        """The block stays."""

    def device_bytes(self) -> int:
        return sum(one.numel() for one in self._buffers)

    def host_bytes(self) -> int:
        on_host = self._device == torch.device("cpu")
        return self.device_bytes() if on_host else 0

    def buffers(self) -> dict[str, Tensor]:
        """One for each block."""
        return {f"block {block}": one for block, one in enumerate(self._buffers)}

    def close(self) -> None:
        self._buffers.clear()


plugin = Resident
