"""How long computing waits for copied blocks: a placement between a model and its own, with a stopwatch around `acquire`.

`acquire` is where a placement makes computing wait for a copy. Marks before and after it lie on the computing queue, so
what passes between them is the time in which that queue had nothing to do but wait: copy time that was not hidden. On a
device that copies at once the copies themselves lie in `acquire` and `release`, and nothing is hidden by construction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.devices.protocol import Device, Mark
    from outsize.layers.model import PacketHolder


class MeteredPlacement:
    """The same placement, timed while `is_on`."""

    def __init__(self, inner: PacketHolder, device: Device) -> None:
        self.inner, self._device = inner, device
        self.is_on = False
        self._waits: list[tuple[Mark, Mark]] = []

    def put(self, block: int, packet: Tensor) -> None:
        self.inner.put(block, packet)

    def begin(self, sweep: Literal["forward", "train"]) -> None:
        self.inner.begin(sweep)

    def acquire(self, block: int) -> Tensor:
        if not self.is_on:
            return self.inner.acquire(block)
        before = self._device.mark()
        packet = self.inner.acquire(block)
        self._waits.append((before, self._device.mark()))
        return packet

    def release(self, block: int) -> None:
        self.inner.release(block)

    def device_bytes(self) -> int:
        return self.inner.device_bytes()

    def host_bytes(self) -> int:
        return self.inner.host_bytes()

    def close(self) -> None:
        self.inner.close()

    def copied_bytes(self) -> int:
        """Bytes copied to the device so far, by a placement that counts them; 0 by one that copies nothing."""
        counted: int = getattr(self.inner, "copied_bytes", 0)
        return counted

    def take_waited_s(self) -> float:
        """Seconds waited since the last call; the device must be synchronised."""
        waited_s = sum(after.seconds_after(before) for before, after in self._waits)
        self._waits.clear()
        return waited_s
