"""Rectified flow: predict the velocity noise - x from x_t = (1 - sigma) x + sigma noise.

sigma is the share of noise: 1 is pure noise, as where sampling starts. Which levels are drawn is a law (`_levels.py`); how
an error counts, by its size and its level, is in `_errors.py`.

Dimensions: B batch, C channels, H W height and width of a latent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_args

from outsize.base.errors import RecipeError
from outsize.objectives._errors import Errors
from outsize.objectives._levels import LAWS, Law, Levels, draw_level

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMatching:
    """Rectified flow with one law of noise levels and one measure of errors.

    mean, std: of the normal draw below the logit; a positive mean draws more noise. mode_scale: of the law `mode`. shift:
    factor on the odds of `shifted`; None: e^mu. lowest, highest: levels outside are drawn anew. errors: see Errors.
    Raises: RecipeError for an unknown law, a std that is not positive, or an empty range.
    """

    law: Law = "shifted"
    mean: float = 0.0
    std: float = 1.0
    mode_scale: float = 1.29
    shift: float | None = None
    lowest: float = 0.0
    highest: float = 1.0
    errors: Errors = field(default_factory=Errors)

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise RecipeError(f"no law of noise levels is called {self.law!r}")
        if not (self.std > 0 and math.isfinite(self.std) and math.isfinite(self.mean)):
            raise RecipeError(f"a normal draw needs std > 0, got mean {self.mean}, std {self.std}")
        if not 0 <= self.lowest < self.highest <= 1:
            raise RecipeError(f"no noise level is from {self.lowest} to {self.highest}")

    @classmethod
    def of_recipe(cls, timesteps: dict[str, Any], loss: dict[str, Any]) -> FlowMatching:
        """From the values of a recipe's train.timesteps and train.loss."""
        return cls(**timesteps, errors=Errors(**loss))

    def draw(
        self, seeds: Sequence[int], shape: tuple[int, ...], mu: float
    ) -> tuple[Tensor, Tensor]:
        """sigma_B and noise (B, *shape), both fp32 on the CPU: sample b's are functions of seeds[b] alone.

        mu is read by the law `shifted` only, where no shift is given.
        Raises: RecipeError when the law hardly ever draws a level of the range.
        """
        import torch

        levels = Levels(*(getattr(self, one.name) for one in fields(Levels)))
        sigmas, noises = [], []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            sigmas.append(draw_level(levels, generator, mu))
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
        """Mean over samples of weight x what errors count; mixing, target and error are fp32.

        Shapes: clean and noise (B, ...), all on one device; weight_B (B,), or (B, 1, H, W) of each latent cell; predict
        takes (noisy in `compute`, sigma_B fp32).
        """
        error = self._error(predict, clean, sigma_B, noise, compute)
        sigma = sigma_B.float().view(-1, *(1 for _ in clean.shape[1:]))
        per_sample_B = _weighed(self.errors.of(error, sigma), weight_B)
        factor_B = self.errors.factor(sigma_B.float())
        return (per_sample_B if factor_B is None else factor_B * per_sample_B).mean()

    def squared(  # noqa: PLR0917 - the protocol's order
        self,
        predict: Callable[[Tensor, Tensor], Tensor],
        clean: Tensor,
        sigma_B: Tensor,
        noise: Tensor,
        weight_B: Tensor,
        compute: torch.dtype,
    ) -> Tensor:
        """As `loss`, of squared errors, whatever training makes of them."""
        error = self._error(predict, clean, sigma_B, noise, compute)
        return _weighed(error.square(), weight_B).mean()

    @staticmethod
    def _error(
        predict: Callable[[Tensor, Tensor], Tensor],
        clean: Tensor,
        sigma_B: Tensor,
        noise: Tensor,
        compute: torch.dtype,
    ) -> Tensor:
        clean, noise, sigma_B = clean.float(), noise.float(), sigma_B.float()
        sigma = sigma_B.view(-1, *(1 for _ in clean.shape[1:]))
        noisy = (1 - sigma) * clean + sigma * noise
        return predict(noisy.to(compute), sigma_B).float() - (noise - clean)


def _weighed(counted: Tensor, weight_B: Tensor) -> Tensor:
    """The mean of each sample (B), times its weight, or of its cells times theirs."""
    if weight_B.dim() > 1:
        return (weight_B.float() * counted).flatten(1).mean(dim=1)
    return weight_B.float() * counted.flatten(1).mean(dim=1)


assert set(LAWS) == set(get_args(Law))
plugin = FlowMatching
