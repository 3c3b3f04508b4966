"""Laws of noise levels.

- uniform: every level alike;
- logit_normal: sigmoid of a normal draw, so that middle levels come more often;
- shifted: a logit-normal draw, moved to e^mu / (e^mu + 1/sigma - 1), where mu grows with the number of image tokens,
  because a larger picture survives more noise. It is the shift under which the family is sampled. A given shift takes the
  place of e^mu, as `shift` and `discrete_flow_shift` of other programs;
- mode: diffusers' density of that name (arXiv 2403.03206, section 3.1): 1 - u - s (cos^2(pi u / 2) - 1 + u), u uniform.
  There it is the place in a schedule that falls from pure noise, so sigma is what it leaves of 1;
- content, style: ai-toolkit's: 1 - u^3 and u^3, u uniform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outsize.base.errors import RecipeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Law = Literal["shifted", "uniform", "logit_normal", "mode", "content", "style"]
LAWS = ("shifted", "uniform", "logit_normal", "mode", "content", "style")
_SMALLEST = 2.0**-24  # half of the distance between 1 and the next smaller fp32
_MOST_DRAWS = 10_000  # a range that is missed so often has less than a thousandth of the law


@dataclass(frozen=True, slots=True)
class Levels:
    """A law with its settings; see objectives/flow_matching.py."""

    law: Law
    mean: float
    std: float
    mode_scale: float
    shift: float | None
    lowest: float
    highest: float


def draw_level(levels: Levels, generator: torch.Generator, mu: float) -> Tensor:
    """One level strictly between 0 and 1, within the range, fp32, computed in fp64.

    Levels outside the range are drawn anew, so within it the law is as it was.
    Raises: RecipeError when the law hardly ever draws one of the range.
    """
    for _ in range(_MOST_DRAWS):
        drawn = _draw(levels, generator, mu).clamp(_SMALLEST, 1 - _SMALLEST).float()
        if levels.lowest <= float(drawn) <= levels.highest:
            return drawn
    raise RecipeError(
        f"the law {levels.law} drew no noise level from {levels.lowest:g} to {levels.highest:g} in {_MOST_DRAWS} draws; "
        "widen train.timesteps.lowest and highest, or take another law"
    )


def _draw(levels: Levels, generator: torch.Generator, mu: float) -> Tensor:
    import torch

    if levels.law in ("logit_normal", "shifted"):
        normal = torch.randn((), generator=generator, dtype=torch.float64)
        drawn = torch.sigmoid(levels.mean + levels.std * normal)
        if levels.law == "logit_normal":
            return drawn
        odds = mu if levels.shift is None else math.log(levels.shift)
        # sigmoid(logit(sigma) + mu), without the pole at 0
        return drawn * math.exp(odds) / (1 + drawn * math.expm1(odds))
    drawn = torch.rand((), generator=generator, dtype=torch.float64)
    if levels.law == "uniform":
        return drawn
    if levels.law == "mode":
        bend = torch.cos(drawn * (math.pi / 2)) ** 2 - 1 + drawn
        return drawn + levels.mode_scale * bend
    return 1 - drawn**3 if levels.law == "content" else drawn**3
