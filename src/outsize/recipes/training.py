"""The part of a recipe that says how it is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outsize.recipes.flow import LossChoice, TimestepChoice
from outsize.recipes.section import Added, AsTuple, Count, Section, Seed, Text


class TrainChoice(Section):
    """How it is trained."""

    steps: Count = Field(default=1000, description="Updates of the adapter.")
    batch: Count = Field(
        default=1, description="Pictures, or rows of text, per pass over the blocks."
    )
    accumulate: Count = Field(default=1, description="Passes averaged into one update.")
    optimizer: Text = Field(
        default="adamw",
        description="adamw (fp32 state), adamw8bit (a quarter of the state), prodigy (finds its step size; learning_rate: "
        "1.0) or schedulefree (averages in place of a schedule).",
    )
    optimizer_options: Annotated[dict[str, str | int | float | bool], Added()] = Field(
        default_factory=dict,
        description="The optimizer's own options, as in {d_coef: 2.0} for prodigy.",
    )
    learning_rate: float = Field(default=1.0e-4, gt=0, description="Step size after warm-up.")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        default="constant",
        description="Step size after warm-up: constant, or falling along a cosine or a line from the first step to the last.",
    )
    schedule_floor: Annotated[float, Added()] = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of learning_rate below which a falling schedule does not go.",
    )
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], AsTuple
    ] = Field(
        default=(0.9, 0.999), description="Decay of the running mean and of the running square."
    )
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    epsilon: float = Field(
        default=1e-8, gt=0, description="Added to the root of the running square."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Updates over which the step size rises from 0."
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="Largest norm of the whole gradient; null: not clipped."
    )
    seed: Seed = Field(
        default=0,
        description="Fixes every random choice: batch, crop, noise, noise level, dropout.",
    )
    ema: Annotated[float | None, Added()] = Field(
        default=None,
        gt=0,
        lt=1,
        description="Decay of a moving average of the weights, as in 0.999, kept and saved beside them (checkpoints.weights "
        "says which are used); null: none.",
    )
    loss: Annotated[LossChoice, Added()] = Field(
        default_factory=LossChoice, description="How far a prediction is from its target."
    )
    timesteps: TimestepChoice = Field(
        default_factory=TimestepChoice, description="How the noise level of each sample is drawn."
    )
    arithmetic: Text = Field(
        default="auto",
        description="Products with frozen matrices: bf16 (the device's own type), fp8 (e4m3 on cards that have it), or auto "
        "(fp8 where training was shown to be as good).",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile the blocks, which takes a minute at the first step and saves a fifth of the others; null: as "
        "planned.",
    )
    record: bool = Field(
        default=True,
        description="Launch the kernels of a compiled block as one (a CUDA graph) on cards that do so, which spares the "
        "processor a launch for each; changes no bit.",
    )
    exact: bool = Field(
        default=False,
        description="Use only kernels that give the same bits each time, so that a resumed run equals an unbroken one to "
        "the bit; on cards attention's backward is slower for it. Processors always do.",
    )
    guidance: float | None = Field(
        default=None,
        ge=0,
        description="Guidance given to guidance-distilled bases; null: the family's own for training.",
    )
