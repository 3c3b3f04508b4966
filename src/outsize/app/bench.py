"""Measure training steps: the product's own loop, model, placement, adapter and update, with random weights and pictures.

What is not the product's: weights and batches come from `_bench_weights.py`, nothing is saved, and the device is waited
for after every step, so that each step has its own time. The first steps are apart: the first compiles and fills caches,
a few more look at every gradient (adapters/health.py). Then come the timed ones, whose median counts, and, where blocks
are copied, two more with a stopwatch around every wait for a copy (`_bench_meter.py`).

Overlap: the share of copy time that was hidden behind computing is 1 - waited / copied. `waited` is the time in which
computing had nothing to do but wait for a block; `copied` is the bytes copied in a step over the rate of a large copy
from pinned memory, measured on this machine in the same process.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from outsize.adapters.health import WATCHED_UPDATES
from outsize.app._bench_meter import MeteredPlacement
from outsize.app._bench_weights import RandomBatches, disk_reader, fill_, packets_of
from outsize.app.losses import Losses
from outsize.app.models import Training, build_model, place
from outsize.app.parts import BASE, parts_of
from outsize.app.train import attach_adapter, loop_settings, make_update
from outsize.base.journal import Journal
from outsize.plan.compare import planned_bytes
from outsize.runs.folder import RunFolder
from outsize.runs.requests import Requests
from outsize.train.loop import Loop, StepReport
from outsize.weights.budget import MemoryWatch, trim_heap

if TYPE_CHECKING:
    from outsize.devices.protocol import Device
    from outsize.layers.model import FrozenModel
    from outsize.plan.plan import Plan
    from outsize.recipes.recipe import Recipe
    from outsize.train.update import Update

_METERED_STEPS = 2
_NOTHING_BUT = ("data",)  # sections of a recipe that may differ between cases that use one model


@dataclass(frozen=True, slots=True)
class Timing:
    """How many steps: first the untimed ones, of which the first is reported by itself, then those that count."""

    warmup: int = WATCHED_UPDATES
    steps: int = 7


@dataclass(frozen=True, slots=True)
class Steps:
    """What was measured of one case. Seconds of whole steps, each waited for.

    peak_bytes: of tensors, from loading's end on; steady_peak_bytes: of the timed steps alone; reserved_bytes: what the
    allocator took for it. copied_bytes, waited_s: of one step; hidden_share: None where nothing is copied.
    """

    step_s: float
    steps_s: tuple[float, ...]
    first_step_s: float
    load_s: float
    kernel: str
    peak_bytes: int
    steady_peak_bytes: int
    reserved_bytes: int
    private_bytes: int
    placement_device_bytes: int
    placement_host_bytes: int
    copied_bytes: int
    copied_s: float
    waited_s: float
    hidden_share: float | None
    losses: tuple[float, ...]

    @property
    def compile_s(self) -> float:
        """What the first step took more than the others."""
        return max(0.0, self.first_step_s - self.step_s)


@dataclass(frozen=True, slots=True)
class Result:
    """One case: what was asked, what was planned, what was measured, or the fault that ended it."""

    recipe: Recipe
    plan: Plan
    measured: Steps | None
    fault: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The case as JSON values."""
        recipe, chosen = self.recipe, self.plan.to_json()
        return {
            "base": f"{recipe.base.family}.{recipe.base.variant}",
            "format": recipe.to_json()["base"]["format"],
            "resolution": recipe.data.resolution,
            "batch": recipe.train.batch,
            "accumulate": recipe.train.accumulate,
            "rank": recipe.adapter.rank,
            "optimizer": recipe.train.optimizer,
            "placement": chosen["placement"],
            "compute": chosen.get("compute"),
            "planned": {
                "fits": self.plan.fits,
                "peak_bytes": planned_peak_bytes(self.plan),
                "step_s": planned_step_s(self.plan),
            },
            "measured": None
            if self.measured is None
            else asdict(self.measured) | {"compile_s": self.measured.compile_s},
            "fault": self.fault,
        }


def planned_peak_bytes(plan: Plan) -> int:
    """What the plan says of the allocator's peak while training; the driver's context is not in it."""
    return planned_bytes(plan, "train", "device" if plan.machine.has_gpu else "private") or 0


def planned_step_s(plan: Plan) -> float:
    """What the plan says of the seconds of a step, once the first is over."""
    return plan.step.seconds


class Bench:
    """Runs cases one after another, holding one model at most; use it as a context, or close it.

    cache: folder for compiled code, and for random stores when blocks are to be read from disk.
    bus_bytes_per_s: of large copies from pinned memory to the device; 0 where there are none.
    """

    def __init__(
        self, device: Device, timing: Timing, cache: Path, *, bus_bytes_per_s: float = 0.0
    ) -> None:
        self._device, self._timing, self._cache = device, timing, cache
        self._bus = bus_bytes_per_s
        self._held: _Loaded | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, recipe: Recipe, plan: Plan) -> Result:
        """Measure one case. Running out of the device's memory is a result too."""
        fault = None
        try:
            return Result(recipe, plan, self._measure(recipe, plan))
        except torch.OutOfMemoryError as error:
            fault = f"out of memory: {' '.join(str(error).split())[:300]}"
        # only here are the frames gone that held the tensors
        self.close()
        return Result(recipe, plan, None, fault)

    def close(self) -> None:
        """Give the model's memory back."""
        if self._held is not None:
            self._held.model.close()
            self._held = None
        gc.collect()
        trim_heap()
        self._device.release_cached()

    def _measure(self, recipe: Recipe, plan: Plan) -> Steps:
        with MemoryWatch() as watch:
            if self._held is None or not self._held.suits(recipe, plan):
                self.close()
                self._held = _load(recipe, plan, self._device, self._cache)
            loaded = self._held
            self._device.release_cached()
            self._device.reset_peak()
            run = _Run(recipe, loaded, self._device, self._timing)
            run.go()
        return run.result(watch.peak_bytes, self._bus)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model with its adapter, and the recipe and plan that it was made for."""

    recipe: Recipe
    plan: Plan
    model: FrozenModel
    meter: MeteredPlacement
    update: Update
    kernel: str
    load_s: float

    def suits(self, recipe: Recipe, plan: Plan) -> bool:
        """Whether another case differs in what the model does not depend on."""
        same = self.recipe.model_copy(update={one: getattr(recipe, one) for one in _NOTHING_BUT})
        mine, other = self.plan.to_json(), plan.to_json()
        return (
            same == recipe
            and self.plan.holding_of(BASE) == plan.holding_of(BASE)
            and mine.get("compute") == other.get("compute")
        )


def _load(recipe: Recipe, plan: Plan, device: Device, cache: Path) -> _Loaded:
    """The model as the plan holds it, with random weights and a fresh adapter."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # a case must not find what another one compiled
    started = time.perf_counter()
    part = parts_of(recipe)[BASE]
    packets = packets_of(part)
    blocks = [packets[block] for block in range(len(packets) - 1)]
    holding = plan.holding_of(BASE)
    placed = place(blocks, holding, device, read=disk_reader(part, holding, device, cache))
    model = build_model(
        part,
        blocks,
        plan=plan,
        device=device,
        placement=placed,
        training=Training(cache / "compiled"),
    )
    # asked for before anything is compiled, so that the answer is known then
    kernel = part.packing.packed.kernel(device.torch_device)
    fill_(model, part, device)
    meter = MeteredPlacement(model.placement, device)
    model.placement = meter
    adapter, initial = attach_adapter(recipe, device, model)
    update = make_update(recipe, adapter, initial)
    device.synchronize()
    load_s = time.perf_counter() - started
    return _Loaded(recipe, plan, model, meter, update, kernel, load_s)


class _Enough(Exception):  # noqa: N818 - not an error
    """Ends the loop before it saves anything."""


class _Run:
    """The steps of one case."""

    def __init__(self, recipe: Recipe, loaded: _Loaded, device: Device, timing: Timing) -> None:
        self._recipe, self._loaded = recipe, loaded
        self._device, self._timing = device, timing
        self._seconds: list[float] = []
        self._losses: list[float] = []
        self._steady_from = timing.warmup
        self._metered_from = timing.warmup + timing.steps
        self._copied_before = 0
        self._copied_bytes = self._peak_bytes = self._steady_bytes = 0
        self._waited_s = 0.0

    def go(self) -> None:
        """Run all steps."""
        with tempfile.TemporaryDirectory(prefix="outsize-bench-") as folder:
            run = RunFolder(Path(folder))
            journal = Journal(run.journal)
            num_steps = self._metered_from + _METERED_STEPS
            settings = replace(
                loop_settings(self._recipe),
                num_steps=num_steps + 1,  # the last step would save
                checkpoint_every=num_steps + 1,
            )
            loop = Loop(
                settings=settings,
                update=self._loaded.update,
                begin_step=lambda: self._loaded.model.begin("train"),
                losses=self._micro_batches(),
                pictures_of=lambda step: [f"the random pictures of step {step}"],
                requests=Requests(run),
                journal=journal,
                checkpoints=run.checkpoints,
                identity={},
                watch=self._watch,
            )
            try:
                self._began = time.perf_counter()
                loop.run()
            except _Enough:
                pass
            finally:
                journal.close()

    def result(self, private_bytes: int, bus_bytes_per_s: float) -> Steps:
        """What the steps showed."""
        timed = self._seconds[self._steady_from : self._metered_from]
        copied_s = self._copied_bytes / bus_bytes_per_s if bus_bytes_per_s else 0.0
        placement = self._loaded.meter
        return Steps(
            step_s=statistics.median(timed),
            steps_s=tuple(round(one, 5) for one in timed),
            first_step_s=self._seconds[0],
            load_s=self._loaded.load_s,
            kernel=self._loaded.kernel,
            peak_bytes=self._peak_bytes,
            steady_peak_bytes=self._steady_bytes,
            reserved_bytes=self._device.peak_reserved_bytes(),
            private_bytes=private_bytes,
            placement_device_bytes=placement.device_bytes(),
            placement_host_bytes=placement.host_bytes(),
            copied_bytes=self._copied_bytes,
            copied_s=copied_s,
            waited_s=self._waited_s,
            hidden_share=max(0.0, 1 - self._waited_s / copied_s) if copied_s else None,
            losses=tuple(self._losses),
        )

    def _micro_batches(self) -> Losses:
        batches = RandomBatches(self._recipe, self._device)
        return Losses(self._recipe, self._device, self._loaded.model, batches)

    def _watch(self, report: StepReport) -> None:
        """After every step: wait, take the time, and go to the next kind of step."""
        self._device.synchronize()
        self._seconds.append(time.perf_counter() - self._began)
        self._losses.append(report.loss)
        meter = self._loaded.meter
        done = len(self._seconds)
        peak = self._device.peak_bytes()
        self._peak_bytes = max(self._peak_bytes, peak)
        if done == self._steady_from:
            self._device.reset_peak()
        if done == self._metered_from:
            self._steady_bytes = peak
            self._copied_before = meter.copied_bytes()
            meter.is_on = True
        if done == self._metered_from + _METERED_STEPS:
            meter.is_on = False
            self._waited_s = meter.take_waited_s() / _METERED_STEPS
            self._copied_bytes = (meter.copied_bytes() - self._copied_before) // _METERED_STEPS
            raise _Enough
        self._began = time.perf_counter()
