"""How an error counts: by its size, and by the noise level at which it was made.

The forms and their names are those that people know from kohya's sd-scripts, ai-toolkit and diffusers; where one name means
several things there, `recipes/flow.py` says which is meant. Outliers (a hand before the face, a watermark) pull less
where errors count linearly from c on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outsize.base.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["mse", "mae", "huber", "pseudo_huber", "smooth_l1"]
Schedule = Literal["constant", "exponential", "snr"]
Weighting = Literal["none", "sigma_sqrt", "cosmap", "bell", "half_bell", "ai_toolkit"]

# ai-toolkit's 1000 weights of its timestep_type `weighted` (measured with flex.1-alpha, as its authors say; MIT licence),
# as points (place in a schedule that falls from pure noise, weight) of a line that is nowhere off by more than 1 %.
_MEASURED = (
    (0, 0.9057), (6, 0.9692), (13, 1.1149), (14, 1.1016), (17, 1.1559), (18, 1.1438), (21, 1.1896),
    (42, 1.3436), (69, 1.4590), (81, 1.4871), (124, 1.5227), (151, 1.5094), (221, 1.4077),
    (389, 1.1011), (497, 0.9297), (569, 0.8372), (636, 0.7725), (687, 0.7378), (742, 0.7164),
    (785, 0.7137), (870, 0.7325), (904, 0.7108), (934, 0.6392), (986, 0.4576), (999, 0.4473),
)  # fmt: skip
_LAST = 999  # place of the last of the thousand levels, 1 to 1/1000
# exp(-2 (x - 1/2)^2) less its ends, over x from 0 to 1, has this mean: sqrt(pi/2) erf(1/sqrt(2)) - exp(-1/2)
_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - math.exp(-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """A measure of errors; the fields are those of a recipe's train.loss.

    Raises: RecipeError when c is not positive, or cannot fall with the noise.
    """

    kind: Kind = "mse"
    c: float = 0.1
    c_schedule: Schedule = "constant"
    weighting: Weighting = "none"

    def __post_init__(self) -> None:
        if not self.c > 0 or (self.c_schedule != "constant" and self.c >= 1):
            raise RecipeError(
                f"an error is robust from c on: c must be positive, and below 1 to fall with the noise: {self.c}"
            )

    def of(self, error: Tensor, sigma: Tensor) -> Tensor:
        """What each error counts; sigma: of its sample, shaped to be broadcast. Both fp32."""
        if self.kind == "mse":
            return error.square()
        if self.kind == "mae":
            return error.abs()
        c = self._c(sigma)
        if self.kind == "huber":
            import torch

            size = error.abs()
            return torch.where(size <= c, error.square(), c * (2 * size - c))
        # sqrt(e^2 + c^2) - c without the cancellation at small errors
        rise = error.square() / ((error.square() + c * c).sqrt() + c)
        return 2 * c * rise if self.kind == "pseudo_huber" else 2 * rise

    def factor(self, sigma_B: Tensor) -> Tensor | None:
        """By what each sample's loss is multiplied for its level; None: by nothing."""
        if self.weighting == "none":
            return None
        if self.weighting == "sigma_sqrt":
            return sigma_B**-2.0
        if self.weighting == "cosmap":
            return 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B**2))
        if self.weighting == "ai_toolkit":
            return _on_line(sigma_B)
        middle = sigma_B
        if (
            self.weighting == "half_bell"
        ):  # as high as in the middle where there is less noise than there
            middle = sigma_B.clamp(min=0.5)
        return ((-2 * (middle - 0.5) ** 2).exp() - math.exp(-0.5)) / _BELL_MEAN

    def _c(self, sigma: Tensor) -> Tensor:
        import torch

        if self.c_schedule == "constant":
            return torch.full_like(sigma, self.c)
        if self.c_schedule == "exponential":
            return self.c**sigma
        return (1 - self.c) * (1 - sigma) ** 2 + self.c


def _on_line(sigma_B: Tensor) -> Tensor:
    import torch

    places, weights = (
        torch.tensor(column, dtype=torch.float32, device=sigma_B.device)
        for column in zip(*_MEASURED, strict=True)
    )
    place_B = ((1 - sigma_B) * (_LAST + 1)).clamp(0, _LAST)
    after_B = torch.searchsorted(places, place_B).clamp(1, len(_MEASURED) - 1)
    before_B = after_B - 1
    way_B = (place_B - places[before_B]) / (places[after_B] - places[before_B])
    return torch.lerp(weights[before_B], weights[after_B], way_B)
