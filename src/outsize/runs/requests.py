"""Requests to a run in progress: signals, console events and files, all acted on at the next step boundary.

SIGINT and SIGTERM (Windows: Ctrl-C, Ctrl-Break and the closing of the console) ask to save and stop; a second SIGINT
interrupts at once. The files SAVE_NOW and STOP_NOW ask the same from outside the process; PROVE_NOW asks where memory lies.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from outsize.runs.folder import RunFolder

Request = Literal["save", "stop"]
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP")  # those that the system knows are taken


class Requests:
    """What has been asked for since the last look."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._signal: str | None = None
        self._asked: tuple[Request, str] | None = None
        self._is_proof_asked = False

    def ask(self, request: Request, who: str) -> None:
        """Ask from within the process, from whatever thread."""
        self._asked = (request, who)

    def ask_proof(self) -> None:
        """Ask for a proof of where memory lies, likewise."""
        self._is_proof_asked = True

    def look(self) -> tuple[Request, str] | None:
        """The request to act on now and who made it; files are removed as they are seen."""
        if self._folder.save_now.exists():
            self._folder.save_now.unlink(missing_ok=True)
            return "save", "SAVE_NOW"
        if self._folder.stop_now.exists():
            self._folder.stop_now.unlink(missing_ok=True)
            return "stop", "STOP_NOW"
        if self._signal is not None:
            return "stop", self._signal
        asked, self._asked = self._asked, None
        return asked

    def take_proof(self) -> bool:
        """Whether a proof was asked for since the last look."""
        is_asked = self._is_proof_asked or self._folder.prove_now.exists()
        self._is_proof_asked = False
        self._folder.prove_now.unlink(missing_ok=True)
        return is_asked

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over within the block (main thread only)."""
        with signals_taken(self._on_signal):
            yield

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number).name


@contextmanager
def signals_taken(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle all signals that ask to stop within the block (main thread only)."""
    numbers = [getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, had in before.items():
            signal.signal(number, had)
