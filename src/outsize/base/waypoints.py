"""How a start goes: named moments, in seconds since the process began, each marked once.

A process exists before Python runs a line of ours; its own age, as the system tells it, is where counting begins.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_STAT = Path("/proc/self/stat")
_START_FIELD = 19  # "starttime", counted from the field after the program's name (proc_pid_stat(5))


@dataclass(frozen=True, slots=True)
class Leg:
    """What passed before one waypoint: since the one before it, and as a share of all."""

    name: str
    at_s: float
    seconds: float
    share: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "name": self.name,
            "at_s": round(self.at_s, 3),
            "seconds": round(self.seconds, 3),
            "share": round(self.share, 4),
        }


class Waypoints:
    """The moments of one start, in order. is_whole: counted from the process's own beginning, not from this object's."""

    def __init__(self, *, age_s: float = 0.0, is_whole: bool = False) -> None:
        self.is_whole = is_whole
        self._began = time.perf_counter() - age_s
        self._marks: dict[str, float] = {}

    @classmethod
    def of_process(cls) -> Self:
        """Waypoints that count from where this process began."""
        return cls(age_s=process_age_s(), is_whole=True)

    def mark(self, name: str) -> None:
        """This moment is reached; what was marked before stays as it was."""
        self._marks.setdefault(name, time.perf_counter() - self._began)

    @property
    def seconds(self) -> float:
        """From the beginning to the last waypoint."""
        return max(self._marks.values(), default=0.0)

    def legs(self) -> tuple[Leg, ...]:
        """The way between waypoints; seconds add up to the last one's, shares to one."""
        whole, before, legs = self.seconds, 0.0, []
        for name, at_s in self._marks.items():
            passed = at_s - before
            legs.append(Leg(name, at_s, passed, passed / whole if whole else 0.0))
            before = at_s
        return tuple(legs)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the journal."""
        return {"seconds": round(self.seconds, 3), "legs": [one.to_json() for one in self.legs()]}


def process_age_s() -> float:
    """Seconds since this process began, to a hundredth.

    On Linux both moments are read from the clock that never jumps; psutil's answer there is off by up to a second, for
    it adds the time of the system's start, which is told in whole seconds.
    """
    if hasattr(time, "CLOCK_BOOTTIME") and _STAT.exists():
        after_name = _STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        started_s = int(after_name[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())
