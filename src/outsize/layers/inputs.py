"""Who keeps a block's inputs from its forward to its backward.

`SavedInputs` leaves them to autograd: all stay on the device, 57 MB a block for Flux.2-dev at 1024 px. `layers/offload.py`
moves them to host memory meanwhile.

A keeper may hand any of the tensors back to be saved by autograd, which frees them as backward passes; what it keeps
itself it must give back bit for bit, with the same strides, so that the block's second run takes the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

Saved = Sequence[Tensor | None]


class InputKeeper(Protocol):
    """Keeps inputs of blocks. Only blocks that run again in backward are kept for; without gradients nothing is."""

    def begin(self) -> None:
        """Forget what an earlier step left, however it ended; call as a step begins."""

    # a kept thing is whatever the keeper makes of it: opaque to its caller
    def keep(self, block: int, tensors: tuple[Tensor, ...]) -> tuple[Saved, Any]:
        """Keep a block's inputs, before it runs: (what autograd shall save, by place, and the rest's handle)."""

    def take(self, handle: Any, saved: Saved) -> tuple[Tensor, ...]:
        """Give a block's inputs back, before it runs again; valid until `release`.

        Raises: RuntimeError when they are gone, or were changed in place.
        """

    def release(self, handle: Any) -> None:
        """Say that the block's backward is queued: its inputs may be overwritten by what is queued later."""

    def device_bytes(self) -> int:
        """Device memory that is the keeper's own, whatever it keeps at the moment."""

    def host_bytes(self) -> int:
        """Host memory held."""

    def close(self) -> None:
        """Give all memory back."""


class SavedInputs:
    """Autograd saves everything."""

    def begin(self) -> None:
        """Autograd's graph holds all there is."""

    def keep(self, block: int, tensors: tuple[Tensor, ...]) -> tuple[Saved, None]:  # noqa: ARG002
        return tensors, None

    def take(self, handle: None, saved: Saved) -> tuple[Tensor, ...]:  # noqa: ARG002
        return tuple(one for one in saved if one is not None)

    def release(self, handle: None) -> None:
        """Autograd frees what it saved."""

    def device_bytes(self) -> int:
        return 0

    def host_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is held."""
