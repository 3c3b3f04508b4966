"""The plan as it stands: every phase under the placement that suits the machine, fitting or not.

Blocks that have room stay on the device, the others stream; between all and none every number of kept blocks is possible,
so there is nothing else to search. Looking for a remedy when nothing fits is refusal.py's work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outsize.base.units import format_bytes
from outsize.devices._profile import MachineProfile
from outsize.devices._rates import Rates
from outsize.placement._spread import as_tiers, choose_resident
from outsize.plan import estimate
from outsize.plan.compute import Compute, arithmetic_fault, choose_arithmetic, may_compile
from outsize.plan.estimate import Holding, Phase
from outsize.plan.names import AUTO, base_family
from outsize.plan.plan import Budget, Choice, Plan
from outsize.plan.sizes import ModelSizes
from outsize.plan.work import Work, work_of
from outsize.recipes.recipe import PlacementChoice, Recipe

RESIDENT, STREAM = "resident", "stream"  # the two ends between which every placement lies
# When blocks are kept on the device because there is room, this share of it stays free: estimates may be off by a tenth,
# but of the part that varies, not of the packed blocks.
SPARE_SHARE = 0.05
# A PCIe 4.0 x16 link measured from pinned memory; PCIe 3.0 gives half, 5.0 twice as much.
BUS_BYTES_PER_S = 24e9
# Windows and WSL refuse to pin more than about half of the RAM.
PINNABLE_SHARE_ON_WINDOWS = 0.5


@dataclass(frozen=True)
class _Outcome:
    """All phases under one placement of the base."""

    holding: Holding
    phases: tuple[Phase, ...]

    @property
    def device_bytes(self) -> int:
        return max(phase.device_bytes for phase in self.phases)

    @property
    def host_bytes(self) -> int:
        return max(phase.host_bytes for phase in self.phases)

    def fits(self, budget: Budget) -> bool:
        is_host_enough = self.host_bytes <= budget.host_bytes
        return is_host_enough and self.device_bytes <= (budget.device_bytes or 0)


def draft_plan(
    recipe: Recipe,
    machine: MachineProfile,
    rates: Rates,
    *,
    num_pictures: int | None = None,
    has_triton: bool = True,
) -> Plan:
    """The plan as it stands; a refusal says only that it does not fit."""
    compute = _compute(recipe, machine, rates, has_triton=has_triton)
    fault = arithmetic_fault(compute.arithmetic, machine, rates)
    work = work_of(recipe, has_gpu=machine.has_gpu, num_pictures=num_pictures)
    budget = budget_of(machine)
    outcome, other, why = _choose(recipe, work, budget)
    outcome = _with_activations(recipe.placement, work, outcome, budget)
    runner_up = None if other is None else _choice(other, _why_not(other, budget))
    return Plan(
        name=recipe.name,
        digest=recipe.digest(),
        base=f"{recipe.base.family}.{recipe.base.variant}",
        machine=machine,
        budget=budget,
        compute=compute,
        chosen=_choice(outcome, why),
        runner_up=runner_up,
        phases=outcome.phases,
        disk=tuple(estimate.disk_items(work)),
        notes=tuple(_notes(work, outcome, machine)),
        refusal=None if fault is None and outcome.fits(budget) else "does not fit",
        compute_fault=fault,
    )


def _compute(recipe: Recipe, machine: MachineProfile, rates: Rates, *, has_triton: bool) -> Compute:
    family = base_family(recipe.base.family)
    proven = getattr(family, "proven_arithmetic", ())
    arithmetic, why = choose_arithmetic(recipe, machine, rates, proven)
    compiles, why_not = may_compile(machine, has_triton=has_triton, asked=recipe.train.compile)
    if not compiles:
        why = f"{why}; {why_not}"
    return Compute(arithmetic, compiles, recipe.train.exact, why)


def budget_of(machine: MachineProfile) -> Budget:
    """What may be used: what is free."""
    device = machine.vram_free_bytes if machine.has_gpu else None
    return Budget(device, machine.ram_available_bytes)


def _choose(recipe: Recipe, work: Work, budget: Budget) -> tuple[_Outcome, _Outcome | None, str]:
    """The placement, the runner-up, and the reason."""
    asked = recipe.placement
    everything = _outcome(work, estimate.resident(work.base, RESIDENT, asked.slots), budget)
    if asked.kind == RESIDENT:
        return everything, None, "asked for by the recipe"
    streamed = _streamed(asked, work, budget)
    if asked.kind != AUTO:
        return streamed, everything, "asked for by the recipe"
    if not work.has_gpu:
        return everything, None, "without a GPU there is nowhere to stream from"
    if everything.fits(budget):
        free = format_bytes(budget.device_bytes or 0)
        nothing_kept = _keeping(work, asked, budget, room=0)
        return everything, nothing_kept, f"all {len(work.base.blocks)} blocks fit into {free}"
    holding = streamed.holding
    why = f"all {holding.num_blocks} blocks do not fit; {len(holding.resident)} stay, {holding.num_streamed} stream"
    return streamed, everything, why


def _with_activations(
    asked: PlacementChoice, work: Work, outcome: _Outcome, budget: Budget
) -> _Outcome:
    """The same placement, keeping activations where that is asked for, or (null) on a CPU with room to spare.

    On a card recomputing is the default: exactness there was verified with it.
    """
    may_keep = outcome.holding.kind == RESIDENT and asked.recompute is not True
    if not may_keep or (asked.recompute is None and work.has_gpu):
        return outcome
    kept = _outcome(work, replace(outcome.holding, keeps_activations=True), budget)
    is_wanted = asked.recompute is False or kept.host_bytes <= budget.host_bytes // 2
    return kept if is_wanted else outcome


def _streamed(asked: PlacementChoice, work: Work, budget: Budget) -> _Outcome:
    """Streaming, with as many blocks kept as the recipe says, or (auto) as there is room for."""
    if asked.resident_bytes is not None:
        return _keeping(work, asked, budget, room=asked.resident_bytes)
    nothing_kept = _keeping(work, asked, budget, room=0)
    if asked.kind != AUTO or budget.device_bytes is None:
        return nothing_kept
    usable = int(budget.device_bytes * (1 - SPARE_SHARE))
    of_base = max(phase.device_bytes for phase in nothing_kept.phases if phase.name in _BASE_PHASES)
    return _keeping(work, asked, budget, room=max(0, usable - of_base))


def _keeping(work: Work, asked: PlacementChoice, budget: Budget, *, room: int) -> _Outcome:
    """As many blocks kept as fit into `room` bytes, the others streamed."""
    kind = STREAM if asked.kind == AUTO else asked.kind
    sizes = [block.streamed_bytes for block in work.base.blocks]
    tiers = as_tiers(len(sizes), choose_resident(sizes, room))
    return _outcome(work, Holding(kind, asked.slots, tiers), budget)


_BASE_PHASES = ("train step", "train update", "sample")


def _outcome(work: Work, holding: Holding, budget: Budget) -> _Outcome:
    """All phases of a run in the order in which they happen."""
    phases = [estimate.preparing(work, part.slot) for part in work.conditioners]
    phases.append(estimate.preparing(work, "base"))
    for part in work.conditioners:
        if part.kind == "text":
            phases.append(
                estimate.caching_text(work, part, _encoder_holding(work, part.sizes, budget))
            )
        else:
            phases.append(
                estimate.running_codec(
                    work,
                    part,
                    name="cache latents",
                    pixels=work.pixels,
                    planes=estimate.ENCODE_PLANES,
                )
            )
    phases += [estimate.training_step(work, holding), estimate.training_update(work, holding)]
    phases.append(estimate.sampling(work, holding))
    codec = next(part for part in work.conditioners if part.kind == "image")
    decoding = estimate.running_codec(
        work,
        codec,
        name="decode pictures",
        pixels=work.sample_pixels,
        planes=estimate.DECODE_PLANES,
    )
    return _Outcome(holding, (*phases, decoding))


def _encoder_holding(work: Work, sizes: ModelSizes, budget: Budget) -> Holding:
    """Resident where the encoder fits with a margin, for its blocks are read once for every caption; else streamed."""
    slots = 3
    kept = estimate.resident(sizes, RESIDENT, slots)
    if budget.device_bytes is None:
        return kept
    need = sizes.packed_bytes + sizes.small_elements * work.compute_bytes + estimate.CONTEXT_BYTES
    # an encoder's activations are those of one caption: an eighth of the card is ample
    if need <= budget.device_bytes * 7 // 8:
        return kept
    return Holding(STREAM, slots, as_tiers(len(sizes.blocks), ()))


def _choice(outcome: _Outcome, why: str) -> Choice:
    return Choice(outcome.holding, outcome.device_bytes, outcome.host_bytes, why)


def _why_not(outcome: _Outcome, budget: Budget) -> str:
    if outcome.fits(budget):
        return "fits as well, and is slower" if outcome.holding.num_streamed else "fits as well"
    return "does not fit"


def _notes(work: Work, outcome: _Outcome, machine: MachineProfile) -> list[str]:
    """What a person should know that no total says."""
    notes = []
    if not work.has_gpu and not machine.is_stated:
        notes.append(
            "no GPU was found by nvidia-smi, rocm-smi or amd-smi: counted as training on the CPU in fp32; "
            "state a card with --vram"
        )
    pinned = max(phase.total("pinned") for phase in outcome.phases)
    if outcome.holding.num_streamed and work.has_gpu:
        streamed = sum(
            block.streamed_bytes
            for i, block in enumerate(work.base.blocks)
            if i not in outcome.holding.resident
        )
        per_step = 2 * streamed * work.accumulate
        notes.append(
            f"{format_bytes(per_step)} cross the bus per step, {per_step / BUS_BYTES_PER_S:.1f} s at "
            "24 GB/s (PCIe 4.0 x16), hidden where arithmetic takes longer"
        )
    if machine.os == "Windows" and pinned > machine.ram_bytes * PINNABLE_SHARE_ON_WINDOWS:
        notes.append(
            f"{format_bytes(pinned)} are to be pinned; Windows often refuses more than half of the RAM "
            f"({format_bytes(machine.ram_bytes // 2)})"
        )
    disk = sum(item.num_bytes for item in estimate.disk_items(work))
    if machine.disk_free_bytes is not None and disk > machine.disk_free_bytes:
        notes.append(
            f"stores and caches take {format_bytes(disk)}, {format_bytes(machine.disk_free_bytes)} are "
            "free; what is prepared already counts as taken"
        )
    if work.num_pictures is None:
        notes.append(
            "the folders of pictures are not there yet: the cache is counted for one picture"
        )
    return notes
