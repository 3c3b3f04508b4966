"""bitsandbytes' 8-bit AdamW: about 2 bytes of state per trainable number.

Tensors of fewer than 4096 numbers keep fp32 state; that is bitsandbytes' own rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outsize.train.optimizers.protocol import OptimizerSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

_MOMENTS_BYTES = (
    2 * 1 + 2 * 4 / 256
)  # two moments in a byte each, an fp32 scale for every 256 of either
_FP32_MOMENTS_BYTES = 2 * 4
_SMALLEST = 4096


@dataclass(frozen=True, slots=True)
class AdamW8bit:
    """The plug-in: block-wise 8-bit moments over fp32 masters."""

    def state_bytes(self, elements: int) -> int:
        each = _MOMENTS_BYTES if elements >= _SMALLEST else _FP32_MOMENTS_BYTES
        return math.ceil(elements * each)

    def __call__(
        self, masters: Sequence[nn.Parameter], settings: OptimizerSettings
    ) -> torch.optim.Optimizer:
        import bitsandbytes

        made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
            list(masters),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )
        return made


plugin = AdamW8bit
