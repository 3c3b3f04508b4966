"""Risky calls in child processes: one that hangs is ended, one that dies is blamed, and the rest go on in a new child.

Calls of one child share its start (importing torch takes seconds); whatever goes wrong costs only that sharing. A child is
a fresh interpreter, never a fork, and what it prints goes to files: a pipe that a grandchild keeps open would hold us.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

_POLL_S = 0.05
_START_S = 120.0  # until the first call begins: an interpreter on a cold disk
_END_S = 5.0  # until a killed child is gone; one that waits in a driver may never be
_TAIL = 2000  # characters of what a child said last


@dataclass(frozen=True, slots=True)
class Call:
    """One call: "module:function" with arguments of JSON, and the seconds that it may take."""

    name: str
    target: str
    arguments: Sequence[Any] = ()
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call. value: what it gave; said: the end of what the child wrote to standard error.

    end: "done", "raised" (why: the error), "hung" (longer than its time) or "died" (why: the signal or exit code).
    """

    name: str
    end: Literal["done", "raised", "hung", "died"]
    seconds: float
    value: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    said: str = ""


def run_calls(
    calls: Sequence[Call], environment: Mapping[str, str] | None = None
) -> Iterator[Outcome]:
    """Outcomes one by one, in order; each call is made once. environment: added to the children's."""
    rest = list(calls)
    while rest:
        num_before = len(rest)
        for outcome in _one_child(rest, {**os.environ, **(environment or {})}):
            rest = rest[1:]
            yield outcome
        assert len(rest) < num_before, "every child settles a call at least"


def _one_child(calls: Sequence[Call], environment: Mapping[str, str]) -> Iterator[Outcome]:
    """Outcomes until all calls are made or one has not ended well."""
    with tempfile.TemporaryDirectory(prefix="outsize-doctor-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        spec, report, said = (folder / name for name in ("calls.json", "report", "said"))
        spec.write_text(json.dumps([[c.name, c.target, list(c.arguments)] for c in calls]))
        report.touch()
        command = [sys.executable, "-m", "outsize.doctor._child", str(spec), str(report)]
        with said.open("wb") as errors:
            child = subprocess.Popen(  # noqa: S603 - a fixed list, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
            )
        try:
            for call in calls:
                outcome = _wait(child, call, report, said)
                yield outcome
                if outcome.end != "done":
                    return
        finally:
            _end(child)


def _wait(child: subprocess.Popen[bytes], call: Call, report: Path, said: Path) -> Outcome:
    """Until one call has ended, its time is over or the child is gone."""
    waited_from = time.monotonic()
    begun: float | None = None
    while True:
        is_over = child.poll() is not None  # before reading: what it wrote last is then there
        lines = _lines(report)
        now = time.monotonic()
        if begun is None and {"begin": call.name} in lines:
            begun = now
        told = next((line for line in lines if line.get("end") == call.name), None)
        if told is not None and "error" in told:
            return Outcome(call.name, "raised", now - waited_from, why=told["error"])
        if told is not None:
            return Outcome(call.name, "done", told["seconds"], value=told["value"] or {})
        if is_over:
            why = _ending(child.returncode)
            return Outcome(call.name, "died", now - waited_from, why=why, said=_tail(said))
        limit = _START_S if begun is None else call.timeout_s
        if now - (waited_from if begun is None else begun) > limit:
            return Outcome(
                call.name, "hung", now - waited_from, why=f"over {limit:g} s", said=_tail(said)
            )
        time.sleep(_POLL_S)


def _lines(report: Path) -> list[dict[str, Any]]:
    """Whole lines of the report; the last one may be half written."""
    whole = report.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _ending(code: int) -> str:
    """How a process ended, as people look it up: a signal's name, an NTSTATUS, an exit code."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    # Windows' codes of crashes: 0xC0000005 is an access violation
    return f"exit code {code:#x}" if code > 255 else f"exit code {code}"


def _tail(said: Path) -> str:
    return said.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and all that it started; compilers are grandchildren."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(child.pid).children(recursive=True)
    if child.poll() is None:
        child.kill()
    for process in started:
        with contextlib.suppress(psutil.Error):
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits in a driver: go on without it
        child.wait(_END_S)
