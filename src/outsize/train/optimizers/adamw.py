"""torch's AdamW, fused where the device has it: 8 bytes of state per trainable number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from outsize.train.optimizers.protocol import OptimizerSettings


def plugin(masters: Sequence[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW over fp32 masters."""
    return torch.optim.AdamW(
        masters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
