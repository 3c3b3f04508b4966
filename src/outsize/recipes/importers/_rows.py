"""A file's keys one by one, each with a rule that says what becomes of it; a key without a rule is told as unknown."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from outsize.base.errors import RecipeError
from outsize.recipes.importers.protocol import Row, Verdict

Told = tuple[Verdict, str]
Rule = Callable[["Draft", Any], Told]
DEFAULT = " (default)"  # behind the path of what the file leaves out
_INDEX = re.compile(r"\[\d+\]")
_WORDS = {
    "yes": True,
    "on": True,
    "no": False,
    "off": False,
}  # YAML 1.1's, which other programs read


@dataclass
class Draft:
    """The recipe so far, and the values that rules look up beside their own. where: path of the key in hand."""

    recipe: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    def set(self, path: str, value: Any) -> None:
        """Put a value into the recipe, as in "train.steps"."""
        *sections, last = path.split(".")
        at = self.recipe
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value

    def get(self, path: str, default: Any = None) -> Any:
        """A value of the file, or the default of its program."""
        return self.values.get(path, default)


def leaves(value: Any, path: str, whole: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Every key with its value, sections and lists of sections taken apart, but for paths that are read as a whole."""
    pattern = _INDEX.sub("[]", path)
    if isinstance(value, Mapping) and value and pattern not in whole:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key), whole)
    elif isinstance(value, list) and pattern not in whole and _holds_sections(value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{number}]", whole)
    else:
        yield path, value


def _holds_sections(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(one, Mapping) for one in value)


def judged(draft: Draft, found: Mapping[str, Any], rules: Mapping[str, Rule]) -> list[Row]:
    """A row for every key; DEFAULT stands behind the path of one that the file leaves out.

    Raises: RecipeError naming every key whose value is of a kind that it cannot be.
    """
    rows, faults = [], []
    for where, value in found.items():
        path = where.removesuffix(DEFAULT)
        draft.where = path
        rule = rules.get(_INDEX.sub("[]", path))
        try:
            told_of: Told = ("left out", "not known here") if rule is None else rule(draft, value)
        except (TypeError, ValueError) as error:
            faults.append(f"{where}: found {value!r}, which it cannot be ({error})")
        else:
            rows.append(Row(where, value, *told_of))
    if faults:
        raise RecipeError("; ".join(faults))
    return rows


def truth(value: Any) -> bool:
    """Whether a value means true to programs that read YAML 1.1."""
    return bool(_WORDS.get(value.lower(), value) if isinstance(value, str) else value)


def number(value: Any, otherwise: float) -> float:
    """A number that another key's rule looks up; whether it is one, its own rule says."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else otherwise


def took(path: str, *, kind: type | None = None) -> Rule:
    """The value as it is, under another name; kind: what it is made, as other programs write 1 for 1.0."""

    def rule(draft: Draft, value: Any) -> Told:
        made = value if kind is None or value is None else kind(value)
        draft.set(path, made)
        return "taken", path

    return rule


def told(verdict: Verdict, how: str) -> Rule:
    """The same whatever the value."""
    return lambda _draft, _value: (verdict, how)


def unless(off: tuple[Any, ...], reason: str, words: str = "switched off") -> Rule:
    """Something that there is not here: told, unless it is switched off. off: values that mean so; words: for them."""

    def rule(_draft: Draft, value: Any) -> Told:
        is_off = any(value is one or (value == one and type(value) is type(one)) for one in off)
        if is_off or (isinstance(value, str) and _WORDS.get(value.lower(), value) in off):
            return "no effect", words
        return "left out", reason

    return rule


def if_on(on: Rule, off: str = "switched off") -> Rule:
    """A switch: a rule for on, and words for off."""

    def rule(draft: Draft, value: Any) -> Told:
        return on(draft, value) if truth(value) else ("no effect", off)

    return rule


@cache
def table(name: str) -> dict[str, Any]:
    """A TOML file of this folder."""
    return tomllib.loads(files("outsize.recipes.importers").joinpath(name).read_text("utf-8"))


def names() -> dict[str, Any]:
    """What other programs call what is a plug-in here."""
    return table("_names.toml")
