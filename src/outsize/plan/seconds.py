"""Seconds before the first step and beside the steps: starting, compiling, preparing stores.

A start is counted with warm caches: stores prepared, text and latents cached, compiled code kept from an earlier run. What
only the first start pays is told beside it. Constants without a formula were seen on one H200 and its host.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.devices._rates import Rates
from outsize.plan.compute import Compute
from outsize.plan.pools import Phase
from outsize.plan.sizes import ModelSizes
from outsize.plan.work import Work

# Driver context, cuBLAS and the first kernels.
CONTEXT_S = 1.5
# Compiling one kind of block for both directions, without and with what an earlier run left.
COMPILE_S, CACHED_COMPILE_S = 30.0, 5.0
# Threads that read and hash a store.
LOADING_THREADS = 8
# Encoding on a processor, source bytes per second and core: 7.8 s per GB of bf16 on two (docs/performance.md).
ENCODE_BYTES_PER_S = 64e6


@dataclass(frozen=True, slots=True)
class Part:
    """Some seconds, and what they are spent on."""

    name: str
    seconds: float
    why: str


def boot(
    work: Work, step: Phase, compute: Compute, rates: Rates, *, step_s: float, free_bytes: int
) -> tuple[Part, ...]:
    """From process start to the end of the first step, with warm caches. free_bytes: RAM that nothing else takes.

    Loading reads, hashes, makes host memory and copies to the device side by side, so the slowest of them counts.
    """
    assert step.holding is not None, "the base runs in a training step"
    on_disk = sum(item.num_bytes for item in step.items if item.pool == "disk")
    read = work.base.store_bytes - on_disk
    has_pages = step.host_bytes + work.base.store_bytes <= free_bytes
    rate = rates.staging_bytes_per_s if has_pages else rates.disk_read_bytes_per_s
    source = "from files that the system still holds" if has_pages else "from disk"
    threads = min(rates.num_cores, LOADING_THREADS)
    ways = {
        f"read {source}": read / rate,
        f"hashed, {source}": read * (1 / rates.hash_bytes_per_s + 1 / rate) / threads,
        "host memory touched for the first time": step.total("pinned")
        / rates.first_touch_bytes_per_s,
    }
    if work.has_gpu:
        ways["copied to the device"] = step.total("device") / rates.bus_bytes_per_s
    slowest = max(ways, key=lambda name: ways[name])
    parts = [Part("imports", rates.import_s, "torch, diffusers, transformers, peft")]
    if work.has_gpu:
        parts.append(Part("device", CONTEXT_S, "driver context and first kernels"))
    parts.append(Part("load", ways[slowest], f"the store, {slowest}"))
    first = CACHED_COMPILE_S * kinds_of_blocks(work.base) if compute.compiles else 0.0
    why = "compiled code from an earlier run, and one step" if first else "one step"
    return (*parts, Part("first step", first + step_s, why))


def compile_seconds(work: Work) -> float:
    """What compiling the blocks takes where no earlier run has left the result."""
    return (COMPILE_S - CACHED_COMPILE_S) * kinds_of_blocks(work.base)


def kinds_of_blocks(sizes: ModelSizes) -> int:
    """Blocks that differ in shape: each is compiled once."""
    return len({(one.matrix_elements, one.traffic, one.num_linears) for one in sizes.blocks})


def preparing(work: Work, rates: Rates) -> tuple[Part, ...]:
    """Making each store: read, hashed, encoded and written side by side, so the slowest of them counts."""
    parts = []
    for slot in ("base", *(part.slot for part in work.conditioners)):
        sizes = work.sizes_of(slot)
        encoding = rates.bus_bytes_per_s if work.has_gpu else ENCODE_BYTES_PER_S * rates.num_cores
        stages = {
            "reading the source": sizes.source_bytes / rates.disk_read_bytes_per_s,
            "hashing": sizes.source_bytes / (rates.hash_bytes_per_s * rates.num_cores),
            "encoding": sizes.source_bytes / encoding,
            "writing the store": sizes.store_bytes / rates.disk_write_bytes_per_s,
        }
        slowest = max(stages, key=lambda name: stages[name])
        parts.append(Part(f"prepare {slot}", stages[slowest], slowest))
    return tuple(parts)
