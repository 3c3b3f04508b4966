"""`on_stall: resume`: a parent that trains in a child, and starts another one from the last checkpoint when that one stalled.

A card's bad state is held by the process that computes on it and goes with it, so nothing but a fresh process will do. The
parent touches no device and imports no torch. Every start is the same command, and what the parent is asked for, the child is
asked for. A parent that is killed outright leaves a child that trains on, and is not started again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from outsize.base.errors import Stalled
from outsize.base.journal import Journal, read_journal
from outsize.runs.checkpoint import all_checkpoints
from outsize.runs.folder import RunFolder
from outsize.runs.requests import signals_taken

MOST_RESTARTS = 10
_MOST_IN_VAIN = 2  # restarts in a row from the same checkpoint
_CHILD = "OUTSIZE_SUPERVISED"  # tells a child that it is one
_POLL_S = 0.5  # Windows runs no handler of a signal while it waits


def is_supervised(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a parent looks after this process."""
    return bool(environment.get(_CHILD))


def supervise(run: RunFolder, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Run `outsize ARGUMENTS` until it ends otherwise than by a stall that a fresh process cures; its exit code."""
    num_restarts, num_in_vain, had = 0, 0, -1
    parent = _Parent(run)
    with parent.passing_on():
        while True:
            code = parent.child(arguments)
            if code != Stalled.exit_code or parent.is_asked_to_stop:
                return code
            saved = _saved(run)
            num_in_vain = 0 if saved > had else num_in_vain + 1
            had = saved
            why = _why_not(run, num_restarts, num_in_vain)
            if why:
                say(f"not started again: {why}")
                _journal(run, "warning", what=f"not started again: {why}")
                return code
            num_restarts += 1
            say(
                f"starting a fresh process after step {saved} ({num_restarts} of at most {MOST_RESTARTS})"
            )
            _journal(run, "restarted", step=saved, count=num_restarts)


def _why_not(run: RunFolder, num_restarts: int, num_in_vain: int) -> str:
    """Why a further start would not help; "" when it may."""
    stalls = [one for one in read_journal(run.journal) if one["event"] == "stall"]
    if stalls and not stalls[-1]["is_restarted"]:
        return f"a fresh process does not cure `{stalls[-1]['kind']}`"
    if num_in_vain >= _MOST_IN_VAIN:
        return f"{_MOST_IN_VAIN} fresh processes in a row came to no new checkpoint (checkpoints.every)"
    if num_restarts >= MOST_RESTARTS:
        return f"it has stalled {MOST_RESTARTS + 1} times"
    return ""


def _saved(run: RunFolder) -> int:
    """The step of the newest checkpoint."""
    found = all_checkpoints(run.checkpoints)
    return int(found[0].name) if found else 0


def _journal(run: RunFolder, event: str, **values: object) -> None:
    journal = Journal(run.journal)
    journal.write(event, **values)
    journal.close()


class _Parent:
    """Runs children one after the other, and passes on what it is asked for."""

    def __init__(self, run: RunFolder) -> None:
        self.is_asked_to_stop = False
        self._run = run
        self._child: subprocess.Popen[bytes] | None = None

    def child(self, arguments: Sequence[str]) -> int:
        """Run `outsize ARGUMENTS`; its exit code, as shells tell it."""
        command = [sys.executable, "-m", "outsize", *arguments]
        self._child = subprocess.Popen(command, env={**os.environ, _CHILD: "1"})  # noqa: S603 - a list, no shell
        while True:
            try:
                code = self._child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            return code if code >= 0 else 128 - code

    @contextmanager
    def passing_on(self) -> Iterator[None]:
        """Within the block, a signal that asks to stop asks the child.

        By the file STOP_NOW, which every system has; and by the signal, where there are any, for a child that has not come to
        its first step. Ctrl-C comes to both from a terminal, and twice means more.
        """
        try:
            with signals_taken(self._on_signal):
                yield
        finally:
            if self.is_asked_to_stop:
                self._run.stop_now.unlink(missing_ok=True)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self.is_asked_to_stop and self._run.path.exists():
            self._run.stop_now.touch()
        self.is_asked_to_stop = True
        if os.name == "posix" and number != signal.SIGINT and self._child is not None:
            self._child.send_signal(number)
