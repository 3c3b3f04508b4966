"""Plug-in folders: every file but `protocol.py` and `_helpers.py` is a plug-in named by its file.

A plug-in module binds the name `plugin`. It is imported when it is asked for, never before; there is no list of names
to edit anywhere.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outsize.base.errors import RecipeError


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a word that is not known: "did you mean 'rank'?", or all that there is."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The plug-ins of one package, for instance Catalogue("outsize.formats", "format")."""

    package: str
    noun: str

    def names(self) -> tuple[str, ...]:
        """Names of all plug-ins, sorted, without importing them."""
        path = importlib.import_module(self.package).__path__
        found = (module.name for module in pkgutil.iter_modules(path))
        return tuple(
            sorted(name for name in found if name != "protocol" and not name.startswith("_"))
        )

    def load(self, name: str) -> Any:
        """Import a plug-in and return its `plugin`.

        Raises: RecipeError naming the nearest existing plug-in when there is none of that name.
        """
        names = self.names()
        if name not in names:
            raise RecipeError(f"no {self.noun} is called {name!r}; {nearest(name, names)}")
        return importlib.import_module(f"{self.package}.{name}").plugin
