"""The part of a recipe that says which pictures are learned from."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from outsize.recipes.section import Added, AsTuple, Count, FilePath, Section, Text

_SMALLEST, _LARGEST = 16, 8192  # pixels of a side
_COLOURS = {"white": "#ffffff", "grey": "#808080", "black": "#000000"}


def _sides(value: object) -> object:
    """A resolution, or several: each a whole number of pixels, none twice; one alone is no list."""
    sides = value if isinstance(value, list | tuple) else [value]
    if not sides:
        raise PydanticCustomError("no_side", "must have at least one resolution")
    for side in sides:
        if isinstance(side, bool) or not isinstance(side, int):
            raise PydanticCustomError("int_type", "a whole number")
        if not _SMALLEST <= side <= _LARGEST:
            raise PydanticCustomError(
                "side", f"Input should be from {_SMALLEST} to {_LARGEST}, each of them"
            )
    twice = {str(side) for side in sides if sides.count(side) > 1}
    if twice:
        named = ", ".join(sorted(twice))
        raise PydanticCustomError(
            "same_side", "must not name a resolution twice: {named}", {"named": named}
        )
    return tuple(sorted(sides)) if len(sides) > 1 else sides[0]


class PictureSet(Section):
    """One folder of captioned pictures."""

    folder: FilePath = Field(
        description="Folder of pictures, searched with its sub-folders; or a Hugging Face imagefolder (metadata.jsonl or "
        ".csv) or dataset (parquet or arrow)."
    )
    manifest: Annotated[FilePath | None, Added()] = Field(
        default=None,
        description="File (.jsonl or .csv) that lists the pictures: file_name, below folder, with columns caption, weight, "
        "mask and repeats, all but the first optional; null: metadata.jsonl or metadata.csv, if there is one.",
    )
    split: Annotated[Text | None, Added()] = Field(
        default=None,
        description="Which split to take where a dataset's files are named after splits; null: train.",
    )
    caption_extension: Text = Field(
        default=".txt",
        description="Ending of the caption file beside each picture of the same name; where there is none, .json is looked "
        "for too.",
    )
    caption_column: Annotated[Text | None, Added()] = Field(
        default=None,
        description="Column of manifests and datasets, and key in .json, that holds the caption; null: caption, text or "
        "prompt.",
    )
    image_column: Annotated[Text | None, Added()] = Field(
        default=None,
        description="Column of a dataset that holds the pictures; null: image, or the one that does.",
    )
    trigger: Text | None = Field(
        default=None,
        description="Word put before every caption of this set, to call the subject by.",
    )
    default_caption: Text | None = Field(
        default=None,
        description="Caption of pictures without a caption file; null: such a picture is an error.",
    )
    share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of all samples drawn from this set; null: what other sets leave, by number of pictures.",
    )
    repeats: Annotated[Count, Added()] = Field(
        default=1,
        description="How often each picture counts in an epoch, and in shares that are null.",
    )
    loss_weight: float = Field(
        default=1.0, gt=0, description="Factor on the loss of this set's samples."
    )
    is_regularisation: bool = Field(
        default=False, description="True for other subjects, shown so that they do not change."
    )
    is_held_out: Annotated[bool, Added()] = Field(
        default=False, description="True for pictures that are only measured, never trained on."
    )
    flip: Annotated[float, Added()] = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of samples that are shown mirrored, left and right exchanged, as in 0.5.",
    )
    background: Annotated[Text, Added()] = Field(
        default="white",
        description="Colour that transparent pictures are laid on: white, grey, black or '#rrggbb'.",
    )
    masks: Annotated[FilePath | None, Added()] = Field(
        default=None,
        description="Folder of masks named as the pictures, in any format: white is learned, black is not. A picture "
        "without one is learned whole, and listed.",
    )
    alpha_as_mask: Annotated[bool, Added()] = Field(
        default=False, description="Take transparency as the mask: what is opaque is learned."
    )
    mask_floor: Annotated[float, Added()] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Weight of the loss where a mask is black; where it is white it is 1.",
    )
    mask_normalised: Annotated[bool, Added()] = Field(
        default=True,
        description="Divide the weights of each picture's mask by their mean, so that it counts as much as a picture "
        "without one; false: a small subject counts less.",
    )

    @field_validator("background")
    @classmethod
    def _is_a_colour(cls, value: str) -> str:
        found = _COLOURS.get(value.lower(), value.lower())
        if not re.fullmatch(r"#[0-9a-f]{6}", found):
            raise ValueError("must be white, grey, black or a colour such as '#ff8800'")
        return value

    @model_validator(mode="after")
    def _masks_are_of_one_kind(self) -> Self:
        if self.masks is not None and self.alpha_as_mask:
            raise ValueError(
                "masks and alpha_as_mask exclude each other: a set has masks of one kind"
            )
        return self

    @model_validator(mode="after")
    def _is_drawn_or_held_out(self) -> Self:
        if self.share is not None and self.is_held_out:
            raise ValueError("a set that is held out is not drawn from, so it has no share")
        if self.is_regularisation and self.is_held_out:
            raise ValueError("a set is for regularisation or held out, not both")
        return self

    @property
    def background_rgb(self) -> tuple[int, int, int]:
        """The background's red, green and blue, 0..255."""
        digits = _COLOURS.get(self.background.lower(), self.background).removeprefix("#")
        red, green, blue = bytes.fromhex(digits)
        return red, green, blue


class PictureChoice(Section):
    """What a model that draws learns from."""

    resolution: Annotated[int | tuple[int, ...], BeforeValidator(_sides)] = Field(
        default=1024,
        description="Pictures are scaled to about this many pixels squared (16 to 8192), in aspect buckets; a list, as in "
        "[512, 768, 1024], shows every picture at each of them.",
    )
    caption_dropout: float = Field(
        default=0.05, ge=0, le=1, description="Share of samples trained with an empty caption."
    )
    held_out: Annotated[float, Added()] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of each set's pictures that is kept from training and measured (evaluate says when), always the "
        "same ones, at least one; 0: none but those of sets that are held out.",
    )
    broken: Annotated[Literal["error", "leave_out"], Added()] = Field(
        default="error",
        description="What becomes of pictures that cannot be read: an error before anything starts, or left out of "
        "training and listed.",
    )
    sets: Annotated[tuple[PictureSet, ...], AsTuple] = Field(
        min_length=1, description="Folders of pictures; at least one."
    )

    @model_validator(mode="after")
    def _shares_leave_room(self) -> Self:
        trained = [one for one in self.sets if not one.is_held_out]
        if not trained:
            raise ValueError("all sets are held out, so there is nothing to train on")
        shares = [one.share for one in trained if one.share is not None]
        total = math.fsum(shares)
        is_all = len(shares) == len(trained)
        if (is_all and not math.isclose(total, 1)) or (not is_all and total >= 1):
            wanted = (
                "must add up to 1"
                if is_all
                else "must leave something (< 1) to the sets without one"
            )
            raise ValueError(f"the shares of the sets add up to {total:g} but {wanted}")
        return self

    @property
    def resolutions(self) -> tuple[int, ...]:
        """All resolutions, the smallest first."""
        return (self.resolution,) if isinstance(self.resolution, int) else self.resolution

    @property
    def largest(self) -> int:
        """The largest resolution: what memory must suffice for, and what is sampled at unless a recipe says."""
        return max(self.resolutions)
