"""What every command on a recipe needs, made once: parts, device, caches, journal, measured stages.

A site opens one model at a time: `opened` prepares the part's store if it is missing, loads it, and frees it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.app.parts import Part, parts_of
from outsize.app.prepare import prepare_component, store_folder, store_key
from outsize.app.stages import Stages
from outsize.base.files import write_json_atomically
from outsize.base.journal import Journal
from outsize.base.progress import Progress, Silent
from outsize.data.cache import ContentCache
from outsize.layers.model import FrozenModel, load_from_store_
from outsize.placement.protocol import PLACEMENTS, Placement, PlacementSettings
from outsize.runs.folder import RunFolder
from outsize.weights.budget import trim_heap
from outsize.weights.locate import locate_weights
from outsize.weights.source import Source

if TYPE_CHECKING:
    from outsize.devices.protocol import Device
    from outsize.plan.plan import Plan
    from outsize.recipes.recipe import Recipe
    from outsize.weights.store import Store

_WITHOUT_BLOCKS = "resident"
DEFAULT_RAM_BYTES = 2 << 30  # what preparing may take of the host's memory unless --ram says


@dataclass
class Site:
    """One recipe on one machine.

    ram_bytes: budget of host memory for preparing. offline: ask nothing of the network.
    """

    recipe: Recipe
    plan: Plan
    device: Device
    journal: Journal
    progress: Progress = field(default_factory=Silent)
    ram_bytes: int = DEFAULT_RAM_BYTES
    offline: bool = False

    _keys: dict[str, str] = field(default_factory=dict, init=False)
    _stores: dict[str, Store] = field(default_factory=dict, init=False)

    @cached_property
    def parts(self) -> dict[str, Part]:
        return parts_of(self.recipe)

    @cached_property
    def stages(self) -> Stages:
        return Stages(self.device, self.journal)

    @cached_property
    def cache_folder(self) -> Path:
        return self.recipe.cache_folder()

    @cached_property
    def cache(self) -> ContentCache:
        """Latents and embeddings."""
        return ContentCache(self.cache_folder / "conditions")

    def key(self, slot: str) -> str:
        """Digest of everything that shapes a part's store; the store itself need not be there."""
        if slot not in self._keys:
            with self._source(slot) as source:
                self._keys[slot] = store_key(
                    **self._what(slot),
                    source=source,
                    cache_root=self.cache_folder,
                    progress=self._count(f"read {slot}"),
                )
        return self._keys[slot]

    def store(self, slot: str) -> Store:
        """The prepared store of a part, made first where it is missing."""
        if slot not in self._stores:
            part = self.parts[slot]
            folder = store_folder(
                self.cache_folder,
                family=part.family_name,
                variant=part.variant,
                slot=slot,
                key=self.key(slot),
            )
            for left in part.packing.left_plain:
                self.journal.write("left_plain", slot=slot, tensor=left.name, reason=left.reason)
            with self.stages.stage(f"prepare {slot}"), self._source(slot) as source:
                self._stores[slot] = prepare_component(
                    **self._what(slot),
                    source=source,
                    folder=folder,
                    ram_budget_bytes=self.ram_bytes,
                    device=self.device.torch_device,
                    progress=self._count(f"prepare {slot}"),
                    journal=self.journal,
                )
        return self._stores[slot]

    def _what(self, slot: str) -> dict[str, Any]:
        part = self.parts[slot]
        return {
            "table": part.family.table(part.variant),
            "layouts": part.family.layouts(part.variant),
            "packing": part.packing,
        }

    def _source(self, slot: str) -> Source:
        part = self.parts[slot]
        source = part.source if part.revision is None else f"{part.source}@{part.revision}"
        return Source(locate_weights(source, sub_folder=part.folder, offline=self.offline).files)

    @contextmanager
    def opened(self, slot: str) -> Iterator[FrozenModel]:
        """A part's model, held as planned, loaded for the time of the block and freed after it."""
        part, store = self.parts[slot], self.store(slot)
        with self.stages.stage(f"load {slot}"):
            model = self._load(part, store)
        try:
            yield model
        finally:
            model.close()
            del model
            trim_heap()
            self.device.release_cached()

    def _load(self, part: Part, store: Store) -> FrozenModel:
        table, device = part.family.table(part.variant), self.device
        packets = [store.packet(block) for block in range(table.num_blocks)]
        module = part.family.build(part.variant)
        model = FrozenModel(
            module,
            table=table,
            block_paths=part.family.block_paths(part.variant),
            packing=part.packing.formats,
            packets=packets,
            placement=self._placement(part.slot, [packet.streamed_bytes for packet in packets]),
            device=device.torch_device,
            compute=device.compute_dtype,
        )
        load_from_store_(model, store)
        part.family.materialise_buffers(module, device.torch_device)
        return model

    def _placement(self, slot: str, sizes: list[int]) -> Placement:
        """The placement that the plan chose; a model without blocks has nothing to place."""
        holding = self.plan.holding_of(slot)
        kind = _WITHOUT_BLOCKS if holding is None else holding.kind
        make: Callable[[PlacementSettings], Placement] = PLACEMENTS.load(kind)
        if holding is None:
            return make(PlacementSettings(self.device, sizes))
        return make(PlacementSettings(self.device, sizes, holding.resident, holding.slots))

    def _count(self, task: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress.advance(task, done, total, "B")


@contextmanager
def open_site(
    recipe: Recipe,
    run: RunFolder,
    plan: Plan,
    device: Device,
    progress: Progress,
    *,
    ram_bytes: int = DEFAULT_RAM_BYTES,
    offline: bool = False,
) -> Iterator[Site]:
    """A site that works alone in the run folder, which then holds recipe, plan and journal.

    Raises: MachineFault when another process works there.
    """
    with run.locked():
        write_json_atomically(run.recipe, recipe.to_json())
        write_json_atomically(run.plan, plan.to_json())
        journal = Journal(run.journal)
        journal.write(
            "device", kind=device.kind, name=device.name, compute=str(device.compute_dtype)
        )
        try:
            yield Site(
                recipe, plan, device, journal, progress, ram_bytes=ram_bytes, offline=offline
            )
        finally:
            journal.close()
