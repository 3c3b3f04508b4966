"""What every command on a recipe needs, made once: parts, device, caches, journal, measured stages.

A site opens one model at a time: `opened` prepares the part's store if it is missing, loads it, and frees it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from outsize.app.models import Training, build_model, place, vocabulary_on_host
from outsize.app.parts import BASE, Part
from outsize.app.prepare import How
from outsize.app.stages import PREPARE, Stages
from outsize.app.stores import Stores
from outsize.base.errors import MachineFault
from outsize.base.files import write_json_atomically
from outsize.base.journal import Journal
from outsize.base.progress import Progress, Silent
from outsize.base.units import format_bytes
from outsize.base.waypoints import Waypoints
from outsize.data.cache import ContentCache
from outsize.layers.loading import Loading
from outsize.layers.model import FrozenModel
from outsize.placement.protocol import Placement, report_of
from outsize.plan.names import TASKS, base_family
from outsize.runs.checkpoint import all_checkpoints
from outsize.runs.folder import RunFolder
from outsize.runs.process import ProcessId
from outsize.runs.right import Own, Right
from outsize.weights.budget import trim_heap
from outsize.weights.reading import StoreReader

if TYPE_CHECKING:
    from outsize.devices.protocol import Device
    from outsize.dialects.protocol import AdapterWeights
    from outsize.plan.plan import Plan
    from outsize.recipes.recipe import Recipe
    from outsize.weights.store import Store

DEFAULT_RAM_BYTES = 2 << 30  # what preparing may take of the host's memory unless --ram says


@dataclass
class Site:
    """One recipe on one machine.

    ram_bytes: budget of host memory for preparing. offline: ask nothing of the network. waypoints: of the way to the first
    step. worn: an adapter from files, which is sampled and compared in place of the run's own. right: to write to the run.
    """

    recipe: Recipe
    plan: Plan
    device: Device
    journal: Journal
    progress: Progress = field(default_factory=Silent)
    ram_bytes: int = DEFAULT_RAM_BYTES
    offline: bool = False
    waypoints: Waypoints = field(default_factory=Waypoints)
    worn: AdapterWeights | None = None
    right: Right = field(default_factory=Own)

    _opened: dict[str, Store] = field(default_factory=dict, init=False)

    @cached_property
    def stores(self) -> Stores:
        """Where the stores are."""

        def tell(slot: str, done: int, total: int) -> None:
            self.progress.advance(f"read {slot}", done, total, "B")

        return Stores(self.recipe, self.offline, tell, self.store)

    @property
    def parts(self) -> dict[str, Part]:
        """All models of the recipe by slot."""
        return self.stores.parts

    @property
    def run(self) -> RunFolder:
        """Where all of this run lies."""
        return RunFolder(self.journal.path.parent)

    @cached_property
    def stages(self) -> Stages:
        """Where time and memory went so far."""
        return Stages(self.device, self.journal)

    @cached_property
    def cache(self) -> ContentCache:
        """Latents and embeddings."""
        return ContentCache(self.stores.cache_folder / "conditions")

    def store(self, slot: str) -> Store:
        """The prepared store of a part, made first where it is missing."""
        if slot not in self._opened:
            found = self.stores.existing(slot)
            self._opened[slot] = self._prepare(self.parts[slot]) if found is None else found
        return self._opened[slot]

    def _prepare(self, part: Part) -> Store:
        for left in part.packing.left_plain:
            self.journal.write("left_plain", slot=part.slot, tensor=left.name, reason=left.reason)
        how = How(
            self.ram_bytes,
            self.device.torch_device,
            lambda done, total: self.progress.advance(f"prepare {part.slot}", done, total, "B"),
            self.journal,
            lambda figures: self.stores.figures.update({part.slot: figures}),
            self.device.free_bytes(),
        )
        with self.stages.stage(f"{PREPARE}{part.slot}"):
            return self.stores.prepare(part.slot, how)

    @contextmanager
    def opened(self, slot: str, training: Training | None = None) -> Iterator[FrozenModel]:
        """A part's model, held as planned, loaded for the time of the block and freed after it."""
        store, part = self.store(slot), self.parts[slot]  # in this order: files shape the packing
        self._mark(part, "store verified")
        with self.stages.stage(f"load {slot}"):
            model = self._load(part, store, training)
        try:
            yield model
        finally:
            model.close()
            del model
            trim_heap()
            self.device.release_cached()

    def _load(self, part: Part, store: Store, training: Training | None) -> FrozenModel:
        """The model of a part; its blocks are read while upstream's library is imported and its module built."""
        device, reader = self.device, StoreReader(store)
        packets = [
            store.packet(block) for block in range(part.family.table(part.variant).num_blocks)
        ]
        placement = place(
            packets, self.plan.holding_of(part.slot), device, read=reader.read_streamed
        )
        try:
            with Loading(
                reader,
                placement,
                device,
                has_outside_on_host=bool(vocabulary_on_host(part, self.plan)),
            ) as loading:
                model = build_model(
                    part,
                    packets,
                    plan=self.plan,
                    device=device,
                    placement=placement,
                    training=training,
                )
                self._mark(part, "base built")
                loading.finish_into_(model)
                self._mark(part, "base loaded")
            self._tell_loaded(part, placement, loading, reader)
        except BaseException:
            placement.close()
            raise
        part.family.materialise_buffers(model.module, device.torch_device)
        return model

    def _mark(self, part: Part, waypoint: str) -> None:
        """Conditioners are on the way only where something is not cached yet."""
        if part.slot == BASE:
            self.waypoints.mark(waypoint)

    def _tell_loaded(
        self, part: Part, placement: Placement, loading: Loading, reader: StoreReader
    ) -> None:
        """Where the bytes lie in fact and what it took; what could not be done as planned is said aloud."""
        report = report_of(placement)
        self.journal.write(
            "loaded", slot=part.slot, kernel=part.packing.packed.kernel(self.device.torch_device),
            reading_s=round(loading.read_s, 3), hashing_s=round(loading.hash_s, 3),
            copying_s=round(loading.copy_s, 3), loading_s=round(loading.seconds, 3), not_direct=reader.why_buffered, **report,
        )  # fmt: skip
        for refused in dict.fromkeys(
            (report.get("not_pinned", ""), report.get("staging_not_pinned", ""))
        ):
            if refused:
                held = format_bytes(report["tiers"]["pageable"])
                self.progress.say(
                    f"{part.slot}: {refused}; {held} of its blocks pass through ordinary memory"
                )
        if report.get("tiers", {}).get("disk") and reader.why_buffered:
            self.progress.say(
                f"{part.slot}: blocks are read from disk through the page cache: {reader.why_buffered}"
            )


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
    waypoints: Waypoints | None = None,
) -> Iterator[Site]:
    """A site that works alone in the run folder, which then holds recipe, plan and journal.

    Raises: MachineFault when another process works there.
    """
    with run.locked():
        if not all_checkpoints(
            run.checkpoints
        ):  # else the recipe there is the one that was trained
            write_json_atomically(run.recipe, recipe.to_json())
        write_json_atomically(run.plan, plan.to_json())
        journal = Journal(run.journal)
        journal.write(
            "device", kind=device.kind, name=device.name, compute=str(device.compute_dtype),
            process=ProcessId.own().to_json(),
        )  # fmt: skip
        try:
            yield Site(
                recipe,
                plan,
                device,
                journal,
                progress,
                ram_bytes=ram_bytes,
                offline=offline,
                waypoints=waypoints or Waypoints(),
            )
        except torch.OutOfMemoryError as error:
            smaller = TASKS.load(base_family(recipe.base.family).objective).size
            raise MachineFault(
                f"{device.name} ran out of memory with {format_bytes(device.peak_bytes())} in use; the plan said "
                f"{format_bytes(plan.peak.device_bytes)}. Close other programs on the card, or lower "
                f"{smaller} or train.batch; what was saved can be resumed"
            ) from error
        finally:
            journal.close()
