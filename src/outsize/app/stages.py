"""Where time and memory went: the stages of a command in order, each with its seconds and its peaks.

One big thing at a time is the rule, so the peak of a run is the largest of its stages, not their sum; this is where it
is shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outsize.base.journal import Journal
from outsize.weights.budget import MemoryWatch

if TYPE_CHECKING:
    from outsize.devices.protocol import Device

PREPARE = "prepare "  # begins the names of stages that make a store


@dataclass(frozen=True, slots=True)
class Stage:
    """One finished stage.

    seconds: without those of stages within it, so that all add up to the time that passed. device_bytes: peak of the
    device's tensors; host_bytes: peak private bytes of the process.
    """

    name: str
    seconds: float
    device_bytes: int
    host_bytes: int


def measured(stages: Sequence[Stage], device: Device) -> dict[str, dict[str, int]]:
    """Peaks by stage name and pool, as a plan compares them: the device's tensors on a GPU, else the process."""
    has_own_memory = device.copies_asynchronously
    pool = "device" if has_own_memory else "private"
    return {
        one.name: {pool: one.device_bytes if has_own_memory else one.host_bytes}
        for one in merged(stages)
    }


def merged(stages: Sequence[Stage]) -> list[Stage]:
    """One for each name, in the order of their first: seconds added up, the largest peaks."""
    found: dict[str, Stage] = {}
    for one in stages:
        had = found.get(one.name, Stage(one.name, 0.0, 0, 0))
        found[one.name] = Stage(
            one.name,
            had.seconds + one.seconds,
            max(had.device_bytes, one.device_bytes),
            max(had.host_bytes, one.host_bytes),
        )
    return list(found.values())


def prepare_seconds(stages: Sequence[Stage]) -> dict[str, float]:
    """Seconds of preparing by slot, of what was prepared."""
    return {
        one.name.removeprefix(PREPARE): one.seconds
        for one in stages
        if one.name.startswith(PREPARE)
    }


class Stages:
    """Measures stages and writes each to the journal as it ends."""

    def __init__(self, device: Device, journal: Journal) -> None:
        self.finished: list[Stage] = []
        self._device, self._journal = device, journal
        self._within_s: list[float] = []  # of each open stage: seconds of the stages within it
        self._peaks: list[int] = []  # of each open stage: device bytes when a stage within it began

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure what happens within the block; memory that the stage freed is given back at its end."""
        self._device.release_cached()
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], self._device.peak_bytes())
        self._device.reset_peak()
        started = time.perf_counter()
        self._within_s.append(0.0)
        self._peaks.append(0)
        try:
            with MemoryWatch() as watch:
                yield
                self._device.synchronize()
        finally:
            seconds = time.perf_counter() - started
            within_s, peak_bytes = self._within_s.pop(), self._peaks.pop()
            if self._within_s:
                self._within_s[-1] += seconds
        peak_bytes = max(peak_bytes, self._device.peak_bytes())
        done = Stage(name, seconds - within_s, peak_bytes, watch.peak_bytes)
        self.finished.append(done)
        self._journal.write(
            "stage", name=name, seconds=round(done.seconds, 3), device_bytes=done.device_bytes,
            host_bytes=done.host_bytes,
        )  # fmt: skip

    def seconds(self) -> dict[str, float]:
        """Seconds by stage name, equal names added up."""
        total: dict[str, float] = {}
        for one in self.finished:
            total[one.name] = total.get(one.name, 0.0) + one.seconds
        return {name: round(value, 3) for name, value in total.items()}
