"""The recipe explained by itself: every field with its meaning, kind and default, as commented YAML.

Nothing is written down here that the models do not say, so it cannot drift from what is accepted.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from outsize.recipes.data import DATA_KINDS, kind_of_keys
from outsize.recipes.recipe import FormatChoice, Recipe
from outsize.recipes.section import Bytes, Section, sections_in

_WIDTH = 98
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}
_LIMITS = {
    annotated_types.Ge: ("ge", "at least {}"),
    annotated_types.Gt: ("gt", "more than {}"),
    annotated_types.Le: ("le", "at most {}"),
    annotated_types.Lt: ("lt", "less than {}"),
}


def explain(filled: Mapping[str, Any] | None = None) -> str:
    """All fields as commented YAML; `filled` gives values by dotted name to required ones ("base.family").

    With every required field filled the text is itself a valid recipe. Where data may be of several kinds, it is explained
    for that of the filled fields; with none filled for all of them, those but the first commented out.
    """
    return "\n".join(_section(Recipe, "", 0, filled or {})) + "\n"


def _section(
    section: type[Section], path: str, depth: int, filled: Mapping[str, Any]
) -> Iterator[str]:
    for name, info in section.model_fields.items():
        if depth == 0 and name != "name":
            yield ""
        yield from _field(name, info, f"{path}.{name}" if path else name, depth, filled)


def _field(
    name: str, info: FieldInfo, path: str, depth: int, filled: Mapping[str, Any]
) -> Iterator[str]:
    indent = "  " * depth
    inner = next(iter(sections_in(info.annotation)), None)
    yield from _comment(str(info.description), indent)
    if inner is None or inner is FormatChoice:
        yield from _comment(_kind(info, is_required=info.is_required()), indent)
        yield f"{indent}{name}: {_value(info, filled.get(path))}".rstrip()
    elif get_origin(info.annotation) is dict:
        yield f"{indent}{name}: {{}}"
        lines = _section(inner, path, 0, filled)
        yield from _comment("for instance", indent + "  ")
        yield f"{indent}  # slot:"
        yield from (f"{indent}  #   {line}" for line in lines if line)
    elif len(sections_in(info.annotation)) > 1:
        yield f"{indent}{name}:"
        yield from _alternatives(sections_in(info.annotation), path, depth + 1, filled)
    elif get_origin(info.annotation) is tuple and not info.is_required():
        yield f"{indent}{name}: []"
        yield from _comment("for instance", indent + "  ")
        yield f"{indent}  # -"
        yield from (f"{indent}  #   {line}" for line in _section(inner, path, 0, filled) if line)
    elif get_origin(info.annotation) is tuple:
        yield f"{indent}{name}:"
        yield f"{indent}  -"
        yield from _section(inner, path, depth + 2, filled)
    else:
        yield f"{indent}{name}:"
        yield from _section(inner, path, depth + 1, filled)


def _alternatives(
    sections: tuple[type[Section], ...], path: str, depth: int, filled: Mapping[str, Any]
) -> Iterator[str]:
    keys = [part for one in filled if one.startswith(f"{path}.") for part in one.split(".")]
    if keys:
        yield from _section(DATA_KINDS[kind_of_keys(keys)], path, depth, filled)
        return
    yield from _section(sections[0], path, depth, filled)
    for kind, section in DATA_KINDS.items():
        if section is not sections[0]:
            yield f"{'  ' * depth}# or, for a base that learns from {kind}:"
            lines = _section(section, path, 0, filled)
            yield from (f"{'  ' * depth}#   {line}".rstrip() for line in lines if line)


def _comment(text: str, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )


def _kind(info: FieldInfo, *, is_required: bool) -> str:
    """Kind and limits in words, as in "whole number, at least 1", and whether it is required."""
    limits = []
    for limit in info.metadata:
        attribute, text = _LIMITS.get(type(limit), ("", ""))
        if attribute:
            limits.append(text.format(_limit(getattr(limit, attribute))))
    words = [_type_words(info.annotation), *limits] + (["required"] if is_required else [])
    return f"({', '.join(words)})"


def _limit(value: float) -> str:
    # The largest seed is a property of 64-bit integers; nobody reads nineteen digits.
    return (
        f"2^{value.bit_length() - 1}" if isinstance(value, int) and value > 2**53 else f"{value:g}"
    )


def _type_words(annotation: Any) -> str:
    """A type in the words of people who write YAML."""
    origin, args = get_origin(annotation), get_args(annotation)
    words = _WORDS.get(annotation, str(annotation))
    if annotation is Bytes:
        words = "size with a unit"
    elif annotation is FormatChoice:
        words = "name, or mapping with name and options"
    elif origin is Literal:
        words = " | ".join(str(arg) for arg in args)
    elif origin is tuple:
        count = "" if Ellipsis in args else f"{len(args)} x "
        words = f"list of {count}{_type_words(args[0])}"
    elif origin in {Union, UnionType}:
        kinds = [_type_words(arg) for arg in args if arg is not NoneType]
        words = " or ".join([*kinds, "null"] if NoneType in args else kinds)
    elif hasattr(annotation, "__metadata__"):
        words = _type_words(args[0])
    return words


def _value(info: FieldInfo, filled: Any) -> str:
    """The default, or what the caller filled in, as YAML."""
    value = filled if info.is_required() else info.get_default(call_default_factory=True)
    if info.is_required() and filled is None:
        return ""
    if isinstance(value, FormatChoice):
        return value.name
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, tuple):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    return (
        value if isinstance(value, str) and value.replace("_", "").isalnum() else json.dumps(value)
    )
