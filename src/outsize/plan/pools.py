"""Bytes with an owner and a place, and the owners that several phases share.

Pools: "device" is memory of the GPU; "pinned" and "private" are host memory that nothing else can use meanwhile; "cached"
is what the system may keep of files that are read, and gives up when anyone wants the memory; "disk" is disk.

On a machine without a GPU the host computes: the same items are counted against RAM, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from outsize.base.tiers import Tier
from outsize.devices._rates import operand_bytes
from outsize.placement._spread import as_tiers
from outsize.placement._staging import staging_bytes
from outsize.plan.compute import Compute
from outsize.plan.sizes import ModelSizes

Pool = Literal["device", "pinned", "private", "cached", "disk"]
MIB = 2**20

# CUDA 13 context with the kernels of matmul, attention and convolution loaded, on an H200; smaller cards take less.
CONTEXT_BYTES = 700 * MIB
# Private bytes of Python with torch, diffusers, transformers and peft; a CUDA context adds 200 MiB of its own.
BASELINE_BYTES = {True: 730 * MIB, False: 330 * MIB}
# Matrices that are decoded at once: a compiler starts the next decoding before the last product is over. Peaks of
# Flux.2-dev on one H200 rise by 0.6 GiB when compiled, at any size: one matrix more.
SCRATCHES = {True: 2, False: 1}


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of one owner in one pool."""

    owner: str
    pool: Pool
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Holding:
    """How one model's blocks are held: kind names the placement, tiers where each block is kept.

    keeps_activations: blocks keep what they compute for backward, instead of running again there. offloads_inputs: the
    inputs of blocks wait in host memory for backward. has_vocabulary_on_host: token table and head of a language base stay
    in host memory.
    """

    kind: str
    slots: int
    tiers: tuple[Tier, ...]
    keeps_activations: bool = False
    offloads_inputs: bool = False
    has_vocabulary_on_host: bool = False

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self.tiers)

    @property
    def resident(self) -> frozenset[int]:
        """The blocks that stay on the device."""
        return frozenset(self.blocks_in("device"))

    @property
    def num_streamed(self) -> int:
        """Blocks that are copied in."""
        return self.num_blocks - len(self.resident)

    def blocks_in(self, tier: Tier) -> list[int]:
        """The blocks that a tier keeps, in running order."""
        return [block for block, one in enumerate(self.tiers) if one == tier]


class Machine(Protocol):
    """Where it computes."""

    @property
    def has_gpu(self) -> bool:
        """Else the host computes."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Everything that is in memory together. holding: of the model whose blocks run in it."""

    name: str
    items: tuple[Item, ...]
    holding: Holding | None = None

    def total(self, *pools: Pool) -> int:
        """Bytes in these pools together."""
        return sum(item.num_bytes for item in self.items if item.pool in pools)

    @property
    def device_bytes(self) -> int:
        """On the GPU."""
        return self.total("device")

    @property
    def host_bytes(self) -> int:
        """In RAM that nothing else can use meanwhile."""
        return self.total("pinned", "private")


def resident(model: ModelSizes, kind: str) -> Holding:
    """Every block stays on the device."""
    count = len(model.blocks)
    return Holding(kind, 0, as_tiers(count, range(count)))


def compute_pool(machine: Machine) -> Pool:
    """Where tensors compute."""
    return "device" if machine.has_gpu else "private"


def blocks(model: ModelSizes, holding: Holding, device: Pool) -> Iterator[Item]:
    """The packed blocks, wherever their tiers keep them, and what streaming them takes."""

    def of(tier: Tier) -> list[int]:
        return [model.blocks[block].streamed_bytes for block in holding.blocks_in(tier)]

    kept, streamed = of("device"), of("pinned") + of("pageable") + of("disk")
    if kept or not streamed:
        yield Item("blocks kept", device, sum(kept), f"{len(kept)} packed blocks")
    if streamed:
        slots = min(holding.slots, len(streamed))
        yield Item("ring", device, slots * max(streamed), f"{slots} slots of the largest block")
    pinned: Pool = "pinned" if device == "device" else "private"
    held: tuple[tuple[Tier, str, Pool], ...] = (
        ("pinned", "streamed blocks", pinned),
        ("pageable", "blocks in ordinary memory", "private"),
        ("disk", "blocks on disk", "disk"),
    )
    for tier, owner, pool in held:
        if of(tier):
            yield Item(owner, pool, sum(of(tier)), f"{len(of(tier))} packed blocks")
    staging = staging_bytes([block.streamed_bytes for block in model.blocks], holding.tiers)
    if staging:
        yield Item("staging", pinned, staging, "through which blocks reach the device")


def outside(model: ModelSizes, size: int, device: Pool, *, vocabulary: int = 0) -> Iterator[Item]:
    """What is no block, in the compute type. vocabulary: numbers of it that stay in host memory."""
    why = "embedders, modulation, norms and head, in the compute type"
    yield Item("outside the blocks", device, (model.small_elements - vocabulary) * size, why)
    if vocabulary:
        why = "token table and head, read by rows and tiles"
        yield Item("vocabulary", "pinned", vocabulary * size, why)


def rest(
    model: ModelSizes,
    size: int,
    device: Pool,
    compute: Compute | None = None,
    *,
    vocabulary: int = 0,
) -> Iterator[Item]:
    """What is no block, and the matrices that are decoded at a time. vocabulary: see outside."""
    yield from outside(model, size, device, vocabulary=vocabulary)
    count, why = 1, "the largest matrix, decoded"
    if compute is not None and device == "device":
        count, size = SCRATCHES[compute.compiles], operand_bytes(compute.arithmetic)
        why += f" to {compute.arithmetic}" + (", twice at once" if count > 1 else "")
    yield Item("decode scratch", device, count * model.largest_matrix * size, why)


def context(machine: Machine) -> Iterator[Item]:
    """The driver's."""
    if machine.has_gpu:
        yield Item("context", "device", CONTEXT_BYTES, "driver context and kernels; no tensor")


def host(machine: Machine, model: ModelSizes) -> Iterator[Item]:
    """Python, the buffer through which a model is loaded, and the store's pages that the system may keep."""
    yield Item("program", "private", BASELINE_BYTES[machine.has_gpu], "Python with torch")
    yield Item("load buffer", "private", model.largest_packet_bytes, "one packet while loading")
    yield Item("store files", "cached", model.store_bytes, "read while loading")
