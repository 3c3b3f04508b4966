"""The part of a recipe that says which texts a language model learns from.

Which rows of a file mean what is read off the names of their columns; where those are others than usual, the recipe
names them. Nothing here knows a tokenizer: roles, templates and lengths are checked where the texts are read.
"""

from __future__ import annotations

import datetime as dt
import math
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from outsize.recipes.section import AsTuple, Count, FilePath, Section, Text

Kind = Literal["auto", "messages", "pairs", "text"]
TrainOn = Literal["assistant", "last_turn", "everything"]
LongSamples = Literal["truncate", "split", "refuse"]


def _word_to_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class TextSet(Section):
    """One file or folder of texts."""

    path: FilePath = Field(
        description="A file (.jsonl, .json, .parquet, .arrow, .txt) or a folder of them, as a Hugging Face dataset is one."
    )
    split: Text = Field(
        default="train",
        description="Which split to take where a folder's files are named after splits.",
    )
    kind: Kind = Field(
        default="auto",
        description="messages (conversations), pairs (prompt and completion), text, or auto: as the columns are named.",
    )
    messages: Text | None = Field(
        default=None, description="Column of the conversation; null: messages or conversations."
    )
    prompt: Annotated[tuple[Text, ...], AsTuple, BeforeValidator(_word_to_tuple)] = Field(
        default=(),
        description="Columns that make the prompt, as in [instruction, input], joined by an empty line; none: prompt.",
    )
    completion: Text | None = Field(
        default=None, description="Column of the completion; null: completion or response."
    )
    text: Text | None = Field(default=None, description="Column of plain text; null: text.")
    as_chat: bool = Field(
        default=True,
        description="Word pairs as a user's and an assistant's turn by the chat template; false: completion right after "
        "prompt, as they stand.",
    )
    train_on: TrainOn = Field(
        default="assistant",
        description="assistant (every assistant turn or completion), last_turn (the last one only) or everything "
        "(prompts too). Plain text is always trained whole.",
    )
    share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of all rows of a batch drawn from this set; null: what other sets leave, by number of tokens.",
    )
    loss_weight: float = Field(
        default=1.0, gt=0, description="Factor on the loss of this set's samples."
    )
    is_held_out: bool = Field(
        default=False, description="True for texts that are only evaluated, never trained on."
    )

    @field_validator("path")
    @classmethod
    def _is_readable(cls, value: PurePath) -> PurePath:
        if value.suffix.lower() in {".csv", ".tsv", ".xlsx"}:
            raise ValueError(f"{value.suffix} is not read; convert it to .jsonl or .parquet")
        return value

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        named = {
            "messages": self.messages is not None,
            "pairs": bool(self.prompt) or self.completion is not None,
            "text": self.text is not None,
        }
        kinds = [kind for kind, is_named in named.items() if is_named]
        if len(kinds) > 1 or (self.kind != "auto" and any(kind != self.kind for kind in kinds)):
            raise ValueError(
                f"columns are named for {' and '.join(kinds)}, but a set has one kind"
                + ("" if self.kind == "auto" else f", here {self.kind}")
            )
        if self.share is not None and self.is_held_out:
            raise ValueError("a set that is held out is not drawn from, so it has no share")
        return self


class TextChoice(Section):
    """What a language model learns from."""

    sets: Annotated[tuple[TextSet, ...], AsTuple] = Field(
        min_length=1, description="Files or folders of texts; at least one that is not held out."
    )
    window: int = Field(
        default=2048,
        ge=8,
        le=1 << 20,
        description="Tokens of one row; no sample is seen further than this.",
    )
    pack: bool = Field(
        default=True,
        description="Fill each row with several samples, which do not see each other; false: one sample a row.",
    )
    long_samples: LongSamples | None = Field(
        default=None,
        description="Samples longer than the window: truncate, split into several or refuse; null: split plain text, "
        "truncate the others.",
    )
    held_out: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of samples that are kept from training and evaluated on, always the same ones.",
    )
    held_out_limit: Count = Field(
        default=500, description="At most this many samples of each set are held out by share."
    )
    template_options: dict[str, str | int | float | bool] = Field(
        default_factory=dict,
        description="Variables for the chat template, as in {enable_thinking: false}.",
    )
    today: Text = Field(
        default="2026-01-01",
        description="The date that chat templates are told which ask for one, so that a run does not change overnight.",
    )

    @field_validator("today")
    @classmethod
    def _is_a_date(cls, value: str) -> str:
        try:
            dt.date.fromisoformat(value)
        except ValueError as error:
            raise ValueError("must be a date such as 2026-01-01") from error
        return value

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
