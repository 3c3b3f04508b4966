"""The journal: what happened, one JSON object a line, appended and flushed as it happens.

Every line has `time` (seconds since 1970), `elapsed_s` (since the journal was opened) and `event`. A line torn by a
kill is skipped by readers; it can only be the last one of a process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Follower = Callable[[dict[str, Any]], None]


class Journal:
    """An append-only JSONL file of events. Threads may write to it; a follower may as well."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._start = time.monotonic()
        self._followers: list[Follower] = []
        self._lock = threading.RLock()  # a follower may write
        needs_newline = (
            path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        )
        self._file = path.open("a", encoding="utf-8", newline="\n")
        if needs_newline:
            self._file.write("\n")

    def write(self, event: str, /, **values: Any) -> None:
        """Append one event and hand it to the system at once."""
        line = {
            "time": round(time.time(), 3),
            "elapsed_s": round(time.monotonic() - self._start, 3),
            "event": event,
        }
        text = json.dumps(line | values, ensure_ascii=False) + "\n"
        with self._lock:
            self._file.write(text)
            self._file.flush()
            for follower in tuple(self._followers):
                follower(line | values)

    @contextmanager
    def followed_by(self, follower: Follower) -> Iterator[None]:
        """Within the block someone else is told each event as well, after it is written."""
        self._followers.append(follower)
        try:
            yield
        finally:
            self._followers.remove(follower)

    def close(self) -> None:
        """Close the file; further writes are errors."""
        self._file.close()


class JournalTail:
    """Reads a journal while it grows: each call gives the events that were finished since the last one."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Events in order, torn lines left out; a line that is still being written waits for its end."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._position += len(whole)
        return [*_events(whole.decode("utf-8", "replace").split("\n"))]


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Events of a journal in order, torn lines left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from _events(file)


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict):
            yield event
