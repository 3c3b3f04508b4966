"""From noise to latents: Euler steps along the family's own flow schedule.

Dimensions: B batch, C channels, H W latent height and width. Noise comes from one CPU generator per picture, so a
picture depends on its seed alone, not on its neighbours in a batch or on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Predict = Callable[[Tensor, Tensor], Tensor]
"""(noisy_BCHW, sigma_B) -> velocity (noise - data), same shape."""


def noise_of(seeds: Sequence[int], shape: tuple[int, int, int]) -> Tensor:
    """Standard normal noise (B, *shape), fp32 on the host."""
    return torch.stack(
        [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


def guided(with_prompt: Predict, without: Predict, scale: float) -> Predict:
    """Classifier-free guidance with two predictions: u + scale x (c - u)."""

    def predict(noisy: Tensor, sigma: Tensor) -> Tensor:
        blank = without(noisy, sigma)
        return blank + scale * (with_prompt(noisy, sigma) - blank)

    return predict


@torch.no_grad()
def integrate(
    predict: Predict,
    noise_BCHW: Tensor,
    sigmas: Sequence[float],
    *,
    compute: torch.dtype,
) -> Tensor:
    """Clean latents, fp32: x moves by (sigma' - sigma) x velocity for each pair of neighbours in `sigmas`.

    sigmas fall from near 1 to 0. The state is fp32 throughout; the model sees it in `compute`.
    """
    x = noise_BCHW.float()
    for sigma, following in itertools.pairwise(sigmas):
        sigma_B = torch.full((x.shape[0],), sigma, dtype=torch.float32, device=x.device)
        velocity = predict(x.to(compute), sigma_B).float()
        x = x + (following - sigma) * velocity
    return x
