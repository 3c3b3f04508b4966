"""Which process works in a run, and whether it still lives: a kill leaves nothing else behind that could tell."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any, Self

_SAME_S = 5.0  # a pid is not given again within seconds; a system's clock may be set by as much


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process on one host. began: seconds since 1970, since pids are used again."""

    pid: int
    began: float
    host: str

    @classmethod
    def own(cls) -> Self:
        """This process."""
        import psutil

        return cls(os.getpid(), psutil.Process().create_time(), platform.node())

    @classmethod
    def of_json(cls, value: object) -> Self | None:
        """What a journal holds; None where it holds none."""
        if not isinstance(value, dict):
            return None
        pid, began, host = value.get("pid"), value.get("began"), value.get("host")
        is_whole = isinstance(pid, int) and isinstance(began, int | float) and isinstance(host, str)
        return cls(pid, float(began), host) if is_whole else None  # type: ignore[arg-type] # looked at above

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def is_alive(self) -> bool | None:
        """Whether it still runs; None on another host, which cannot know."""
        import psutil

        if self.host != platform.node():
            return None
        try:
            found = psutil.Process(self.pid)
            return (
                abs(found.create_time() - self.began) < _SAME_S
                and found.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:  # it is there, and somebody else's
            return True
