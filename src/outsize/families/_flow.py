"""What the two Flux generations share: the flow schedule, and timesteps that reach the model unrounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outsize.base.errors import RecipeError

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


def empirical_mu(num_tokens: int, num_steps: int) -> float:
    """Shift of the Flux.2 schedule, interpolated between fits for 10 and 200 steps.

    Source: compute_empirical_mu in BFL's sampling.py and in diffusers' pipeline_flux2.
    """
    at_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * num_tokens + 1.89833333
    slope = (at_200 - at_10) / 190.0
    return slope * num_steps + (at_200 - 200.0 * slope)


def scheduler_config(*, is_shifted: bool, **others: Any) -> dict[str, Any]:
    """What the published scheduler_config.json says; others: values of one generation alone."""
    return {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0 if is_shifted else 1.0,
        "use_dynamic_shifting": is_shifted,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        **others,
    }


def check_guidance(variant: str, guidance: float | None, *, is_needed: bool) -> None:
    """Refuse a guidance that the model has no input for, and a missing one.

    Raises: RecipeError in both cases. True guidance, two predictions that the caller mixes, is not the model's input.
    """
    if is_needed and guidance is None:
        raise RecipeError(f"{variant} is guidance-distilled: give it a guidance (1.0 to train it)")
    if not is_needed and guidance is not None:
        raise RecipeError(f"{variant} takes no guidance, but {guidance} was given; leave it out")


@contextmanager
def exact_time(time_proj: nn.Module, sigma_B: Tensor, guidance_B: Tensor | None) -> Iterator[None]:
    """Make the sinusoid module see time and guidance, times 1000, in fp32, instead of what it is given.

    Upstream casts both to the type of the hidden states before it multiplies by 1000, which in bf16 moves a timestep by
    up to 4 of 1000. In fp32 nothing changes. Upstream looks up time first, then guidance.
    """
    values = (sigma_B,) if guidance_B is None else (sigma_B, guidance_B)
    waiting = [value.float() * TIMESTEP_SCALE for value in values]
    handle = time_proj.register_forward_pre_hook(lambda _module, _args: (waiting.pop(0),))
    try:
        yield
    finally:
        handle.remove()
    assert not waiting, "upstream looks up each sinusoid exactly once"
