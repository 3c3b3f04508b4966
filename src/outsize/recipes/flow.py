"""The parts of a recipe that only rectified flow reads: which noise levels are drawn, and how errors are counted."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from outsize.recipes.section import Added, Section

_NARROWEST = 0.001  # one of the thousand timesteps that other programs count
_OF_OTHER_MODELS = {
    "min_snr_gamma": "weighs noise predictions by their signal-to-noise ratio",
    "snr_gamma": "weighs noise predictions by their signal-to-noise ratio",
    "debiased": "weighs noise predictions by their signal-to-noise ratio",
    "p2": "weighs noise predictions by their signal-to-noise ratio",
    "v_prediction": "is the weight of v-prediction over a noise schedule of variances",
}
_ARE_LAWS = ("logit_normal", "mode", "uniform", "content", "style")


def _not_of_other_models(value: object) -> object:
    """Refuse by name, with the reason, what is well known and has no meaning for a velocity on straight lines."""
    if value in _OF_OTHER_MODELS:
        raise ValueError(
            f"{value} {_OF_OTHER_MODELS[str(value)]}; these bases predict the velocity of a rectified flow, whose error is "
            "already scaled alike at every level. Use bell, or draw levels by train.timesteps"
        )
    if value in _ARE_LAWS:
        raise ValueError(f"{value} says which levels are drawn: set train.timesteps.law")
    return value


class TimestepChoice(Section):
    """How the noise level of each sample is drawn. A level is the share of noise: 1 is pure noise."""

    law: Literal["shifted", "uniform", "logit_normal", "mode", "content", "style"] = Field(
        default="shifted",
        description="shifted: logit-normal, moved by resolution as the family samples, or by `shift`; logit_normal and "
        "uniform: unmoved; mode: diffusers' density of that name; content and style: ai-toolkit's cubic laws, which favour "
        "much and little noise.",
    )
    mean: float = Field(default=0.0, description="Mean of the normal under the logit.")
    std: float = Field(
        default=1.0, gt=0, description="Standard deviation of the normal under the logit."
    )
    mode_scale: Annotated[float, Added()] = Field(
        default=1.29, description="Of the law `mode`: how far it is from uniform."
    )
    shift: Annotated[float | None, Added()] = Field(
        default=None,
        gt=0,
        description="Of the law `shifted`: levels become shift s / (1 + (shift - 1) s), as in 3.0; null: as the family "
        "shifts by resolution.",
    )
    lowest: Annotated[float, Added()] = Field(
        default=0.0, ge=0, lt=1, description="Levels below are not drawn (timestep / 1000)."
    )
    highest: Annotated[float, Added()] = Field(
        default=1.0, gt=0, le=1, description="Levels above are not drawn (timestep / 1000)."
    )

    @model_validator(mode="after")
    def _leaves_levels(self) -> Self:
        if self.highest - self.lowest < _NARROWEST:
            raise ValueError(
                f"from lowest {self.lowest:g} to highest {self.highest:g} there must be at least {_NARROWEST:g}"
            )
        if self.shift is not None and self.law != "shifted":
            raise ValueError(f"shift has no meaning for the law {self.law}; leave it out")
        return self


class LossChoice(Section):
    """How far a prediction is from its target."""

    kind: Literal["mse", "mae", "huber", "pseudo_huber", "smooth_l1"] = Field(
        default="mse",
        description="mse: e^2; mae: |e|; huber: e^2 up to c, then 2c|e| - c^2; pseudo_huber: 2c (sqrt(e^2 + c^2) - c), "
        "kohya's `huber`; smooth_l1: pseudo_huber / c, kohya's `smooth_l1`.",
    )
    c: float = Field(
        default=0.1,
        gt=0,
        description="Of the last three: the error from which outliers count less.",
    )
    c_schedule: Literal["constant", "exponential", "snr"] = Field(
        default="constant",
        description="constant: c at every noise level s; exponential: c^s; snr: (1 - c)(1 - s)^2 + c, so that errors under "
        "little noise count whole.",
    )
    weighting: Annotated[
        Literal["none", "sigma_sqrt", "cosmap", "bell", "half_bell", "ai_toolkit"],
        BeforeValidator(_not_of_other_models),
    ] = Field(
        default="none",
        description="Factor by noise level s: sigma_sqrt 1 / s^2 and cosmap 2 / (pi (1 - 2s + 2s^2)), as in diffusers; bell "
        "and half_bell, ai-toolkit's linear_timesteps and linear_timesteps2; ai_toolkit, its timestep_type `weighted` (with "
        "law: uniform).",
    )

    @model_validator(mode="after")
    def _c_is_a_share(self) -> Self:
        if self.c_schedule != "constant" and self.c >= 1:
            raise ValueError(f"c must be below 1 where it falls with the noise, found {self.c:g}")
        return self
