"""What all parts of a recipe share: the strict foundation and the kinds of value a field may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from outsize.base.errors import RecipeError
from outsize.base.units import parse_bytes


def _list_to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _text_to_path(value: object) -> object:
    return Path(value) if isinstance(value, str) and value else value


def _text_to_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except RecipeError as error:
        raise ValueError(str(error)) from error


AsTuple = BeforeValidator(_list_to_tuple)
FilePath = Annotated[Path, BeforeValidator(_text_to_path)]
Text = Annotated[str, Field(min_length=1)]
Bytes = Annotated[int, BeforeValidator(_text_to_bytes), Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Added:
    """Marks a field that came after runs existed: see numbers.py."""


class Section(BaseModel):
    """What all parts of a recipe share: frozen, strict, no unknown keys, finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )


def sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """Sections named by a field's type, through lists, mappings, unions and `| None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(found for inner in get_args(annotation) for found in sections_in(inner))
