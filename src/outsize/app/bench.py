"""Measure training steps: the product's own loop, model, placement, adapter and update, with random weights and batches.

What is not the product's: weights and batches come from `_bench_weights.py` and `_bench_batches.py`, nothing is saved, and the device is waited
for after every step, so that each step has its own time. The first steps are apart: the first compiles and fills caches,
a few more look at every gradient (adapters/health.py). Then come the timed ones, whose median counts, and, where blocks
are copied, two more with a stopwatch around every wait for a copy (`meter.py`).

Overlap: the share of copy time that was hidden behind computing is 1 - waited / copied. `waited` is the time in which
computing had nothing to do but wait for a block; `copied` is the bytes copied in a step over the rate of a large copy
from pinned memory, measured on this machine in the same process.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from outsize.app._bench_steps import CaseRun, Loaded, Steps, Timing
from outsize.app._bench_weights import disk_reader, fill_, packets_of
from outsize.app.attached import attach_adapter, make_update
from outsize.app.meter import MeteredPlacement
from outsize.app.models import Training, build_model, place, vocabulary_on_host
from outsize.app.parts import BASE, parts_of
from outsize.plan.compare import planned_bytes
from outsize.plan.names import TASKS, base_family
from outsize.weights.budget import MemoryWatch, trim_heap

if TYPE_CHECKING:
    from outsize.devices.protocol import Device
    from outsize.plan.plan import Plan
    from outsize.plan.tasks.protocol import PlanTask
    from outsize.recipes.recipe import Recipe

_NOTHING_BUT = ("data",)  # sections of a recipe that may differ between cases that use one model


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
        task: PlanTask = TASKS.load(base_family(recipe.base.family).objective)
        return {
            "base": f"{recipe.base.family}.{recipe.base.variant}",
            "format": recipe.to_json()["base"]["format"],
            "shape": task.shape(recipe),
            **self._size(task),
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
            "measured": None if self.measured is None else self._measured(task, self.measured),
            "off": self._off(),
            "fault": self.fault,
        }

    def _size(self, task: PlanTask) -> dict[str, Any]:
        """The number that makes samples large or small, under its name in recipes: the largest, where there are several."""
        section, _, name = task.size.rpartition(".")
        value = self.recipe.to_json()[section][name]
        return {name: max(value) if isinstance(value, list) else value}

    def _measured(self, task: PlanTask, steps: Steps) -> dict[str, Any]:
        unit, count = task.intake(self.recipe)
        per_s = {f"{unit}_per_s": round(count / steps.step_s, 2)}
        return asdict(steps) | {"compile_s": steps.compile_s} | per_s

    def _off(self) -> dict[str, float] | None:
        """Relative error of the plan, positive where more was measured; of memory on a card alone."""
        if self.measured is None:
            return None
        off = {"step": self.measured.step_s / planned_step_s(self.plan) - 1}
        if self.plan.machine.has_gpu:
            off["peak"] = self.measured.peak_bytes / max(planned_peak_bytes(self.plan), 1) - 1
        return {name: round(value, 4) for name, value in off.items()}


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
        self._held: Loaded | None = None

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
            if self._held is None or not _suits(self._held, recipe, plan):
                self.close()
                self._held = _load(recipe, plan, self._device, self._cache)
            loaded = self._held
            self._device.release_cached()
            self._device.reset_peak()
            run = CaseRun(recipe, loaded, self._device, self._timing)
            run.go()
        return run.result(watch.peak_bytes, self._bus)


def _suits(held: Loaded, recipe: Recipe, plan: Plan) -> bool:
    """Whether another case differs in what a loaded model does not depend on."""
    same = held.recipe.model_copy(update={one: getattr(recipe, one) for one in _NOTHING_BUT})
    return (
        same == recipe
        and held.plan.holding_of(BASE) == plan.holding_of(BASE)
        and held.plan.compute.describe() == plan.compute.describe()
    )


def _load(recipe: Recipe, plan: Plan, device: Device, cache: Path) -> Loaded:
    """The model as the plan holds it, with random weights and a fresh adapter."""
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
    fill_(model, part, device, has_outside_on_host=bool(vocabulary_on_host(part, plan)))
    meter = MeteredPlacement(model.placement, device)
    model.placement = meter
    adapter, initial = attach_adapter(recipe, device, model)
    update = make_update(recipe, adapter, initial)
    device.synchronize()
    load_s = time.perf_counter() - started
    return Loaded(recipe, plan, model, meter, update, kernel, load_s)
