"""Runs written down as samples: a healthy stretch, then what a report says of a stall; ten seconds from one to the next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from outsize.train.stall_judge import Judge
from outsize.train.stalls import Limits, Sample, Stall

SAMPLES = Path(__file__).parent / "stall_samples"
EVERY_S = 10.0
GIB = 1 << 30
# Counters: a figure of a trace says how much they grow in a second.
COUNTERS = ("evicted_ms", "cpu_s", "read_bytes")

# RX 7900 XTX, training at 448 px: TheRock#6824 and the figures that its author published beside it.
RX_7900 = {
    "step_s": 9.0, "compute_share": 0.97, "busy": 1.0, "memory_busy": 0.38, "power_w": 380.0, "clock_mhz": 2500.0,
    "card_bytes": 21 * GIB, "host_bytes": GIB, "evicted_ms": 0.0, "cpu_s": 1.0, "read_bytes": 0.0,
}  # fmt: skip
# RX 9070 XT: legacy-rocm-build#5849.
RX_9070 = RX_7900 | {"power_w": 145.0, "clock_mhz": 2400.0, "card_bytes": 14 * GIB}
# A laptop's card on its charger.
LAPTOP = RX_7900 | {"step_s": 2.0, "power_w": 115.0, "clock_mhz": 2100.0, "on_battery": False}
# No card, or one of which nothing tells.
BLIND = {"step_s": 9.0}


@dataclass
class Trace:
    """Samples that follow each other."""

    samples: list[Sample]

    def then(self, num: int, values: Mapping[str, Any], **more: Any) -> Trace:
        """Some more of equal figures. ended: whether steps end (default); doing: "step" unless said; step_s as given."""
        return Trace([*self.samples, *_stretch(self.samples[-1], num, {**values, **more})])


def healthy(values: Mapping[str, Any], num: int = 12) -> Trace:
    """A run that is well from its first step."""
    first = Sample(0.0, 0, **{name: 0.0 for name in COUNTERS if name in values})
    return Trace([first]).then(num, values)


def _stretch(last: Sample, num: int, values: Mapping[str, Any]) -> Iterable[Sample]:
    given = dict(values)
    ended, doing = given.pop("ended", True), given.pop("doing", "step")
    step_s = given.pop("step_s", None)
    for place in range(num):
        at_s = last.at_s + EVERY_S
        counted = {
            name: (getattr(last, name) or 0.0) + EVERY_S * given[name]
            for name in COUNTERS
            if given.get(name) is not None
        }
        same = doing == last.doing and not ended
        age_s = last.doing_s + EVERY_S if same else (min(EVERY_S, step_s or EVERY_S) / 2)
        # a step longer than the time between samples ends in some of them only
        per_look = EVERY_S / step_s if step_s else 1.0
        steps = int((place + 1) * per_look) - int(place * per_look) if ended else 0
        if ended and per_look < 1:
            age_s = (place + 1) * EVERY_S - int((place + 1) * per_look) * (step_s or 0.0)
        last = Sample(
            at_s, last.step + steps, doing, age_s, step_s if steps else last.step_s,
            **{**{name: value for name, value in given.items() if name not in COUNTERS}, **counted},
        )  # fmt: skip
        yield last


def stalls_of(trace: Trace, *, planned_s: float | None = None) -> list[Stall]:
    """All that is called a stall, in order; a run is over with the first that it is stopped for."""
    judge, found = Judge(Limits(), planned_s), []
    for one in trace.samples:
        stall = judge.see(one)
        found += [stall] if stall else []
        if stall and stall.signature.act == "stop":
            break
    return found


def without(trace: Trace, *sensors: str) -> Trace:
    """The same, where nobody tells of some sensors."""
    return Trace([replace(one, **dict.fromkeys(sensors)) for one in trace.samples])


def recorded(name: str) -> Trace:
    """Samples that the watcher took of a run that was well."""
    lines = (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    known = {one.name for one in fields(Sample)}
    rows = [json.loads(line) for line in lines]
    assert all(row.keys() <= known for row in rows)
    return Trace([Sample(**row) for row in rows])
