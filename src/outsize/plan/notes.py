"""What a person should know of a plan that no total says."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.base.units import format_bytes, format_seconds
from outsize.devices._profile import MachineProfile
from outsize.devices._rates import GUESS, Rates
from outsize.plan import previews
from outsize.plan.conditions import disk_items
from outsize.plan.draft import RESIDENT, STREAM, Outcome
from outsize.plan.work import Work


def notes(work: Work, outcome: Outcome, machine: MachineProfile, rates: Rates) -> Iterator[str]:
    """One sentence each."""
    if not work.has_gpu and not machine.is_stated:
        yield (
            "no GPU was found by nvidia-smi, rocm-smi or amd-smi: counted as training on the CPU in fp32; "
            "state a card with --vram"
        )
    if work.has_gpu and rates.origin("matmul_flops") == GUESS:
        yield (
            f"the speed of {machine.device} is a guess, and so are all seconds; name a known card with --gpu, or measure "
            "with `outsize bench --rates`"
        )
    yield from _copied(work, outcome, rates)
    if machine.os == "Windows" and outcome.holding.blocks_in("pageable"):
        yield (
            "Windows often refuses to pin more than half of the RAM "
            f"({format_bytes(machine.ram_bytes // 2)}): what exceeds it streams from ordinary memory"
        )
    if outcome.holding.kind not in {RESIDENT, STREAM}:
        yield (
            f"the planner does not know the placement {outcome.holding.kind!r}: its memory is counted as a ring of "
            f"{outcome.holding.slots} slots over blocks in host memory"
        )
    disk = sum(item.num_bytes for item in disk_items(work))
    if machine.disk_free_bytes is not None and disk > machine.disk_free_bytes:
        yield (
            f"stores and caches take {format_bytes(disk)}, {format_bytes(machine.disk_free_bytes)} are "
            "free; what is prepared already counts as taken"
        )
    yield from previews.notes(work, outcome.phases)
    yield from _adopted(work)
    yield from work.demand.notes(work)


def _adopted(work: Work) -> Iterator[str]:
    """What is counted otherwise than the recipe's format alone would have it."""
    for slot in ("base", *(one.slot for one in work.conditioners)):
        sizes = work.sizes_of(slot)
        if sizes.num_beside:
            yield (
                f"the files of {slot} hold {sizes.num_adopted} matrices in 4 bits and keep {sizes.num_beside} linears of "
                "its blocks plain; so does the store"
            )


def _copied(work: Work, outcome: Outcome, rates: Rates) -> Iterator[str]:
    """What crosses the bus, and what comes from disk, in one step."""
    if not work.has_gpu or not outcome.holding.num_streamed:
        return
    sizes = work.base.blocks

    def per_step(blocks: list[int]) -> int:
        return 2 * work.accumulate * sum(sizes[block].streamed_bytes for block in blocks)

    kept = outcome.holding.resident
    crossing = per_step([block for block in range(len(sizes)) if block not in kept])
    yield (
        f"{format_bytes(crossing)} cross the bus per step, {format_seconds(crossing / rates.bus_bytes_per_s)} at "
        f"{rates.bus_bytes_per_s / 1e9:.0f} GB/s ({rates.origin('bus_bytes_per_s')}), hidden where arithmetic takes longer"
    )
    read = per_step(outcome.holding.blocks_in("disk"))
    if read:
        yield (
            f"{format_bytes(read)} of it are read from disk, {format_seconds(read / rates.disk_read_bytes_per_s)} at "
            f"{rates.disk_read_bytes_per_s / 1e9:.1f} GB/s ({rates.origin('disk_read_bytes_per_s')}); "
            f"{format_bytes(read // 2 // work.accumulate)} more RAM would spare that"
        )
