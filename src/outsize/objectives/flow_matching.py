"""Rectified flow: predict the velocity noise - x from x_t = (1 - sigma) x + sigma noise.

sigma is the share of noise: 1 is pure noise, as where sampling starts. Laws of sigma:

- uniform: every level alike;
- logit_normal: sigmoid of a normal draw, so that middle levels come more often;
- shifted: a logit-normal draw, moved to e^mu / (e^mu + 1/sigma - 1), where mu grows with the number of image tokens,
  because a larger picture survives more noise. It is the shift under which the family is sampled.

Dimensions: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outsize.base.errors import RecipeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LAWS = ("shifted", "uniform", "logit_normal")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMatching:
    """Rectified flow with one law of noise levels.

    mean, std: of the normal draw below the logit; a positive mean draws more noise.
    Raises: RecipeError for an unknown law, or a std that is not positive.
    """

    law: Literal["shifted", "uniform", "logit_normal"] = "shifted"
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise RecipeError(f"no law of noise levels is called {self.law!r}")
        if not (self.std > 0 and math.isfinite(self.std) and math.isfinite(self.mean)):
            raise RecipeError(f"a normal draw needs std > 0, got mean {self.mean}, std {self.std}")

    def draw(
        self, seeds: Sequence[int], shape: tuple[int, ...], mu: float
    ) -> tuple[Tensor, Tensor]:
        """sigma_B and noise (B, *shape), both fp32 on the CPU: sample b's are functions of seeds[b] alone.

        mu is read by the law `shifted` only.
        """
        import torch

        sigmas, noises = [], []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            sigmas.append(self._sigma(generator, mu))
            noises.append(torch.randn(shape, generator=generator))
        return torch.stack(sigmas), torch.stack(noises)

    def loss(  # noqa: PLR0917 - the protocol's order
        self,
        predict: Callable[[Tensor, Tensor], Tensor],
        clean: Tensor,
        sigma_B: Tensor,
        noise: Tensor,
        weight_B: Tensor,
        compute: torch.dtype,
    ) -> Tensor:
        """Mean over samples of weight x MSE; mixing, target and error are fp32.

        Shapes: clean and noise (B, ...), all on one device; weight_B (B,), or (B, 1, H, W) of each latent cell; predict takes (noisy in `compute`, sigma_B fp32).
        """
        clean, noise = clean.float(), noise.float()
        sigma = sigma_B.float().view(-1, *(1 for _ in clean.shape[1:]))
        noisy = (1 - sigma) * clean + sigma * noise
        error = predict(noisy.to(compute), sigma_B.float()).float() - (noise - clean)
        if weight_B.dim() > 1:
            return (weight_B.float() * error.square()).flatten(1).mean(dim=1).mean()
        per_sample_B = error.square().flatten(1).mean(dim=1)
        return (weight_B.float() * per_sample_B).mean()

    def _sigma(self, generator: torch.Generator, mu: float) -> Tensor:
        """One level strictly between 0 and 1, fp32, computed in fp64."""
        import torch

        if self.law == "uniform":
            drawn = torch.rand((), generator=generator, dtype=torch.float64)
        else:
            normal = torch.randn((), generator=generator, dtype=torch.float64)
            drawn = torch.sigmoid(self.mean + self.std * normal)
        if self.law == "shifted":
            # sigmoid(logit(sigma) + mu), without the pole at 0
            drawn = drawn * math.exp(mu) / (1 + drawn * math.expm1(mu))
        return drawn.clamp(_SMALLEST, 1 - _SMALLEST).float()


_SMALLEST = 2.0**-24  # half of the distance between 1 and the next smaller fp32

plugin = FlowMatching
