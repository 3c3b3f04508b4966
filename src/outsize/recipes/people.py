"""The part of a recipe that says whom it shows and who asks to."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from outsize.base.pseudonyms import pseudonym_fault
from outsize.recipes.section import AsTuple, Section, Text


class PeopleChoice(Section):
    """Whom the data show, and who asks; see `outsize registry`."""

    subjects: Annotated[tuple[Text, ...], AsTuple] = Field(
        default=(),
        description="Ids of the people whom the data show, as `outsize registry subject add` makes; each must have agreed. None: "
        "nobody is asked.",
    )
    requester: Text | None = Field(
        default=None,
        description="Id of who asks, as `outsize registry party add` makes; the variable OUTSIZE_REQUESTER goes before it.",
    )

    @field_validator("subjects")
    @classmethod
    def _are_pseudonyms(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        faults = [fault for one in value if (fault := pseudonym_fault(one, "s"))]
        if faults:
            raise ValueError("; ".join(faults))
        return value

    @field_validator("requester")
    @classmethod
    def _is_a_pseudonym(cls, value: str | None) -> str | None:
        fault = None if value is None else pseudonym_fault(value, "s", "p")
        if fault:
            raise ValueError(fault)
        return value
