"""What a run's journal tells, put in order: one value for each step that counts, however often a run was resumed.

A run that was killed goes on from its newest checkpoint, so its journal holds some steps twice; the later ones count. Lines
that are torn, or hold something else than numbers, leave gaps; nothing is made up for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outsize.base.journal import read_journal

if TYPE_CHECKING:
    from outsize.runs.folder import RunFolder

Event = Mapping[str, Any]
FIELDS = ("loss", "grad_norm", "learning_rate", "seconds", "compute_s", "copy_wait_s", "host_s")
_ENDS = ("completed", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class Step:
    """One update. values: by name of FIELDS, None where there is no finite number."""

    number: int
    time: float
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Resume:
    """A start that went on from a checkpoint. lost: steps that had been taken beyond it and were taken again."""

    step: int
    lost: int


@dataclass(slots=True)
class History:
    """All that was read. of: events by kind, in order; latest: of the session that trained last, likewise."""

    steps: list[Step] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    of: dict[str, list[Event]] = field(default_factory=dict)
    latest: dict[str, list[Event]] = field(default_factory=dict)
    num_sessions: int = 0

    def last(self, kind: str) -> Event:
        """The newest event of a kind; empty when there is none."""
        found = self.of.get(kind)
        return found[-1] if found else {}

    @property
    def trained_s(self) -> float:
        """Seconds of all steps that count."""
        return sum(one.values["seconds"] or 0.0 for one in self.steps)

    @property
    def end(self) -> Event:
        """How the last training ended; empty while it goes on, or after a kill."""
        for kind in _ENDS:
            if kind in self.latest:
                return self.latest[kind][-1]
        return {}


def read_history(run: RunFolder) -> History:
    """The history of a run folder; an empty one when it has no journal."""
    history = History()
    session: dict[str, list[Event]] = {}
    for event in read_journal(run.journal):
        kind = str(event.get("event", ""))
        if kind == "device":  # every command that opens the run begins so
            session = {}
        if kind == "step":
            _take_step(history, event)
        else:
            if kind == "resumed":
                _resume(history, whole(event.get("step")) or 0)
            session.setdefault(kind, []).append(event)
            history.of.setdefault(kind, []).append(event)
        if kind == "identity":
            history.num_sessions += 1
        if kind in {"identity", "step"}:
            history.latest = session
    return history


def _take_step(history: History, event: Event) -> None:
    number = whole(event.get("step"))
    if number is None:
        return
    if history.steps and number <= history.steps[-1].number:
        _resume(history, number - 1)
    values = {name: finite(event.get(name)) for name in FIELDS}
    history.steps.append(Step(number, finite(event.get("time")) or 0.0, values))


def _resume(history: History, step: int) -> None:
    """What comes beyond a checkpoint does not count any more."""
    before = len(history.steps)
    while history.steps and history.steps[-1].number > step:
        history.steps.pop()
    if history.resumes and history.resumes[-1].step == step and before == len(history.steps):
        return  # told by the journal, and seen by its steps
    history.resumes.append(Resume(step, before - len(history.steps)))


def finite(value: Any) -> float | None:
    """A number that can be drawn, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """A count, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_json(path: Any) -> Any:
    """A JSON file of the run folder; {} when it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def dicts(value: Any) -> Iterable[Mapping[str, Any]]:
    """The mappings among the items of what should be a list of them."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
