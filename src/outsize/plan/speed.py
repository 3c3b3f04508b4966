"""Seconds of a step: what each block computes, and what copying adds that arithmetic does not hide.

A block's seconds are a sum of parts, each amount of work divided by a rate of the machine: products, attention, decoding,
and everything element by element. The copies are then laid beside them as the ring does it (placement/stream.py): one
fetch of each streamed block on the way up and one on the way down, as many uses ahead as there are slots, the last blocks
still there at the turn and the first ones at the step boundary.

The constants are from the yardstick's prototype of the same step (Flux.2-dev, rank 16, 512 and 1024 px, one H200): three
ways of computing at two sizes, resident; the streamed figures follow from the simulation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from outsize.devices._rates import COMPUTE_TYPE, Rates, operand_bytes
from outsize.plan.compute import Compute
from outsize.plan.pools import Holding
from outsize.plan.sizes import BlockSizes
from outsize.plan.work import Work

Bound = Literal["compute", "launching", "bus", "disk"]

# How often each number that enters or leaves a linear crosses the card's memory in one pass, beside the product itself:
# norms, gates, activations, the adapter's additions. Compiled they are joined.
TOUCHES = {True: 4.0, False: 11.0}
# Backward goes through the same operations with two gradients each.
BACKWARD_TOUCHES = 2.0
# Flash attention: backward makes five products where forward makes two.
BACKWARD_ATTENTION = 2.5
# Converting operands to fewer bits: read twice (for the scale and the values) and written.
CONVERSION_READS = 2
# Products with the adapter's thin matrices reach this share of a large product's rate.
THIN_SHARE = 0.25
# Seconds in which Python and the driver queue one linear, its adapter and what surrounds it, for one pass. Eager: a
# reduced Flux.2 of 36 linears took 0.084 s a step where its arithmetic takes a tenth of it (one H200, tests/test_gpu.py).
LAUNCH_S = {True: 0.15e-3, False: 0.5e-3}
# Bytes that the update reads and writes for each trainable number: gradient, masters, two moments, the compute type's copy.
UPDATE_BYTES = 40
# Blocks that the staging buffers hold ahead of the slots.
_STAGED_AHEAD = 2


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step.

    bound: what is busiest. compute_s, bus_s, disk_s: busy seconds (disk: staging from ordinary memory as well). hidden: the
    share of copying that arithmetic covers, 1 where nothing is copied.
    """

    seconds: float
    bound: Bound
    compute_s: float
    bus_s: float
    disk_s: float
    hidden: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def step_time(work: Work, holding: Holding, compute: Compute, rates: Rates) -> StepTime:
    """Seconds of one step under a holding; accumulated passes and the update included."""
    up, down = _block_seconds(work, holding, compute, rates)
    arithmetic_s = sum(up) + sum(down)
    num_linears = sum(block.num_linears for block in work.base.blocks)
    passes = 3 if holding.keeps_activations else 4  # up; again; and backward, which counts twice
    launching_s = LAUNCH_S[compute.compiles] * num_linears * passes if work.has_gpu else 0.0
    stretch = max(1.0, launching_s / arithmetic_s) if arithmetic_s else 1.0
    lane = _Lane(
        [one * stretch for one in up], [one * stretch for one in down], work, holding, rates
    )
    pass_s, bus_s, disk_s = lane.steady_pass()
    busy_s = arithmetic_s * stretch
    update_s = UPDATE_BYTES * work.num_adapter_elements / rates.device_memory_bytes_per_s
    stall_s = max(0.0, pass_s - busy_s)
    copying_s = max(bus_s, disk_s)
    busiest: list[tuple[float, Bound]] = [
        (arithmetic_s, "compute"),
        (launching_s, "launching"),
        (bus_s, "bus"),
        (disk_s, "disk"),
    ]
    passes_per_step = work.accumulate
    return StepTime(
        seconds=pass_s * passes_per_step + update_s,
        bound=max(busiest, key=lambda one: one[0])[1],
        compute_s=arithmetic_s * passes_per_step + update_s,
        bus_s=bus_s * passes_per_step,
        disk_s=disk_s * passes_per_step,
        hidden=1.0 - min(1.0, stall_s / copying_s) if copying_s else 1.0,
    )


def _block_seconds(
    work: Work, holding: Holding, compute: Compute, rates: Rates
) -> tuple[list[float], list[float]]:
    """Arithmetic of each block on the way up, and on the way down."""
    up, down = [], []
    for block, adapter in zip(work.base.blocks, work.adapter_by_block, strict=True):
        linear = _linear_s(work, block, compute, rates)
        thin = 2 * work.tokens * adapter / (_matmul(rates, COMPUTE_TYPE) * THIN_SHARE)
        attention = 4 * work.tokens**2 / work.batch * block.width / rates.attention_flops
        touched = work.tokens * block.traffic * work.compute_bytes * TOUCHES[compute.compiles]
        elementwise = touched / rates.device_memory_bytes_per_s
        forward = linear + thin + attention + elementwise
        # the frozen weight needs no gradient, the adapter does
        backward = (
            linear + 2 * thin + BACKWARD_ATTENTION * attention + BACKWARD_TOUCHES * elementwise
        )
        up.append(forward)
        down.append(backward if holding.keeps_activations else forward + backward)
    return up, down


def _linear_s(work: Work, block: BlockSizes, compute: Compute, rates: Rates) -> float:
    """One product with each of a block's matrices: decoding, converting operands, multiplying."""
    size = operand_bytes(compute.arithmetic) if work.has_gpu else work.compute_bytes
    multiplying = 2 * work.tokens * block.token_elements / _matmul(rates, compute.arithmetic)
    decoding = (block.matrix_elements * size + block.streamed_bytes) / rates.decode_bytes_per_s
    converting = 0.0
    if size < work.compute_bytes:
        each = CONVERSION_READS * work.compute_bytes + size
        converting = work.tokens * block.traffic / 2 * each / rates.device_memory_bytes_per_s
    return multiplying + decoding + converting


def _matmul(rates: Rates, arithmetic: str) -> float:
    return rates.matmul_flops.get(arithmetic, rates.matmul_flops[COMPUTE_TYPE])


class _Lane:
    """One pass over the blocks, up and down, computing beside copying."""

    def __init__(
        self, up: list[float], down: list[float], work: Work, holding: Holding, rates: Rates
    ) -> None:
        count = len(up)
        self._order = [*range(count), *reversed(range(count))]
        self._seconds = [*up, *reversed(down)]
        self._tiers, self._slots = holding.tiers, holding.slots
        sizes = [block.streamed_bytes for block in work.base.blocks]
        # the pass's own inputs cross the bus as well, out and in; the two directions do not share a link's rate
        moved = [
            work.tokens * block.width * work.compute_bytes if holding.offloads_inputs else 0
            for block in work.base.blocks
        ]
        bus = rates.bus_bytes_per_s
        self._bus_s = [size / bus for size in sizes]
        self._inputs_s = [one / bus for one in moved]
        slower = {
            "device": 0.0,
            "pinned": 0.0,
            "pageable": 1 / rates.staging_bytes_per_s,
            "disk": 1 / rates.disk_read_bytes_per_s,
        }
        self._before_s = [
            size * slower[tier] for size, tier in zip(sizes, holding.tiers, strict=True)
        ]

    def steady_pass(self) -> tuple[float, float, float]:
        """Seconds of a pass that follows others; and in it, busy seconds of the bus and of what feeds it."""
        (first_s, first_bus, first_feed), (last_s, last_bus, last_feed) = (
            self._run(passes) for passes in (2, 3)
        )
        return last_s - first_s, last_bus - first_bus, last_feed - first_feed

    def _run(self, passes: int) -> tuple[float, float, float]:
        """Seconds of some passes from a standing start."""
        uses = [block for _ in range(passes) for block in self._order]
        streamed = [at for at, block in enumerate(uses) if self._tiers[block] != "device"]
        next_use = _next_uses(uses)
        ends: dict[int, float] = {}  # of each block's last use
        ready: dict[int, float] = {}  # of each block in a slot
        needed: dict[int, int] = {}  # its next use
        now = bus_free = feed_free = bus_s = feed_s = 0.0
        issued, half = 0, len(self._order) // 2
        released: list[float] = []
        for at, block in enumerate(uses):
            # the host runs ahead: all uses that have a slot are queued, each waits for its slot's last reader alone
            done = len(released)
            while issued < min(len(streamed), done + self._slots):
                coming = uses[streamed[issued]]
                if coming not in ready:
                    free_at = 0.0
                    if len(ready) == self._slots:
                        given_up = self._give_up(ready, needed, uses, streamed[done:issued])
                        free_at = ends.get(given_up, 0.0)
                        del ready[given_up]
                    ahead = released[done - _STAGED_AHEAD] if done >= _STAGED_AHEAD else 0.0
                    fed = max(feed_free, ahead) + self._before_s[coming]
                    if self._before_s[coming]:
                        feed_free, feed_s = fed, feed_s + self._before_s[coming]
                    else:
                        fed = 0.0
                    bus_free = max(bus_free, free_at, fed) + self._bus_s[coming]
                    bus_s += self._bus_s[coming]
                    ready[coming] = bus_free
                needed[coming] = next_use[streamed[issued]]
                issued += 1
            start = max(now, ready.get(block, 0.0)) if self._tiers[block] != "device" else now
            if at % len(self._order) >= half and self._inputs_s[block]:  # inputs coming back
                bus_free = max(bus_free, ends.get(block, 0.0)) + self._inputs_s[block]
                bus_s += self._inputs_s[block]
            now = ends[block] = start + self._seconds[at % len(self._order)]
            if self._tiers[block] != "device":
                released.append(now)
        return now, bus_s, feed_s

    @staticmethod
    def _give_up(
        ready: dict[int, float], needed: dict[int, int], uses: list[int], awaited: list[int]
    ) -> int:
        """The block, not awaiting a use, that is needed last."""
        waiting = {uses[at] for at in awaited}
        return max((block for block in ready if block not in waiting), key=lambda one: needed[one])


def _next_uses(uses: list[int]) -> list[int]:
    """For each use, the position of the same block's next one; beyond the end where there is none."""
    coming: dict[int, int] = {}
    found = [0] * len(uses)
    for at in range(len(uses) - 1, -1, -1):
        found[at] = coming.get(uses[at], len(uses) + uses[at])
        coming[uses[at]] = at
    return found
