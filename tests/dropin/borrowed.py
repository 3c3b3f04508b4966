"""borrowed: one buffer on the device, filled when a block is asked for; a placement dropped in by test_dropin.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outsize.placement.protocol import PlacementSettings, Sweep

if TYPE_CHECKING:
    from torch import Tensor


class Borrowed:
    """The slowest placement and the smallest: no block is copied before it is needed."""

    def __init__(self, settings: PlacementSettings) -> None:
        import torch

        self._sizes = settings.sizes
        self._host: dict[int, Tensor] = {}
        device = settings.device.torch_device
        self._buffer = torch.empty(max(settings.sizes), dtype=torch.uint8, device=device)

    def put(self, block: int, packet: Tensor) -> None:
        self._host[block] = packet.clone()

    def begin(self, sweep: Sweep) -> None:
        """Every order will do."""

    def acquire(self, block: int) -> Tensor:
        return self._buffer[: self._sizes[block]].copy_(self._host[block])

    def release(self, block: int) -> None:
        """The next acquire overwrites it."""

    def device_bytes(self) -> int:
        return self._buffer.numel()

    def host_bytes(self) -> int:
        return sum(self._sizes)

    def close(self) -> None:
        self._host.clear()


plugin = Borrowed
