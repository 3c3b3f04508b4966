"""From the samples of a run to a decision: learns what is healthy, then holds every sample to the signatures.

Pure, as stalls.py is: no clock, no thread, no file.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outsize.adapters.health import WATCHED_UPDATES
from outsize.base.units import format_bytes, format_seconds
from outsize.train.stalls import (
    FROZEN,
    OFF_CARD,
    ON_CARD,
    SIGNATURES,
    TRICKLE,
    Baseline,
    Limits,
    Sample,
    Seen,
    Signature,
    Stall,
)

_LEARNED_FROM = (
    6  # samples: a minute, in which medians outvote a slow step or another program's start
)
_LONGEST = (
    5  # times the longest step so far: buckets differ in size, and a rare one may be larger still
)
_MEDIANS = ("power_w", "clock_mhz", "memory_busy", "host_bytes")
_SLOW = 3.0  # from which a cause is missed
_DOUBTED = 3.0  # times the planned step; plans are held to a tenth


def baseline_of(samples: Sequence[Sample]) -> Baseline | None:
    """What is healthy, by the first samples of steps; None: they are too few."""
    timed = [one for one in samples if one.step_s is not None]
    if len(timed) < _LEARNED_FROM:
        return None
    steps = [one.step_s for one in timed if one.step_s is not None]
    medians = {
        name: statistics.median(known)
        for name in _MEDIANS
        if (known := [getattr(one, name) for one in timed if getattr(one, name) is not None])
    }
    return Baseline(
        statistics.median(steps), max(steps), on_battery=timed[-1].on_battery, **medians
    )


def fit(signature: Signature, seen: Seen) -> bool | tuple[str, ...]:
    """Whether a sample fits a signature; the sensors that are missing where only they leave it open."""
    missing = []
    for sensor, value_of, fits in signature.tests:
        value = value_of(seen)
        if value is None:
            missing.append(sensor)
        elif not fits(value):
            return False
    return tuple(missing) or True


def why(signature: Signature, seen: Seen) -> str:
    """What was seen, with the figures of what the signature looks at."""
    healthy = seen.baseline
    usual = "" if healthy is None else f" where {format_seconds(healthy.step_s)} is usual"
    if signature.is_frozen or healthy is None:
        said = f"no step has ended for {format_seconds(seen.now.doing_s)}{usual}"
    else:
        said = f"a step takes {format_seconds(seen.slow * healthy.step_s)}{usual}"
    return ", ".join([said, *(_figure(name, seen) for name, _, _ in signature.tests)])


def _figure(sensor: str, seen: Seen) -> str:
    now, healthy = getattr(seen.now, sensor), getattr(seen.baseline, sensor, None)
    if sensor in {"cpu_s", "evicted_ms", "read_bytes"}:
        now = seen.rate(sensor)
    if now is None:
        return f"{sensor} unknown"
    written = _WRITTEN[sensor]
    return written(now) + (f" (healthy: {written(healthy)})" if healthy is not None else "")


_WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "power_w": lambda watts: f"{watts:.0f} W",
    "clock_mhz": lambda clock: f"{clock:.0f} MHz",
    "busy": lambda share: f"busy {share:.0%}",
    "memory_busy": lambda share: f"memory busy {share:.0%}",
    "compute_share": lambda share: f"computing {share:.0%} of a step",
    "card_bytes": lambda held: f"{format_bytes(int(held))} on the card",
    "host_bytes": lambda held: f"{format_bytes(int(held))} in the host's memory",
    "evicted_ms": lambda rate: f"queues held up {rate / 1000:.0%} of the time",
    "cpu_s": lambda cores: f"{cores:.1f} processors at work",
    "proof": lambda verdict: (
        f"proved to be {verdict}" if verdict == OFF_CARD else f"proof: {verdict}"
    ),
    "read_bytes": lambda rate: f"reading {format_bytes(int(rate))} a second",
}


class Judge:
    """Follows one run. planned_step_s: None: nobody planned.

    undecided: classes that its slow steps could be, with what they lack. wants_proof: a proof of where memory lies would decide.
    """

    def __init__(self, limits: Limits, planned_step_s: float | None = None) -> None:
        self.baseline: Baseline | None = None
        self.undecided: Mapping[str, tuple[str, ...]] = {}
        self.wants_proof = False
        self._limits, self._planned_s = limits, planned_step_s
        self._learning: list[Sample] = []
        self._first_step: int | None = None
        self._before: Sample | None = None
        self._state: Signature | tuple[str, ...] = ()
        self._num_alike = 0
        self._told: Signature | None = None

    @property
    def is_doubtful(self) -> bool:
        """Whether what was taken for healthy is far slower than planned."""
        if self.baseline is None or not self._planned_s:
            return False
        return self.baseline.step_s > _DOUBTED * self._planned_s

    def see(self, sample: Sample) -> Stall | None:
        """Take note of a sample; a stall when it was seen `limits.hits` times in a row, and not again until it was gone."""
        before, self._before = self._before, sample
        self._learn(sample)
        if before is None or sample.doing != "step":
            return None  # what happens between steps takes what it takes
        seen = Seen(sample, before, self.baseline)
        asked = [one for one in (*SIGNATURES, FROZEN) if self._is_asked(one, seen)]
        fits = {one.name: fit(one, seen) for one in asked}
        found = next((one for one in asked if fits[one.name] is True), None)
        open_ = {name: one for name, one in fits.items() if isinstance(one, tuple)}
        self.wants_proof = ("proof",) in open_.values()
        lacking = tuple(open_) if seen.slow >= _SLOW else ()
        state = found or lacking
        self._num_alike = self._num_alike + 1 if state == self._state else 1
        self._state = state
        if self._num_alike != self._limits.hits:
            return None
        told, self._told = self._told, found
        if found is None:
            self.undecided = {name: open_[name] for name in lacking}
            return None
        if found is told:
            return None  # it was gone for a look, as where a sensor said nothing
        return Stall(found, why(found, seen), sample.step, open_)

    def _is_asked(self, signature: Signature, seen: Seen) -> bool:
        if signature.after is None:
            return seen.slow >= signature.slow
        is_reading = (seen.rate("read_bytes") or 0.0) >= TRICKLE  # a disk may be slow
        return seen.now.doing_s >= self._longest_s(signature.after(self._limits)) and not is_reading

    def _longest_s(self, at_least_s: float) -> float:
        """For how long a step may take."""
        if self.baseline is None:
            return max(self._limits.first_s, self._limits.patience * (self._planned_s or 0.0))
        own_s = self._limits.patience * self.baseline.step_s
        return max(at_least_s, own_s, _LONGEST * self.baseline.slowest_s)

    def _learn(self, sample: Sample) -> None:
        if self._first_step is None:
            self._first_step = sample.step
        if self.baseline is not None:
            self._keep(self.baseline, sample)
            return
        is_warm = sample.step > self._first_step + WATCHED_UPDATES
        if is_warm and sample.doing == "step":
            self._learning.append(sample)
            self.baseline = baseline_of(self._learning)

    def _keep(self, baseline: Baseline, sample: Sample) -> None:
        """A card on its battery is another card, whose baseline has to be learned.

        A long step that ended was possible; what lies on the host while all was proved to be on the card are our own buffers.
        """
        known = (baseline.on_battery, sample.on_battery)
        if None not in known and known[0] != known[1]:
            self.baseline, self._learning = None, []
            return
        slowest_s = max(baseline.slowest_s, sample.step_s or 0.0)
        is_proved = sample.proof == ON_CARD and sample.host_bytes is not None
        host_bytes = sample.host_bytes if is_proved else baseline.host_bytes
        self.baseline = replace(baseline, slowest_s=slowest_s, host_bytes=host_bytes)
