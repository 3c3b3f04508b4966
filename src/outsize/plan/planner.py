"""From a recipe and a machine's profile to a plan: a placement that fits, or a refusal with a remedy.

Pure: nothing is opened, no device is touched, torch is not imported.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outsize.base.units import format_bytes, format_seconds
from outsize.devices._profile import MachineProfile
from outsize.devices._rates import COMPUTE_TYPE, Rates, rates_of
from outsize.plan import conditions, seconds
from outsize.plan.compute import (
    Compute,
    arithmetic_fault,
    choose_arithmetic,
    may_compile,
    may_record,
    proven_for,
)
from outsize.plan.draft import Decision, Outcome, budget_of, decide
from outsize.plan.names import AUTO
from outsize.plan.notes import notes
from outsize.plan.plan import Budget, Choice, Plan, Times
from outsize.plan.refusal import with_remedy
from outsize.plan.sizes import Found
from outsize.plan.speed import step_time
from outsize.plan.work import Work, work_of
from outsize.recipes.recipe import Recipe


def make_plan(
    recipe: Recipe,
    machine: MachineProfile,
    *,
    num_samples: tuple[int, ...] | None = None,
    rates: Rates | None = None,
    has_triton: bool = True,
    found: Mapping[str, Found] | None = None,
) -> Plan:
    """What the recipe costs on the machine; a plan that does not fit says so and names a remedy.

    num_samples: of what the recipe learns from, by set, for the size of caches; None when it is not known. rates: of the machine; None:
    those of its card in the table, or a guess. has_triton: whether what compiles blocks is installed. found: of sources
    that hold matrices in 4 bits, by slot.
    Raises: RecipeError for names that do not exist or a recipe that would train nothing.
    """
    known = rates_of(machine) if rates is None else rates
    draft = functools.partial(
        _draft, machine=machine, rates=known, has_triton=has_triton, found=found
    )
    plan = draft(recipe, num_samples=num_samples)
    return plan if plan.fits else with_remedy(plan, recipe, draft)


_NO_SLOWER = 0.02  # a share of a step that nobody would notice


@dataclass(frozen=True)
class _Situation:
    """What a recipe is planned for."""

    recipe: Recipe
    work: Work
    budget: Budget
    rates: Rates

    def draft(self, compute: Compute) -> _Draft:
        """The placement that suits one way to compute."""
        return _Draft(compute, decide(self.recipe.placement, self.work, self.budget, compute))

    def choice(self, outcome: Outcome, compute: Compute, why: str) -> Choice:
        step = step_time(self.work, outcome.holding, compute, self.rates)
        return Choice(outcome.holding, outcome.device_bytes, outcome.host_bytes, step, why)

    def best(self, compute: Compute) -> _Draft:
        """As asked; an arithmetic that was left open gives way to the compute type where it needs too much."""
        first = self.compiled_or_not(compute)
        is_open = self.recipe.train.arithmetic == AUTO and compute.arithmetic != COMPUTE_TYPE
        if first.outcome.fits(self.budget) or not is_open:
            return first
        why = f"training in {compute.arithmetic} does not fit"
        other = self.compiled_or_not(replace(compute, arithmetic=COMPUTE_TYPE, why=why))
        return other if other.outcome.fits(self.budget) else first

    def compiled_or_not(self, compute: Compute) -> _Draft:
        """Compiled where that was asked for, or where it may be, fits, and saves more than it takes."""
        first = self.draft(compute)
        train = self.recipe.train
        if not compute.compiles or train.compile is not None:
            return first
        eager = self.draft(replace(compute, compiles=False, records=False))
        takes_s = seconds.compile_seconds(self.work)
        saved_s = train.steps * (self._step_s(eager) - self._step_s(first))
        if not first.outcome.fits(self.budget):
            return eager.because("compiled blocks do not fit")
        if saved_s <= takes_s:
            return eager.because(
                f"compiling takes {takes_s:.0f} s and saves {max(saved_s, 0):.0f} s"
            )
        return first.because(f"compiling takes {takes_s:.0f} s once and saves {saved_s:.0f} s")

    def runner_up(self, drafted: _Draft, chosen: Choice) -> Choice | None:
        """The placement that was left, and why."""
        outcome = drafted.decision.runner_up
        if outcome is None:
            return None
        left = self.choice(outcome, drafted.compute, "")
        extra_s = left.step.seconds - chosen.step.seconds
        if not outcome.fits(self.budget):
            why = f"does not fit: {_missing(outcome, self.budget)}"
        elif extra_s > _NO_SLOWER * chosen.step.seconds:
            why = f"fits as well, and takes {format_seconds(extra_s)} more a step"
        else:
            freed = format_bytes(max(0, chosen.device_bytes - left.device_bytes))
            why = f"fits as well, and takes no longer and {freed} less of the device, but more of the host"
        return replace(left, why=why)

    def _step_s(self, drafted: _Draft) -> float:
        holding = drafted.outcome.holding
        return step_time(self.work, holding, drafted.compute, self.rates).seconds


@dataclass(frozen=True)
class _Draft:
    """One way to compute, and the placement that suits it."""

    compute: Compute
    decision: Decision

    @property
    def outcome(self) -> Outcome:
        return self.decision.outcome

    def because(self, why: str) -> _Draft:
        """The same with a further reason."""
        return replace(self, compute=replace(self.compute, why=f"{self.compute.why}; {why}"))


def _draft(
    recipe: Recipe,
    machine: MachineProfile,
    rates: Rates,
    *,
    num_samples: tuple[int, ...] | None = None,
    has_triton: bool = True,
    found: Mapping[str, Found] | None = None,
) -> Plan:
    """The plan as it stands; a refusal says only that it does not fit."""
    work = work_of(recipe, has_gpu=machine.has_gpu, num_samples=num_samples, found=found)
    here = _Situation(recipe, work, budget_of(machine), rates)
    allowed = _compute(recipe, machine, rates, has_triton=has_triton)
    fault = arithmetic_fault(allowed.arithmetic, machine, rates)
    drafted = here.best(allowed)
    compute, outcome = drafted.compute, drafted.outcome
    chosen = here.choice(outcome, compute, drafted.decision.why)
    return Plan(
        name=recipe.name,
        digest=recipe.digest(),
        base=f"{recipe.base.family}.{recipe.base.variant}",
        machine=machine,
        budget=here.budget,
        compute=compute,
        chosen=chosen,
        runner_up=here.runner_up(drafted, chosen),
        phases=outcome.phases,
        disk=tuple(conditions.disk_items(work)),
        times=Times(
            num_steps=recipe.train.steps,
            boot=seconds.boot(
                work,
                outcome.step,
                compute,
                rates,
                step_s=chosen.step.seconds,
                free_bytes=here.budget.host_bytes,
            ),
            compile_s=seconds.compile_seconds(work) if compute.compiles else 0.0,
            prepare=seconds.preparing(work, rates),
        ),
        rates=rates,
        notes=tuple(notes(work, outcome, machine, rates)),
        refusal=None if fault is None and outcome.fits(here.budget) else "does not fit",
        compute_fault=fault,
    )


def _compute(recipe: Recipe, machine: MachineProfile, rates: Rates, *, has_triton: bool) -> Compute:
    """What the recipe and the machine say; compiles: that it may be done."""
    arithmetic, why = choose_arithmetic(recipe, machine, rates, proven_for(recipe.base.family))
    compiles, why_not = may_compile(machine, has_triton=has_triton, asked=recipe.train.compile)
    if not compiles:
        why = f"{why}; {why_not}"
    is_exact = recipe.train.exact or not machine.has_gpu
    records = compiles and recipe.train.record and may_record(machine)
    return Compute(arithmetic, compiles, is_exact, why, records)


def _missing(outcome: Outcome, budget: Budget) -> str:
    """What there would have to be more of."""
    lacks: dict[str, int] = {
        "on the device": outcome.device_bytes - (budget.device_bytes or 0),
        "of RAM": outcome.host_bytes - budget.host_bytes,
    }
    if budget.pinned_bytes < budget.host_bytes:
        lacks["of RAM that may be pinned"] = outcome.pinned_bytes - budget.pinned_bytes
    told = [f"{format_bytes(size)} more {where}" for where, size in lacks.items() if size > 0]
    return f"{', '.join(told)} would be needed"
