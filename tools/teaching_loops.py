"""What both training loops share: limits, schedule, averaged weights, and the table of all pictures on all backgrounds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from teaching_pictures import BACKGROUNDS, Pictures, composite
from torch import nn


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one loop, and its optimiser settings."""

    steps: int
    seconds: float
    batch: int
    rate: float
    warmup: int
    ema: float


class Clock:
    """Progress from 0 to 1 by steps or seconds, and the learning rate that goes with it."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.started = time.monotonic()
        self.step = 0

    def progress(self) -> float:
        """The larger of the shares of steps and seconds that are spent."""
        spent = (time.monotonic() - self.started) / self.budget.seconds
        return min(1.0, max(self.step / self.budget.steps, spent))

    def rate(self) -> float:
        """Warm-up, then a cosine to 1 % of the full rate."""
        warm = min(1.0, (self.step + 1) / self.budget.warmup)
        return (
            self.budget.rate
            * warm
            * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.progress())))
        )


class Average:
    """Running average of parameters, with a short memory at first."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.live = [p for p in module.parameters() if p.requires_grad]
        self.mean = [p.detach().clone() for p in self.live]
        self.decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the live parameters."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.mean, [p.detach() for p in self.live], 1 - decay)

    @torch.no_grad()
    def write_back(self) -> None:
        """Replace the live parameters by their average."""
        for live, mean in zip(self.live, self.mean, strict=True):
            live.copy_(mean)


def all_on_backgrounds(
    pictures: Pictures, indices: list[int]
) -> tuple[torch.Tensor, list[tuple[str, str, str]]]:
    """Every picture on every background, (N x 6, 48, 48, 3) uint8, with (name, style, background) of each."""
    rgba = pictures.rgba[indices]
    stacks = [composite(rgba, b) for b in BACKGROUNDS]
    labels = [(pictures.names[i], pictures.styles[i], b) for b in BACKGROUNDS for i in indices]
    return torch.from_numpy(np.concatenate(stacks)), labels


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group one learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate
