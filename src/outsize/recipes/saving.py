"""The parts of a recipe that say what is saved and what is measured on the way."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outsize.recipes.section import Count, Section


class CheckpointChoice(Section):
    """What is saved on the way."""

    every: Count = Field(
        default=250, description="Steps between checkpoints; the last step is always saved."
    )
    keep: Count = Field(default=3, description="Newest checkpoints kept.")
    weights: Literal["averaged", "raw"] = Field(
        default="averaged",
        description="Which weights are evaluated, sampled, compared and exported, where an average is kept (train.ema, or "
        "the optimizer schedulefree); both are saved.",
    )


class EvaluateChoice(Section):
    """What is measured on the way, on data that is never trained on."""

    every: Count | None = Field(
        default=None,
        description="Updates between measurements; null: a tenth of all. Base and adapter are measured at the end as well.",
    )
    rows: Count = Field(
        default=64,
        description="At most this many rows of text, or passes over a picture at one of five levels of noise; always the "
        "same ones.",
    )
