"""The part of a recipe that says which pictures are learned from."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from outsize.recipes.section import AsTuple, FilePath, Section, Text


class PictureSet(Section):
    """One folder of captioned pictures."""

    folder: FilePath = Field(description="Folder of pictures, searched with its sub-folders.")
    caption_extension: Text = Field(
        default=".txt",
        description="Ending of the caption file beside each picture of the same name.",
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
    loss_weight: float = Field(
        default=1.0, gt=0, description="Factor on the loss of this set's samples."
    )
    is_regularisation: bool = Field(
        default=False, description="True for other subjects, shown so that they do not change."
    )


class PictureChoice(Section):
    """What a model that draws learns from."""

    resolution: int = Field(
        default=1024,
        ge=16,
        le=8192,
        description="Pictures are scaled to about this many pixels squared, in aspect buckets.",
    )
    caption_dropout: float = Field(
        default=0.05, ge=0, le=1, description="Share of samples trained with an empty caption."
    )
    sets: Annotated[tuple[PictureSet, ...], AsTuple] = Field(
        min_length=1, description="Folders of pictures; at least one."
    )

    @model_validator(mode="after")
    def _shares_leave_room(self) -> Self:
        shares = [one.share for one in self.sets if one.share is not None]
        total = math.fsum(shares)
        is_all = len(shares) == len(self.sets)
        if (is_all and not math.isclose(total, 1)) or (not is_all and total >= 1):
            wanted = (
                "must add up to 1"
                if is_all
                else "must leave something (< 1) to the sets without one"
            )
            raise ValueError(f"the shares of the sets add up to {total:g} but {wanted}")
        return self
