"""The steps of one case of a bench, through the product's own loop, and what they showed."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.adapters.health import WATCHED_UPDATES
from outsize.app.tasks.protocol import task_of
from outsize.app.train import loop_settings
from outsize.base.journal import Journal
from outsize.runs.folder import RunFolder
from outsize.runs.requests import Requests
from outsize.train.loop import Loop, StepReport

if TYPE_CHECKING:
    from outsize.app.meter import MeteredPlacement
    from outsize.devices.protocol import Device
    from outsize.layers.model import FrozenModel
    from outsize.plan.plan import Plan
    from outsize.recipes.recipe import Recipe
    from outsize.train.loop import MicroBatches
    from outsize.train.update import Update

_METERED_STEPS = 2


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
class Loaded:
    """A model with its adapter, and the recipe and plan that it was made for. kernel: what decodes its weights."""

    recipe: Recipe
    plan: Plan
    model: FrozenModel
    meter: MeteredPlacement
    update: Update
    kernel: str
    load_s: float


class _Enough(Exception):  # noqa: N818 - not an error
    """Ends the loop before it saves anything."""


class CaseRun:
    """The steps of one case."""

    def __init__(self, recipe: Recipe, loaded: Loaded, device: Device, timing: Timing) -> None:
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
                names_of=lambda step: [f"the random batches of step {step}"],
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

    def _micro_batches(self) -> MicroBatches:
        task = task_of(self._recipe)
        batches = task.random_batches(self._recipe, self._device)
        return task.losses(self._recipe, self._device, self._loaded.model, batches)

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
