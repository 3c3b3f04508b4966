"""Seconds of a step: what each block computes, and what copying adds that arithmetic does not hide.

A block's seconds are a sum of parts, each amount of work divided by a rate of the machine: products, attention, decoding,
and everything element by element. The copies are then laid beside them as the ring of slots does it (ring.py).

The constants are from the yardstick's prototype of the same step (Flux.2-dev, rank 16, 512 and 1024 px, one H200): three
ways of computing at two sizes, resident; the streamed figures follow from the simulation.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from outsize.devices._rates import COMPUTE_TYPE, Rates, operand_bytes
from outsize.plan.compute import Compute
from outsize.plan.pools import Holding
from outsize.plan.ring import Pass, ring_pass
from outsize.plan.sizes import BlockSizes
from outsize.plan.work import Work

Bound = Literal["compute", "launching", "bus", "staging", "disk"]

# How often each number that enters or leaves a linear crosses the card's memory in one pass, beside the product itself:
# norms, gates, activations, the adapter's additions. Compiled they are joined.
TOUCHES = {True: 4.0, False: 11.0}
# Backward goes through the same operations with two gradients each.
BACKWARD_TOUCHES = 2.0
# Flash attention: backward makes five products where forward makes two.
BACKWARD_ATTENTION = 2.5
# That gives the same bits each time it takes longer: on an H200 an eager step of Flux.2-dev took 0.36 s more at 1024 px.
EXACT_ATTENTION = 3.0
# Converting operands to fewer bits: read twice (for the scale and the values) and written.
CONVERSION_READS = 2
# Products with the adapter's thin matrices reach this share of a large product's rate.
THIN_SHARE = 0.25
# Seconds in which Python and the driver queue one linear, its adapter and what surrounds it, for one pass. Eager: a
# reduced Flux.2 of 36 linears took 0.084 s a step where its arithmetic takes a tenth of it (one H200, tests/test_gpu.py).
LAUNCH_S = {True: 0.15e-3, False: 0.5e-3}
# Bytes that the update reads and writes for each trainable number: gradient, masters, two moments, the compute type's copy.
UPDATE_BYTES = 40


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
    """Seconds of one step under a holding; accumulated passes and the update included.

    The mean over all that passes may be like; what binds them is that of the largest.
    """
    times = [
        _step_time(replace(work, demand=demand), holding, compute, rates)
        for demand in (work.demand, *work.demand.others)
    ]
    means = {
        name: statistics.fmean(getattr(one, name) for one in times)
        for name in ("seconds", "compute_s", "bus_s", "disk_s", "hidden")
    }
    return StepTime(bound=times[0].bound, **means)


def _step_time(work: Work, holding: Holding, compute: Compute, rates: Rates) -> StepTime:
    """Seconds of one step when all its passes are as the demand says."""
    up, down = _block_seconds(work, holding, compute, rates)
    head_s = work.demand.head_flops(work) / _matmul(rates, COMPUTE_TYPE)
    if holding.has_vocabulary_on_host:  # the head is brought once a pass, and nothing hides it
        head_s += work.num_vocabulary_elements * work.compute_bytes / rates.bus_bytes_per_s
    arithmetic_s = sum(up) + sum(down)
    num_linears = sum(block.num_linears for block in work.base.blocks)
    passes = 3 if holding.keeps_activations else 4  # up; again; and backward, which counts twice
    launching_s = LAUNCH_S[compute.compiles] * num_linears * passes if work.has_gpu else 0.0
    stretch = max(1.0, launching_s / arithmetic_s) if arithmetic_s else 1.0
    one = _pass([s * stretch for s in up], [s * stretch for s in down], work, holding, rates)
    update_s = UPDATE_BYTES * work.num_adapter_elements / rates.device_memory_bytes_per_s
    stall_s = max(0.0, one.seconds - arithmetic_s * stretch)
    copying_s = max(one.bus_s, one.feed_s)
    busiest: list[tuple[float, Bound]] = [
        (arithmetic_s + head_s, "compute"),
        (launching_s, "launching"),
        (one.bus_s, "bus"),
        (one.feed_s, "disk" if holding.blocks_in("disk") else "staging"),
    ]
    return StepTime(
        seconds=(one.seconds + head_s) * work.accumulate + update_s,
        bound=max(busiest, key=lambda part: part[0])[1],
        compute_s=(arithmetic_s + head_s) * work.accumulate + update_s,
        bus_s=one.bus_s * work.accumulate,
        disk_s=one.feed_s * work.accumulate,
        hidden=1.0 - min(1.0, stall_s / copying_s) if copying_s else 1.0,
    )


def _block_seconds(
    work: Work, holding: Holding, compute: Compute, rates: Rates
) -> tuple[list[float], list[float]]:
    """Arithmetic of each block on the way up, and on the way down."""
    up, down = [], []
    mixing = work.demand.mixing_flops(work)
    for block, adapter, flops in zip(work.base.blocks, work.adapter_by_block, mixing, strict=True):
        linear = _linear_s(work, block, compute, rates)
        thin = 2 * work.tokens * adapter / (_matmul(rates, COMPUTE_TYPE) * THIN_SHARE)
        attention = flops / rates.attention_flops
        touched = work.tokens * block.traffic * work.compute_bytes * TOUCHES[compute.compiles]
        elementwise = touched / rates.device_memory_bytes_per_s
        forward = linear + thin + attention + elementwise
        # the frozen weight needs no gradient, the adapter does
        attention_back = attention * BACKWARD_ATTENTION
        if compute.is_exact and work.has_gpu:
            attention_back *= EXACT_ATTENTION
        backward = linear + 2 * thin + attention_back + BACKWARD_TOUCHES * elementwise
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


def _pass(up: list[float], down: list[float], work: Work, holding: Holding, rates: Rates) -> Pass:
    """The arithmetic with the copies that a holding asks for."""
    blocks = work.base.blocks
    slower = {
        "device": 0.0,
        "pinned": 0.0,
        "pageable": 1 / rates.staging_bytes_per_s,
        "disk": 1 / rates.disk_read_bytes_per_s,
    }
    copies = [
        None if tier == "device" else block.streamed_bytes / rates.bus_bytes_per_s
        for tier, block in zip(holding.tiers, blocks, strict=True)
    ]
    feeds = [
        block.streamed_bytes * slower[tier]
        for tier, block in zip(holding.tiers, blocks, strict=True)
    ]
    inputs = [work.tokens * block.width * work.compute_bytes for block in blocks]
    returns = [one / rates.bus_bytes_per_s for one in inputs] if holding.offloads_inputs else []
    if not work.has_gpu:  # nothing crosses a link: the device's memory is the host's
        copies = [None if one is None else 0.0 for one in copies]
        returns = []
    return ring_pass(up, down, copies, feeds, slots=holding.slots, returns=returns)
