"""The plan: what a recipe will cost on a machine, where, and why; or why it cannot be.

A value, complete in itself: it is written to the run folder as JSON, read back, and compared with what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outsize.base.errors import DoesNotFit
from outsize.devices._profile import MachineProfile
from outsize.plan.compute import Compute
from outsize.plan.estimate import Holding, Item, Phase

VERSION = 1
# An estimate further off than this is a defect of the estimate, not of the machine.
TOLERANCE = 0.10
_CONTEXT = "context"  # memory of the driver, which no allocator reports
# Stages of a run that are no phase by name: the phases whose largest they reach.
_PHASES_OF_STAGE = {
    "train": ("train step", "train update"),
    "sample base": ("sample",),
    "sample adapter": ("sample",),
}


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that may be used. device_bytes is None where there is no GPU."""

    device_bytes: int | None
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement of the base, what the whole run peaks at with it, and why it was taken or left."""

    holding: Holding
    device_bytes: int
    host_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One estimate beside its measurement. off: relative error, positive when more was used than planned."""

    stage: str
    pool: str
    planned_bytes: int
    measured_bytes: int

    @property
    def off(self) -> float:
        if self.measured_bytes == self.planned_bytes:
            return 0.0
        return self.measured_bytes / max(self.planned_bytes, 1) - 1

    @property
    def is_within_tolerance(self) -> bool:
        """Whether the plan kept its promise."""
        return abs(self.off) <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Plan:
    """What a recipe costs on a machine.

    refusal: None when it fits, else why not and the smallest change that would. compute_fault: why the machine cannot
    compute as asked.
    """

    name: str
    digest: str
    base: str
    machine: MachineProfile
    budget: Budget
    compute: Compute
    chosen: Choice
    runner_up: Choice | None
    phases: tuple[Phase, ...]
    disk: tuple[Item, ...]
    notes: tuple[str, ...] = ()
    refusal: str | None = None
    compute_fault: str | None = None

    @property
    def fits(self) -> bool:
        """Whether every phase stays within the budget."""
        return self.refusal is None

    @property
    def peak(self) -> Phase:
        """The phase that takes most of the memory that computes."""
        return max(self.phases, key=lambda phase: (phase.device_bytes, phase.host_bytes))

    def holding_of(self, slot: str) -> Holding | None:
        """How the blocks of one model are to be held: slot "base" or that of a text encoder; None for codecs."""
        name = "train step" if slot == "base" else f"cache {slot}"
        return next((phase.holding for phase in self.phases if phase.name == name), None)

    def require_fit(self) -> None:
        """Go on only with a plan that fits.

        Raises: DoesNotFit with the figures and the smallest change that fits.
        """
        if self.refusal is not None:
            raise DoesNotFit(self.refusal)

    def compare(self, measured: Mapping[str, Mapping[str, int]]) -> tuple[Comparison, ...]:
        """Estimates beside measurements, {stage: {"device", "private" or "host": bytes}}, in the measurements' order.

        "device" is the allocator's peak, so the driver's context is left out of the estimate; "private" leaves out
        pinned memory, which the driver owns, and "host" is both. Stages that the plan does
        not estimate (loading, say) are left out.
        """
        rows = []
        for stage, pools in measured.items():
            names = _PHASES_OF_STAGE.get(stage, (stage,))
            phases = [phase for phase in self.phases if phase.name in names]
            for pool, value in pools.items():
                if phases:
                    planned = max(_comparable(phase, pool) for phase in phases)
                    rows.append(Comparison(stage, pool, planned, value))
        return tuple(rows)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, keys in the order in which a reader wants them."""
        return {
            "version": VERSION,
            "recipe": {"name": self.name, "digest": self.digest, "base": self.base},
            "fits": self.fits,
            "refusal": self.refusal,
            "machine": self.machine.to_json(),
            "budget": asdict(self.budget),
            "compute": {**self.compute.describe(), "why": self.compute.why},
            "placement": _choice_json(self.chosen),
            "runner_up": None if self.runner_up is None else _choice_json(self.runner_up),
            "peak": {
                "phase": self.peak.name,
                "device_bytes": max(phase.device_bytes for phase in self.phases),
                "host_bytes": max(phase.host_bytes for phase in self.phases),
            },
            "phases": [_phase_json(phase) for phase in self.phases],
            "disk": [asdict(item) for item in self.disk],
            "notes": list(self.notes),
        }


def _comparable(phase: Phase, pool: str) -> int:
    """What an estimate says of the memory that is measured."""
    if pool == "host":
        return phase.host_bytes
    if pool == "private":
        return phase.total("private")
    assert pool == "device", pool
    return phase.device_bytes - sum(one.num_bytes for one in phase.items if one.owner == _CONTEXT)


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        **_holding_json(choice.holding),
        "device_bytes": choice.device_bytes,
        "host_bytes": choice.host_bytes,
        "why": choice.why,
    }


def _holding_json(holding: Holding) -> dict[str, Any]:
    return {
        "kind": holding.kind,
        "slots": holding.slots,
        "num_blocks": holding.num_blocks,
        "kept_blocks": sorted(holding.resident),
        "keeps_activations": holding.keeps_activations,
    }


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "device_bytes": phase.device_bytes,
        "pinned_bytes": phase.total("pinned"),
        "private_bytes": phase.total("private"),
        "holding": None if phase.holding is None else _holding_json(phase.holding),
        "items": [asdict(item) for item in phase.items],
    }
