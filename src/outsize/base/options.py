"""From the options of a recipe to a plug-in's frozen dataclass, or to an error that says what is allowed.

The dataclass is the whole description: its fields are the options, their annotations (Literal, int, float, bool, str)
the allowed values, and its `__post_init__`, where it has one, the rest.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from outsize.base.errors import RecipeError

_ARTICLED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def build_with_options(name: str, plugin: type[Any], options: Mapping[str, Any]) -> Any:
    """An instance of the plug-in's dataclass. name: what to call it in errors, as in "format 'nf4'".

    Raises: RecipeError naming every unknown option, with the nearest real one, and every value that is not allowed.
    """
    allowed = allowed_values(plugin)
    faults = [_unknown(option, allowed) for option in options if option not in allowed]
    hints = typing.get_type_hints(plugin)
    faults += [
        f"{option} is {options[option]!r} but must be {allowed[option]}"
        for option in allowed.keys() & options.keys()
        if not _is_allowed(hints[option], options[option])
    ]
    if faults:
        raise RecipeError(f"{name}: {'; '.join(sorted(faults))}")
    return plugin(**options)


def allowed_values(plugin: type[Any]) -> dict[str, str]:
    """What each option may be, in words: {"group": "64 or 32"}; in the order of the fields."""
    hints = typing.get_type_hints(plugin)
    return {field.name: _in_words(hints[field.name]) for field in dataclasses.fields(plugin)}


def _unknown(option: str, allowed: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(option, allowed, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(f"{known} ({values})" for known, values in allowed.items()) or "none"
    return f"no option is called {option!r}; {hint}there are: {known}"


def _in_words(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return _joined([str(value) for value in typing.get_args(hint)])
    return _ARTICLED[hint]


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _is_allowed(hint: Any, value: Any) -> bool:
    """Exact types: YAML's `true` is no 1 and "64" is no 64; a whole number is a number, though."""
    if typing.get_origin(hint) is Literal:
        return any(value == one and type(value) is type(one) for one in typing.get_args(hint))
    return type(value) is hint or (hint is float and type(value) is int)
