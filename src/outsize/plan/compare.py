"""A plan beside what was measured: bytes by stage, seconds of a start and of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from outsize.plan.plan import Plan
from outsize.plan.pools import Phase

# An estimate further off than this is a defect of the estimate, not of the machine.
TOLERANCE = 0.10
_CONTEXT = "context"  # memory of the driver, which no allocator reports
# Stages of a run that are no phase by name: the phases whose largest they reach.
PHASES_OF_STAGE = {
    "train": ("train step", "train update"),
    "sample base": ("sample",),
    "sample adapter": ("sample",),
}


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run took.

    peaks: {stage: {"device", "private" or "host": bytes}}. "device" is the allocator's peak, without the driver's context;
    "private" leaves out pinned memory, which the driver owns, and "host" is both. step_s: the mean over the steps, each as
    long as the median of its size, None when too few were taken. boot_s: from process start to the end of the first step, without the seconds of preparing and
    caching, None when that says nothing. prepare_s: by slot.
    """

    peaks: Mapping[str, Mapping[str, int]]
    step_s: float | None = None
    boot_s: float | None = None
    prepare_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One estimate beside its measurement. what: "device", "private", "host", or "time"; unit: bytes or seconds."""

    stage: str
    what: str
    unit: Literal["B", "s"]
    planned: float
    measured: float

    @property
    def off(self) -> float:
        """Relative error, positive when more was used than planned."""
        if self.measured == self.planned:
            return 0.0
        least = 1 if self.unit == "B" else 1e-6
        return self.measured / max(self.planned, least) - 1

    @property
    def is_within_tolerance(self) -> bool:
        """Whether the plan kept its promise."""
        return abs(self.off) <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the journal."""
        return {**asdict(self), "off": round(self.off, 4)}


def compare_run(plan: Plan, measured: MeasuredRun) -> tuple[Comparison, ...]:
    """Estimates beside measurements, in the measurements' order, then seconds.

    Stages that the plan does not estimate (loading, say) are left out.
    """
    return (*_bytes(plan, measured.peaks), *_seconds(plan, measured))


def planned_bytes(plan: Plan, stage: str, pool: str) -> int | None:
    """What the plan says of a stage's memory as it is measured; None when it says nothing."""
    names = PHASES_OF_STAGE.get(stage, (stage,))
    phases = [phase for phase in plan.phases if phase.name in names]
    return max((_comparable(phase, pool) for phase in phases), default=None)


def _bytes(plan: Plan, peaks: Mapping[str, Mapping[str, int]]) -> Iterator[Comparison]:
    for stage, pools in peaks.items():
        for pool, value in pools.items():
            planned = planned_bytes(plan, stage, pool)
            if planned is not None:
                yield Comparison(stage, pool, "B", planned, value)


def _seconds(plan: Plan, measured: MeasuredRun) -> Iterator[Comparison]:
    prepared = {part.name: part.seconds for part in plan.times.prepare}
    for slot, seconds in measured.prepare_s.items():
        name = f"prepare {slot}"
        if name in prepared:
            yield Comparison(name, "time", "s", prepared[name], seconds)
    if measured.boot_s is not None:
        yield Comparison("start", "time", "s", plan.times.boot_s, measured.boot_s)
    if measured.step_s is not None:
        yield Comparison("step", "time", "s", plan.step.seconds, measured.step_s)


def _comparable(phase: Phase, pool: str) -> int:
    """What an estimate says of the memory that is measured."""
    if pool == "host":
        return phase.host_bytes
    if pool == "private":
        return phase.total("private")
    assert pool == "device", pool
    return phase.device_bytes - sum(one.num_bytes for one in phase.items if one.owner == _CONTEXT)
