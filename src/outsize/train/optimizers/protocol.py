"""What an optimiser plug-in is: a callable from fp32 masters and settings to a torch optimiser, that knows its state's size.

A plug-in file binds `plugin` to it and imports torch only when called: plans ask for sizes. Its state must consist of
tensors and plain numbers, so that a checkpoint can hold it exactly in safetensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outsize.base.catalogue import Catalogue

if TYPE_CHECKING:
    import torch
    from torch import nn

OPTIMIZERS = Catalogue("outsize.train.optimizers", "optimizer")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What every optimiser is made from; the learning rate is set anew before each step."""

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float


class OptimizerFactory(Protocol):
    """A plug-in of this folder."""

    def __call__(
        self, masters: Sequence[nn.Parameter], settings: OptimizerSettings
    ) -> torch.optim.Optimizer:
        """The optimiser over these masters: one flat tensor that holds them all, so it must work number by number."""

    def state_bytes(self, elements: int) -> int:
        """Bytes of state for one tensor of that many numbers; no torch."""
