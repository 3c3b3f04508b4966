"""The parts of a recipe that say what is made to be looked at; none changes what is learned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outsize.recipes.section import AsTuple, Count, Section, Seed, Text


class CompareChoice(Section):
    """What `outsize compare` and `outsize sample` make, with the adapter and without."""

    prompts: Annotated[tuple[Text, ...], AsTuple] = Field(
        default=(),
        description="Prompts for what was learned; none: captions of the training set, or beginnings of held-out texts.",
    )
    controls: Annotated[tuple[Text, ...], AsTuple] = Field(
        default=(), description="Prompts whose pictures or texts must not change."
    )
    seeds: Annotated[tuple[Seed, ...], AsTuple] = Field(
        default=(0,), min_length=1, description="Seeds; every prompt is rendered with each."
    )
    steps: Count | None = Field(
        default=None, description="Pictures: sampling steps; null: the family's own."
    )
    guidance: float | None = Field(
        default=None, ge=0, description="Pictures: guidance; null: the family's own."
    )
    width: Count | None = Field(
        default=None, description="Pictures: pixels; null: data.resolution."
    )
    height: Count | None = Field(
        default=None, description="Pictures: pixels; null: data.resolution."
    )
    max_tokens: Count = Field(default=200, description="Text: tokens written at most.")
    temperature: float = Field(
        default=0.7, ge=0, description="Text: how freely tokens are drawn; 0: always the likeliest."
    )
    top_p: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="Text: tokens are drawn among the likeliest that together have this probability.",
    )


class PreviewChoice(Section):
    """Pictures or texts made while training, as far as it is; they change no bit of it."""

    every: Count | None = Field(
        default=None,
        description="Updates between previews; null: none are made. The last update has one as well.",
    )
    at_start: bool = Field(
        default=True,
        description="Also before the first update: what the base makes of the prompts by itself.",
    )
    prompts: Annotated[tuple[Text, ...], AsTuple] = Field(
        default=(),
        description="Prompts; none: those of compare, or up to four captions or beginnings as there.",
    )
    seeds: Annotated[tuple[Seed, ...], AsTuple] = Field(
        default=(), description="Seeds; every prompt is made with each; none: those of compare."
    )
    steps: Count | None = Field(
        default=None, description="Pictures: sampling steps; null: as in compare."
    )
    guidance: float | None = Field(
        default=None, ge=0, description="Pictures: guidance; null: as in compare."
    )
    width: Count | None = Field(default=None, description="Pictures: pixels; null: as in compare.")
    height: Count | None = Field(default=None, description="Pictures: pixels; null: as in compare.")
    decode: Literal["auto", "now", "end"] = Field(
        default="auto",
        description="Pictures: when latents become pixels: at once, with the image codec beside the base; at the end, when "
        "the base is gone (until then latents are kept); or auto: at once where the plan has room for that.",
    )

    def over(self, compare: CompareChoice) -> CompareChoice:
        """How previews are made: what is said here, the rest as in compare; without controls."""
        said = {
            name: value
            for name in ("prompts", "seeds", "steps", "guidance", "width", "height")
            if (value := getattr(self, name)) not in {None, ()}
        }
        return compare.model_copy(update={**said, "controls": ()})
