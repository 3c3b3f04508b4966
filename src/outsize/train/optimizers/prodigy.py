"""Prodigy, which finds its own step size: prodigyopt, by the paper's author (arXiv 2306.06101). 16 bytes a number.

The estimate `d` is one number for all that is trained, so it is the same over one flat tensor as over many. The step
size is `learning_rate` x d: leave learning_rate at 1, and let a schedule move it if one is wanted.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from outsize.train.optimizers._library import library
from outsize.train.optimizers.protocol import Asked, OptimizerSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

_WHOLE_BYTES = 2 * 4  # both moments, fp32
_SLICED_BYTES = 2 * 4  # where it began, and the sum of gradients, fp32, for every slice_p-th number
_LOWEST_RATE, _HIGHEST_RATE = 0.1, 10.0


@dataclass(frozen=True, slots=True)
class Prodigy:
    """The plug-in.

    d_coef: factor on the estimate, as in 0.5 to 2. d0: first estimate. growth_rate: how much it may grow in a step; 0: as
    it likes. slice_p: every how many-th number the estimate looks at (11 is advised where memory is short).
    safeguard_warmup: keep the warm-up's small steps out of the estimate. bias_correction: as in Adam.
    """

    library: ClassVar[str] = "prodigyopt"
    d_coef: float = 1.0
    d0: float = 1e-6
    growth_rate: float = 0.0
    slice_p: int = 1
    safeguard_warmup: bool = False
    bias_correction: bool = False

    def state_bytes(self, elements: int) -> int:
        return _WHOLE_BYTES * elements + _SLICED_BYTES * math.ceil(elements / self.slice_p)

    def fault(self, train: Asked) -> tuple[str, str] | None:
        if self.d_coef <= 0 or self.d0 <= 0 or self.slice_p < 1 or self.growth_rate < 0:
            return (
                "optimizer_options",
                "d_coef, d0 and slice_p must be positive, growth_rate 0 or more",
            )
        if 0 < self.growth_rate <= 1:
            return "optimizer_options", "growth_rate must be more than 1 to let d grow, or 0"
        return rate_fault("prodigy", train)

    def __call__(
        self, masters: Sequence[nn.Parameter], settings: OptimizerSettings
    ) -> torch.optim.Optimizer:
        prodigyopt = library(self.library)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how weights decay
            made: torch.optim.Optimizer = prodigyopt.Prodigy(
                list(masters),
                lr=settings.learning_rate,
                betas=settings.betas,
                eps=settings.epsilon,
                weight_decay=settings.weight_decay,
                d0=self.d0,
                d_coef=self.d_coef,
                # the library's infinity would be no JSON in a checkpoint
                growth_rate=self.growth_rate or sys.float_info.max,
                slice_p=self.slice_p,
                safeguard_warmup=self.safeguard_warmup,
                use_bias_correction=self.bias_correction,
            )
        return made


def rate_fault(name: str, train: Asked) -> tuple[str, str] | None:
    """What is wrong with a learning rate that is a factor on an estimate, if anything."""
    if _LOWEST_RATE <= train.learning_rate <= _HIGHEST_RATE:
        return None
    what = (
        f"is a factor on the step size that {name} finds by itself, so it must be {_LOWEST_RATE:g} to "
        f"{_HIGHEST_RATE:g}, found {train.learning_rate:g}; set it to 1.0"
    )
    return "learning_rate", what


plugin = Prodigy
