"""What an importer is: another program's file becomes a recipe, and nothing that it says is dropped without a word.

Every key of the file gets a row that says what became of it, and so does every default of the other program that differs
from ours. Keys that an importer does not know are rows as well. The recipe is plain values, which the strict loader then
judges like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from outsize.base.catalogue import Catalogue
from outsize.base.errors import RecipeError

IMPORTERS = Catalogue("outsize.recipes.importers", "importer")

# taken: means the same here. changed: means something else here, or is reached otherwise. left out: there is no such thing.
# no effect: decides nothing that is learned, or is switched off.
Verdict = Literal["taken", "changed", "left out", "no effect"]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one key. where: its path in the file; "(default)" behind it where the file leaves it out."""

    where: str
    value: Any
    verdict: Verdict
    how: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person says beside the file, or instead of it. base: family.variant; source: of its weights."""

    name: str
    base: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """What a file became. recipe: plain values, base empty where the file says none. rows: one for each key, defaults behind.

    program: whose file it is.
    """

    program: str
    recipe: dict[str, Any]
    rows: tuple[Row, ...]


class Importer(Protocol):
    """Files of one kind."""

    def recognises(self, value: Mapping[str, Any]) -> bool:
        """Whether a file's values are of that kind, by the keys at its top."""

    def read(self, value: Mapping[str, Any], asked: Asked) -> Imported:
        """The recipe that the values describe.

        Raises: RecipeError for what no recipe can be made of: another kind of job, a base that is not supported.
        """


def importer_of(value: Mapping[str, Any], origin: str) -> Importer:
    """The importer that knows a file.

    Raises: RecipeError naming those that there are.
    """
    for name in IMPORTERS.names():
        plugin: Importer = IMPORTERS.load(name)
        if plugin.recognises(value):
            return plugin
    keys = ", ".join(list(value)[:6]) or "none"
    raise RecipeError(
        f"{origin}: no importer knows such a file (keys at its top: {keys}); there are {', '.join(IMPORTERS.names())}"
    )
