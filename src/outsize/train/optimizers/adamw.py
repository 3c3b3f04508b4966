"""torch's AdamW, fused where the device has it: 8 bytes of state per trainable number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from outsize.train.optimizers.protocol import OptimizerSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

_MOMENTS_BYTES = 2 * 4  # two moments in fp32


@dataclass(frozen=True, slots=True)
class AdamW:
    """The plug-in."""

    smaller: ClassVar[str] = "adamw8bit"

    def state_bytes(self, elements: int) -> int:
        return _MOMENTS_BYTES * elements

    def __call__(
        self, masters: Sequence[nn.Parameter], settings: OptimizerSettings
    ) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(
            masters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )


plugin = AdamW
