"""Progress on a terminal (rich bars) or, anywhere else, as plain lines at a bearable rate."""

from __future__ import annotations

import sys
import time
from typing import Self

from outsize.base.units import format_bytes, format_seconds

_LINE_EVERY_S = 10.0  # a log wants a line now and then, not a line a step


class PlainProgress:
    """Lines on standard error."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._said: dict[str, float] = {}
        self._finished: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def advance(self, task: str, done: float, total: float, unit: str = "") -> None:
        if task in self._finished and done >= total:
            return  # told twice
        now = time.monotonic()
        started = self._started.setdefault(task, now)
        is_finished = done >= total
        if not is_finished and now - self._said.setdefault(task, now) < _LINE_EVERY_S:
            return
        self._said[task] = now
        left = (now - started) / done * (total - done) if done else 0.0
        tail = (
            f"in {format_seconds(now - started)}" if is_finished else f"{format_seconds(left)} left"
        )
        self.say(f"{task}: {_amount(done, unit)} of {_amount(total, unit)}, {tail}")
        if is_finished:
            self._finished.add(task)
            del self._started[task]

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class RichProgress:
    """Bars with rates and remaining time, for a person at a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=False,
        )
        self._tasks: dict[str, int] = {}
        self._finished: set[str] = set()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, task: str, done: float, total: float, unit: str = "") -> None:
        if task in self._finished and done >= total:
            return  # told twice
        amount = f"{_amount(done, unit)} of {_amount(total, unit)}"
        if task not in self._tasks:
            self._tasks[task] = self._progress.add_task(task, total=total, amount=amount)
        self._progress.update(self._tasks[task], completed=done, total=total, amount=amount)  # type: ignore[arg-type]
        if done >= total:
            self._finished.add(task)
            del self._tasks[task]

    def say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False)


def open_progress() -> PlainProgress | RichProgress:
    """What suits standard error; use it as a context."""
    return RichProgress() if sys.stderr.isatty() else PlainProgress()


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return format_bytes(int(value))
    return f"{value:g} {unit}".strip()
