"""The exponential moving average of all masters, as diffusers' EMAModel computes it.

Early on an average over thousands of updates would be the adapter's beginning, so its reach grows with the updates made:
the decay of update n, counted from 0, is min(decay, (1 + n) / (10 + n)), and 0 for the first.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Average:
    """values: the average, fp32, flat as the masters are; num_updates: how many it has seen."""

    def __init__(self, masters: Tensor, decay: float) -> None:
        self.values = masters.detach().clone()
        self.num_updates = 0
        self._decay = decay

    def follow_(self, masters: Tensor) -> None:
        """Take in the masters after an update."""
        with torch.no_grad():
            self.values.lerp_(masters, 1 - decay_of(self.num_updates, self._decay))
        self.num_updates += 1


def decay_of(update: int, decay: float) -> float:
    """The decay of an update, counted from 0."""
    return 0.0 if update == 0 else min(decay, (1 + update) / (10 + update))
