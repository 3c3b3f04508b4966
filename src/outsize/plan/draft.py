"""Where the base's blocks lie while it trains: as many as fit on the device, then in host memory, the rest on disk.

Bytes decide, from the fastest tier to the most plentiful; there is nothing else to search. Block inputs wait in host memory
only where the card is too small for them. Looking for a remedy when nothing fits is refusal.py's work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from outsize.base.tiers import Tier
from outsize.base.units import format_bytes
from outsize.devices._profile import MachineProfile
from outsize.placement._spread import as_tiers, choose_tiers
from outsize.placement._staging import staging_bytes
from outsize.plan import conditions, estimate, previews
from outsize.plan.compute import Compute
from outsize.plan.names import AUTO
from outsize.plan.plan import Budget
from outsize.plan.pools import BASELINE_BYTES, CONTEXT_BYTES, Holding, Phase, Pool, resident
from outsize.plan.sizes import ModelSizes
from outsize.plan.work import Work
from outsize.recipes.recipe import PlacementChoice

RESIDENT, STREAM = "resident", "stream"  # the two ends between which every placement lies
# When blocks are kept on the device, or in host memory, because there is room, this share of it stays free: estimates may
# be off by a tenth, but of the part that varies, not of the packed blocks.
SPARE_SHARE = 0.05
# Blocks that a ring holds where nobody says: one runs, one has come, one is on its way; with two, a copy waits for a block.
SLOTS = (3, 2)
# Windows and WSL refuse to pin more than about half of the RAM.
PINNABLE_SHARE_ON_WINDOWS = 0.5
_BASE_PHASES = ("train step", "train update", "sample", estimate.PREVIEW, estimate.DECODE)
# An encoder's activations are those of one caption: an eighth of the card is ample.
_ENCODER_SHARE = 7 / 8


@dataclass(frozen=True)
class Outcome:
    """All phases under one placement of the base."""

    holding: Holding
    phases: tuple[Phase, ...]

    @property
    def device_bytes(self) -> int:
        """The largest phase's, on the device."""
        return max(phase.device_bytes for phase in self.phases)

    @property
    def host_bytes(self) -> int:
        """The largest phase's, in RAM."""
        return max(phase.host_bytes for phase in self.phases)

    @property
    def pinned_bytes(self) -> int:
        """The most that is pinned at a time."""
        return max(phase.total("pinned") for phase in self.phases)

    @property
    def step(self) -> Phase:
        """The training step."""
        return next(phase for phase in self.phases if phase.name == _BASE_PHASES[0])

    def fits(self, budget: Budget) -> bool:
        """Whether every phase stays within the budget."""
        is_host_enough = self.host_bytes <= budget.host_bytes
        is_pinnable = self.pinned_bytes <= budget.pinned_bytes
        return is_host_enough and is_pinnable and self.device_bytes <= (budget.device_bytes or 0)

    def of_base(self, pool: Pool) -> int:
        """Bytes of a pool in the largest of the phases in which the base runs."""
        return max(phase.total(pool) for phase in self.phases if phase.name in _BASE_PHASES)


@dataclass(frozen=True)
class Decision:
    """The placement, the one that would be next, and why."""

    outcome: Outcome
    runner_up: Outcome | None
    why: str


def budget_of(machine: MachineProfile) -> Budget:
    """What may be used: what is free."""
    device = machine.vram_free_bytes if machine.has_gpu else None
    host = machine.ram_available_bytes
    is_windows = machine.os == "Windows"
    pinnable = int(machine.ram_bytes * PINNABLE_SHARE_ON_WINDOWS) if is_windows else host
    return Budget(device, host, min(pinnable, host))


def decide(asked: PlacementChoice, work: Work, budget: Budget, compute: Compute) -> Decision:
    """The placement that suits the machine, fitting or not."""
    found = _placement(asked, work, budget, compute)
    outcome = found.outcome

    def fits(phases: tuple[Phase, ...]) -> bool:
        return Outcome(outcome.holding, phases).fits(budget.spared(SPARE_SHARE))

    phases = previews.settled(outcome.phases, work, outcome.holding, compute, fits)
    return replace(found, outcome=Outcome(outcome.holding, phases))


def _placement(asked: PlacementChoice, work: Work, budget: Budget, compute: Compute) -> Decision:
    drafts = _Drafts(asked, work, budget, compute)
    everything = drafts.resident()
    if asked.kind == RESIDENT:
        return Decision(drafts.with_activations(everything), None, "asked for by the recipe")
    if asked.kind == AUTO and everything.fits(budget):
        kept = drafts.with_activations(everything)
        count = len(work.base.blocks)
        if not work.has_gpu:
            return Decision(kept, None, "without a GPU there is nowhere to stream from")
        free = format_bytes(budget.device_bytes or 0)
        return Decision(kept, drafts.streamed(keeps=False), f"all {count} blocks fit into {free}")
    streamed = drafts.streamed()
    spared = drafts.without_disk(streamed)
    other = everything if spared is None else spared
    why = _why_streamed(streamed.holding) if asked.kind == AUTO else "asked for by the recipe"
    return Decision(streamed, other, why)


@dataclass(frozen=True)
class _Drafts:
    """Placements of one recipe on one machine."""

    asked: PlacementChoice
    work: Work
    budget: Budget
    compute: Compute

    def resident(self) -> Outcome:
        """Every block on the device; block inputs in host memory if that was asked for, or all blocks and it fits only so."""
        holding = resident(self.work.base, RESIDENT)
        is_free = self.asked.kind != RESIDENT  # to stream instead
        return self._with_inputs(holding, lambda outcome: is_free or outcome.fits(self.budget))

    def streamed(self, *, keeps: bool = True) -> Outcome:
        """Blocks in every tier that has room; keeps: on the device as well, where the recipe does not say."""
        kind = STREAM if self.asked.kind == AUTO else self.asked.kind
        num_blocks = len(self.work.base.blocks)
        on_disk = as_tiers(num_blocks, (), "disk")
        limit = self.budget.device_bytes
        bare = self._with_inputs(
            Holding(kind, self._slots()[0], on_disk),
            lambda outcome: limit is None or outcome.device_bytes <= limit,
        )
        tiers = self._tiers(bare, keeps=keeps)
        return self.outcome(replace(bare.holding, tiers=tiers))

    def without_disk(self, outcome: Outcome) -> Outcome | None:
        """The same placement as it would be with more RAM; None where nothing is read from disk."""
        tiers = outcome.holding.tiers
        if "disk" not in tiers:
            return None
        better: Tier = "pinned" if self.work.has_gpu else "device"
        held = tuple(better if tier == "disk" else tier for tier in tiers)
        return self.outcome(replace(outcome.holding, tiers=held))

    def with_activations(self, outcome: Outcome) -> Outcome:
        """The same placement, keeping activations where that is asked for, or (null) on a CPU with room to spare.

        On a card recomputing is the default: exactness there was verified with it.
        """
        if outcome.holding.kind != RESIDENT or self.asked.recompute is True:
            return outcome
        kept = self.outcome(replace(outcome.holding, keeps_activations=True))
        if self.asked.recompute is False:
            return kept
        has_room = (
            not self.work.has_gpu
            and kept.fits(self.budget)
            and 2 * kept.host_bytes <= self.budget.host_bytes
        )
        return kept if has_room else outcome

    def outcome(self, holding: Holding) -> Outcome:
        """All phases of a run in the order in which they happen."""
        work = self.work
        phases = [conditions.preparing(work, part.slot) for part in work.conditioners]
        phases.append(conditions.preparing(work, "base"))
        phases += work.demand.before(work, lambda sizes: _held(work, sizes, self.budget))
        phases += [
            estimate.training_step(work, holding, self.compute),
            estimate.training_update(work, holding),
            *previews.drafted(work, holding, self.compute),
            estimate.sampling(work, holding),
        ]
        return Outcome(holding, (*phases, *work.demand.after(work)))

    def _with_inputs(self, holding: Holding, fits: Callable[[Outcome], bool]) -> Outcome:
        """Vocabulary and block inputs where the recipe says, or (null) in host memory if it does not fit otherwise.

        First fewer slots, which cost a wait now and then; then the vocabulary, which crosses the bus once a pass; inputs cross it
        twice.
        """
        drafts: list[Outcome] = []
        slots = (holding.slots,) if holding.kind == RESIDENT else self._slots()
        for inputs, vocabulary, count in itertools.product(*self._ways(), slots):
            held = replace(
                holding, slots=count, offloads_inputs=inputs, has_vocabulary_on_host=vocabulary
            )
            drafts.append(self.outcome(held))
            if fits(drafts[-1]):
                return drafts[-1]
        return min(drafts, key=lambda one: one.device_bytes)

    def _slots(self) -> tuple[int, ...]:
        """Numbers of slots, the better first."""
        return SLOTS if self.asked.slots is None else (self.asked.slots,)

    def _ways(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Block inputs on the device or in host memory, and the vocabulary, as far as the recipe leaves it open."""
        said = (self.asked.offload_inputs, self.asked.vocabulary_on_host)
        has_vocabulary = self.work.num_vocabulary_elements > 0
        may = (self.work.has_gpu, self.work.has_gpu and has_vocabulary)
        inputs, vocabulary = (
            ((False, True) if is_possible else (False,)) if asked is None else (asked,)
            for asked, is_possible in zip(said, may, strict=True)
        )
        return inputs, vocabulary if may[1] else (False,)

    def _tiers(self, bare: Outcome, *, keeps: bool) -> tuple[Tier, ...]:
        """A tier for each block. bare: with all of them on disk."""
        asked, budget = self.asked, self.budget
        sizes = [block.streamed_bytes for block in self.work.base.blocks]
        staging = staging_bytes(sizes, bare.holding.tiers)
        pinned = bare.of_base("pinned") - staging
        host = max(0, int(budget.host_bytes * (1 - SPARE_SHARE)) - bare.of_base("private") - pinned)
        pinnable = max(0, min(host, budget.pinned_bytes - pinned))
        device = asked.resident_bytes or 0
        if asked.resident_bytes is None and asked.kind == AUTO and keeps:
            if not self.work.has_gpu:  # the device's memory is the host's
                return choose_tiers(sizes, max(0, host - staging), 0, 0)
            usable = int((budget.device_bytes or 0) * (1 - SPARE_SHARE))
            device = max(0, usable - bare.of_base("device"))
        return _in_host(asked, sizes, device, room=_HostRoom(host, pinnable, staging))


@dataclass(frozen=True)
class _HostRoom:
    """Host memory that is left for blocks: in all, and pinned; staging: of it, once a block is not pinned."""

    num_bytes: int
    pinnable: int
    staging: int


def _in_host(
    asked: PlacementChoice, sizes: list[int], device: int, room: _HostRoom
) -> tuple[Tier, ...]:
    """Tiers for what does not stay on the device: all of it pinned if possible, else with room for staging."""
    most = sum(sizes)
    pinned_limit = most if asked.pinned_bytes is None else asked.pinned_bytes
    pageable_limit = most if asked.pageable_bytes is None else asked.pageable_bytes
    all_pinned = choose_tiers(sizes, device, min(pinned_limit, room.pinnable), 0)
    if "disk" not in all_pinned:
        return all_pinned
    pinned = min(pinned_limit, max(0, room.pinnable - room.staging))
    pageable = min(pageable_limit, max(0, room.num_bytes - room.staging - pinned))
    return choose_tiers(sizes, device, pinned, pageable)


def _held(work: Work, sizes: ModelSizes, budget: Budget) -> Holding:
    """A conditioner: resident where it fits with a margin, for its blocks are read once for every caption; else streamed."""
    kept = resident(sizes, RESIDENT)
    need = sizes.packed_bytes + sizes.small_elements * work.compute_bytes
    host_need = BASELINE_BYTES[work.has_gpu] + sizes.largest_packet_bytes
    if not work.has_gpu and need + host_need <= budget.host_bytes * _ENCODER_SHARE:
        return kept
    if work.has_gpu and need + CONTEXT_BYTES <= (budget.device_bytes or 0) * _ENCODER_SHARE:
        return kept
    blocks = [block.streamed_bytes for block in sizes.blocks]
    host = max(0, int(budget.host_bytes * (1 - SPARE_SHARE)) - host_need)
    if not work.has_gpu:
        host = max(0, host - sizes.small_elements * work.compute_bytes)
    staging = staging_bytes(blocks, ["disk"] * len(blocks))
    room = _HostRoom(host, min(host, budget.pinned_bytes), staging)
    return Holding(STREAM, SLOTS[0], _in_host(PlacementChoice(), blocks, 0, room))


def _why_streamed(holding: Holding) -> str:
    """What went where."""
    counts = {
        "stay": holding.blocks_in("device"),
        "stream from pinned memory": holding.blocks_in("pinned"),
        "from ordinary memory": holding.blocks_in("pageable"),
        "from disk": holding.blocks_in("disk"),
    }
    told = ", ".join(f"{len(blocks)} {how}" for how, blocks in counts.items() if blocks)
    inputs = "; block inputs wait in host memory" if holding.offloads_inputs else ""
    words = "; token table and head stay there" if holding.has_vocabulary_on_host else ""
    return f"all {holding.num_blocks} blocks do not fit; {told}{inputs}{words}"
