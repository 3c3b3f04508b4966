"""The figures of a report: bytes by owner beside what was measured, the way to the first step, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outsize.app.report.history import Event, History, dicts, finite, whole
from outsize.plan.compare import PHASES_OF_STAGE

_MOST_WARNINGS = 200
_CONTEXT = "context"  # the driver's, which no allocator reports
_UNDECIDED = "B"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a plan. pool: where it computes; items: (owner, bytes, why); measured: None: it did not happen."""

    name: str
    pool: str
    items: tuple[tuple[str, int, str], ...]
    measured: int | None
    seconds: float | None

    @property
    def planned(self) -> int:
        """As it can be compared with what an allocator reports."""
        return sum(size for owner, size, _ in self.items if owner != _CONTEXT)


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that a person should know. count: how often it was said."""

    text: str
    count: int = 1


def phases_of(plan: Mapping[str, Any], history: History) -> list[Phase]:
    """The plan's phases in their order, with the measured peaks of the stages that belong to them."""
    found = []
    for one in dicts(plan.get("phases")):
        pool = "device" if finite(one.get("device_bytes")) else "private"
        items = [
            (str(item.get("owner")), whole(item.get("num_bytes")) or 0, str(item.get("why", "")))
            for item in dicts(one.get("items"))
            if item.get("pool") == pool and whole(item.get("num_bytes"))
        ]
        name = str(one.get("name"))
        stages = list(_stages_of(name, history))
        key = "device_bytes" if pool == "device" else "host_bytes"
        peaks = [whole(stage.get(key)) or 0 for stage in stages]
        seconds = [finite(stage.get("seconds")) or 0.0 for stage in stages]
        found.append(
            Phase(
                name,
                pool,
                tuple(sorted(items, key=lambda item: -item[1])),
                max(peaks) if peaks else None,
                sum(seconds) if seconds else None,
            )
        )
    return [_without_anothers_peak(one, found) for one in found]


def _without_anothers_peak(phase: Phase, phases: list[Phase]) -> Phase:
    """A stage that is several phases has its peak in the largest of them."""
    for names in PHASES_OF_STAGE.values():
        larger = [one for one in phases if one.name in names and one.planned > phase.planned]
        if phase.name in names and larger:
            return replace(phase, measured=None)
    return phase


def _stages_of(phase: str, history: History) -> Iterator[Event]:
    for stage in history.of.get("stage", []):
        name = str(stage.get("name"))
        if phase in PHASES_OF_STAGE.get(name, (name,)):
            yield stage


def stages_of(history: History) -> list[dict[str, Any]]:
    """Stages of the session that trained last, equal names together: seconds added, largest peaks."""
    found: dict[str, dict[str, Any]] = {}
    for stage in history.latest.get("stage", []):
        name = str(stage.get("name"))
        row = found.setdefault(
            name, {"name": name, "count": 0, "seconds": 0.0, "device": 0, "host": 0}
        )
        row["count"] += 1
        row["seconds"] += finite(stage.get("seconds")) or 0.0
        row["device"] = max(row["device"], whole(stage.get("device_bytes")) or 0)
        row["host"] = max(row["host"], whole(stage.get("host_bytes")) or 0)
    return list(found.values())


def boot_of(history: History) -> list[dict[str, Any]]:
    """The way to the first step of the newest start."""
    boots = history.latest.get("boot") or history.of.get("boot", [])
    legs = dicts(boots[-1].get("legs")) if boots else []
    return [
        {
            "name": str(leg.get("name")),
            "at": finite(leg.get("at_s")) or 0.0,
            "seconds": finite(leg.get("seconds")) or 0.0,
        }
        for leg in legs
    ]


def memory_of(history: History) -> list[dict[str, Any]]:
    """Memory in use while training, by step; what a later start took again does not count."""
    last = history.steps[-1].number if history.steps else 0
    by_step: dict[int, dict[str, Any]] = {}
    for event in history.of.get("memory", []):
        step = whole(event.get("step"))
        if step is not None and step <= last:
            by_step[step] = {
                "step": step,
                "device": whole(event.get("device_bytes")),
                "reserved": whole(event.get("reserved_bytes")),
                "host": whole(event.get("host_bytes")),
            }
    return [by_step[step] for step in sorted(by_step)]


def evaluated_of(history: History) -> list[dict[str, Any]]:
    """Loss on what is never trained on, by step; the base's once."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for event in history.of.get("evaluated", []):
        step, loss = whole(event.get("step")), finite(event.get("loss"))
        if step is not None and loss is not None:
            what = str(event.get("what", ""))
            found[what, step] = {"what": what, "step": step, "loss": loss}
    return [found[key] for key in sorted(found, key=lambda key: key[1])]


def warnings_of(history: History) -> list[Warned]:
    """All that was said with a raised finger, equal texts counted."""
    counted: dict[str, int] = {}
    for text in _warned(history):
        counted[text] = counted.get(text, 0) + 1
    found = [Warned(text, count) for text, count in counted.items()]
    more = len(found) - _MOST_WARNINGS
    return [*found[:_MOST_WARNINGS], *([Warned(f"and {more} more in the journal")] * (more > 0))]


_SAID = {
    "failed": "a training failed: {error}: {message}",
    "stall": "stalled at step {step}: {what}",
    "restarted": "a fresh process was started after step {step}",
    "warning": "{what}: {tensor}",
    "checkpoint_broken": "a broken checkpoint was passed over: {fault}",
    "cache_entry_broken": "a broken entry of the cache was made again: {fault}",
    "left_out": "left out: {picture}: {reason}",
    "loaded": "{slot}: {not_pinned}",
}


def _warned(history: History) -> Iterator[str]:
    for kind, words in _SAID.items():
        for event in history.of.get(kind, []):
            known = {key: value for key, value in event.items() if value}
            if kind != "loaded" or "not_pinned" in known:
                yield words.format_map(_Blank(known)).removesuffix(": ")
    zero = history.last("delta").get("zero")
    yield from (f"{path} did not move" for path in (zero if isinstance(zero, list) else ()))
    for proof in history.of.get("residency", []):
        if proof.get("is_well") is False:
            yield f"step {proof.get('step')}: {proof.get('told')}"
    for resume in history.resumes:
        if resume.lost:
            yield f"{resume.lost} steps after step {resume.step} were lost with a kill, and taken again"


class _Blank(dict[str, Any]):
    """What an event does not tell is left out of the sentence."""

    def __missing__(self, key: str) -> str:
        return ""


def compared_of(history: History) -> list[dict[str, Any]]:
    """Estimates beside measurements, of the session that trained last."""
    found = []
    for one in history.latest.get("plan_compared", []):
        planned, measured = finite(one.get("planned")), finite(one.get("measured"))
        if planned is not None and measured is not None:
            found.append(
                {
                    "stage": str(one.get("stage")),
                    "what": str(one.get("what")),
                    "unit": str(one.get("unit", _UNDECIDED)),
                    "planned": planned,
                    "measured": measured,
                    "off": finite(one.get("off")) or 0.0,
                }
            )
    return found
