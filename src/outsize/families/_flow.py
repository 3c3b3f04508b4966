"""What the two Flux generations share: the flow schedule, and timesteps that reach the model unrounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

# The sinusoids of both generations are tabulated for 1000 steps of training.
TIMESTEP_SCALE = 1000


def flow_sigmas(num_steps: int, mu: float | None) -> list[float]:
    """num_steps + 1 falling noise levels from 1 to 0, moved by e^mu / (e^mu + 1/sigma - 1) unless mu is None.

    The arithmetic is that of FlowMatchEulerDiscreteScheduler.set_timesteps, which rounds to fp32 before it shifts, so
    that the values are equal to its own.
    """
    import numpy as np

    sigmas: Any = np.linspace(1.0, 1 / num_steps, num_steps).astype(np.float32)
    if mu is not None:
        sigmas = math.exp(mu) / (math.exp(mu) + (1 / sigmas - 1) ** 1.0)
    return [*(float(sigma) for sigma in sigmas.astype(np.float32)), 0.0]


@contextmanager
def exact_sinusoids(time_proj: nn.Module, *values_B: Tensor) -> Iterator[None]:
    """Make the sinusoid module see these fp32 values, in the order of its calls, instead of what it is given.

    Upstream casts timestep and guidance to the type of the hidden states before it multiplies by 1000, which in bf16
    moves a timestep by up to 4 of 1000. In fp32 nothing changes.
    """
    waiting = list(values_B)
    handle = time_proj.register_forward_pre_hook(lambda _module, _args: (waiting.pop(0),))
    try:
        yield
    finally:
        handle.remove()
    assert not waiting, "upstream looks up each sinusoid exactly once"
