"""bitsandbytes' 8-bit AdamW: about 2 bytes of state per trainable number.

Tensors of fewer than 4096 numbers keep fp32 state; that is bitsandbytes' own rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from outsize.train.optimizers.protocol import OptimizerSettings


def plugin(masters: Sequence[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW with block-wise 8-bit moments over fp32 masters."""
    import bitsandbytes

    made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        list(masters),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    return made
