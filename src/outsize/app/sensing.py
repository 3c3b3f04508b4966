"""One reader for everybody: a thread of the training process that writes what the card's sensors say to the journal.

Whoever wants it (`outsize watch`, the classes of stalls, a report) reads the journal or follows it; nobody else asks the
card, since each question may hold it up. The thread goes on while a step hangs, which is when it is wanted most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from outsize.devices._sensors import EVERY_S, SensorReader
from outsize.weights.budget import private_bytes

if TYPE_CHECKING:
    from outsize.base.journal import Journal
    from outsize.devices.protocol import Device

_PATIENCE_S = 2.0  # for a reading that is under way when training ends; a hung driver must not hold the process


class Sampler:
    """Writes an event `sensors` every few seconds while its block runs.

    copied_bytes: to the device so far; None: nothing is ever copied. step, owners (bytes by owner on the device): set by
    who trains, whenever they change.
    """

    def __init__(
        self,
        device: Device,
        journal: Journal,
        reader: SensorReader,
        copied_bytes: Callable[[], int] | None = None,
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self.step = 0
        self.owners: Mapping[str, int] = {}
        self._device, self._journal, self._reader = device, journal, reader
        self._copied, self._every_s = copied_bytes, every_s
        self._last: tuple[float, int] | None = None  # when bytes were counted, and how many
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(_PATIENCE_S)

    def read(self) -> dict[str, Any]:
        """One look, as JSON values."""
        return {
            "step": self.step,
            **self._reader.sensors().to_json(),
            "process": self._reader.memory().to_json(),
            "owners": dict(self.owners),
            "allocated_bytes": self._device.allocated_bytes(),
            "reserved_bytes": self._device.reserved_bytes(),
            "host_bytes": private_bytes(),
            "bus_bytes_per_s": self._bus_rate(),
        }

    def _run(self) -> None:
        while True:
            found = self.read()
            if self._done.is_set():  # the journal may be closed by now
                return
            self._journal.write("sensors", **found)
            if self._done.wait(self._every_s):
                return

    def _bus_rate(self) -> float | None:
        """Bytes a second to the device since the last look; None at the first one, and where nothing is copied."""
        if self._copied is None:
            return None
        now, before = (time.monotonic(), self._copied()), self._last
        self._last = now
        return None if before is None else (now[1] - before[1]) / max(now[0] - before[0], 1e-9)
