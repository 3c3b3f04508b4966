"""How work says how far it is, whoever listens: a terminal, a log, nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

OnProgress = Callable[[int, int], None]
"""Told (done, total) as one task goes on; a task with nothing to do says nothing."""


class Progress(Protocol):
    """A listener."""

    def advance(self, task: str, done: float, total: float, unit: str = "") -> None:
        """`done` of `total` units of a task are done; the first call begins it, done == total ends it."""

    def say(self, line: str) -> None:
        """One line for the person watching."""


class Silent:
    """Nobody listens."""

    def advance(self, task: str, done: float, total: float, unit: str = "") -> None:
        """Heard by nobody."""

    def say(self, line: str) -> None:
        """Heard by nobody."""
