"""The parts of a recipe that say what is trained and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outsize.base.table import Role
from outsize.recipes.section import AsTuple, Count, Section, Seed, Text


class AdapterChoice(Section):
    """What is trained: a low-rank adapter."""

    rank: Count = Field(default=16, description="Rank of the adapter's matrices.")
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="The adapter's effect is scaled by alpha / rank; null: alpha = rank.",
    )
    roles: Annotated[tuple[Role, ...], AsTuple] = Field(
        default=("attention", "mlp"),
        min_length=1,
        description="Kinds of linears inside the blocks that get an adapter.",
    )

    @property
    def effective_alpha(self) -> float:
        """Alpha with its default filled in."""
        return float(self.rank) if self.alpha is None else self.alpha


class TimestepChoice(Section):
    """How the noise level of each sample is drawn."""

    law: Literal["shifted", "uniform", "logit_normal"] = Field(
        default="shifted",
        description="shifted: logit-normal, moved by resolution as the family samples; the others: unmoved.",
    )
    mean: float = Field(default=0.0, description="Mean of the normal under the logit.")
    std: float = Field(
        default=1.0, gt=0, description="Standard deviation of the normal under the logit."
    )


class TrainChoice(Section):
    """How it is trained."""

    steps: Count = Field(default=1000, description="Updates of the adapter.")
    batch: Count = Field(
        default=1, description="Pictures, or rows of text, per pass over the blocks."
    )
    accumulate: Count = Field(default=1, description="Passes averaged into one update.")
    optimizer: Text = Field(
        default="adamw", description="adamw (fp32 state) or adamw8bit (a quarter of the state)."
    )
    learning_rate: float = Field(default=1.0e-4, gt=0, description="Step size after warm-up.")
    schedule: Literal["constant", "cosine"] = Field(
        default="constant",
        description="Step size after warm-up: constant, or falling along a cosine to a twentieth at the last step.",
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
