"""The plan: what a recipe will cost on a machine, where, and why; or why it cannot be.

A value, complete in itself: it is written to the run folder as JSON, read back, and compared with what was measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from outsize.base.errors import DoesNotFit
from outsize.base.tiers import TIERS
from outsize.devices._profile import MachineProfile
from outsize.devices._rates import Rates
from outsize.plan.compute import Compute
from outsize.plan.estimate import DECODE
from outsize.plan.pools import Holding, Item, Phase
from outsize.plan.seconds import Part
from outsize.plan.speed import StepTime

VERSION = 2


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that may be used. device_bytes is None where there is no GPU; pinned_bytes: of the host's."""

    device_bytes: int | None
    host_bytes: int
    pinned_bytes: int

    def spared(self, share: float) -> Budget:
        """The same with a share of everything left free."""
        kept = 1 - share
        device = None if self.device_bytes is None else int(self.device_bytes * kept)
        return Budget(device, int(self.host_bytes * kept), int(self.pinned_bytes * kept))


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement of the base, what the whole run peaks at and a step takes with it, and why it was taken or left."""

    holding: Holding
    device_bytes: int
    host_bytes: int
    step: StepTime
    why: str


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a run beside those of a step.

    boot: to the end of the first step, with warm caches. compile_s: what the first start takes more, or any start with
    other shapes. prepare: of stores that are not there yet.
    """

    num_steps: int
    boot: tuple[Part, ...]
    compile_s: float
    prepare: tuple[Part, ...]

    @property
    def boot_s(self) -> float:
        """All parts of a start."""
        return sum(part.seconds for part in self.boot)


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
    times: Times
    rates: Rates
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

    @property
    def step(self) -> StepTime:
        """Seconds of a training step under the chosen placement."""
        return self.chosen.step

    @property
    def training_s(self) -> float:
        """From process start to the last step, stores and caches there, nothing compiled before."""
        later = (self.times.num_steps - 1) * self.step.seconds
        return self.times.boot_s + self.times.compile_s + later

    @property
    def decodes_previews(self) -> bool:
        """Whether previews are decoded as they are made, beside the base; else their latents wait until it is gone."""
        return any(phase.name == DECODE and phase.holding is not None for phase in self.phases)

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
            "seconds": {
                "step": self.step.to_json(),
                "num_steps": self.times.num_steps,
                "training": self.training_s,
                "boot": self.times.boot_s,
                "boot_parts": [asdict(part) for part in self.times.boot],
                "compile": self.times.compile_s,
                "prepare": [asdict(part) for part in self.times.prepare],
            },
            "rates": self.rates.to_json(),
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


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        **_holding_json(choice.holding),
        "device_bytes": choice.device_bytes,
        "host_bytes": choice.host_bytes,
        "step_s": choice.step.seconds,
        "bound": choice.step.bound,
        "why": choice.why,
    }


def _holding_json(holding: Holding) -> dict[str, Any]:
    return {
        "kind": holding.kind,
        "slots": holding.slots,
        "num_blocks": holding.num_blocks,
        "kept_blocks": sorted(holding.resident),
        "tiers": {tier: len(holding.blocks_in(tier)) for tier in TIERS},
        "keeps_activations": holding.keeps_activations,
        "offloads_inputs": holding.offloads_inputs,
        "vocabulary_on_host": holding.has_vocabulary_on_host,
    }


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "device_bytes": phase.device_bytes,
        "pinned_bytes": phase.total("pinned"),
        "private_bytes": phase.total("private"),
        "cached_bytes": phase.total("cached"),
        "holding": None if phase.holding is None else _holding_json(phase.holding),
        "items": [asdict(item) for item in phase.items],
    }
