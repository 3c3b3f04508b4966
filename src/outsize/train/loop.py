"""The loop.

Everything a step depends on is a function of (recipe, step): nothing is remembered beside adapter and
optimiser, so a run that was killed and resumed takes the same steps to the same bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from outsize.adapters.health import HealthWatch, require_finite
from outsize.base.journal import Journal
from outsize.runs.checkpoint import Checkpoint, prune_checkpoints, save_checkpoint
from outsize.runs.requests import Requests
from outsize.runs.right import Own, Right
from outsize.train.stalls import Doing
from outsize.train.update import Update

Outcome = Literal["completed", "stopped"]


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop itself decides by; see the recipe's train and checkpoints sections."""

    num_steps: int
    accumulate: int
    learning_rate: float
    schedule: Literal["constant", "cosine", "linear"]
    schedule_floor: float
    warmup_steps: int
    clip_norm: float | None
    checkpoint_every: int
    checkpoints_kept: int

    def rate_at(self, step: int) -> float:
        """Step size of an update: linear warm-up from 0 (exclusive) times the schedule, which counts all steps."""
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        if self.schedule == "constant":
            return self.learning_rate * warm
        way = step / self.num_steps
        left = 1 - way if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * way))
        return self.learning_rate * warm * max(self.schedule_floor, left)


class MicroBatches(Protocol):
    """What there is to learn from."""

    def loss(self, step: int, place: int) -> Tensor:
        """The loss of one micro-batch, with its graph."""

    def prepare(self, step: int, place: int) -> None:
        """Get the micro-batch that comes next ready; its loss is asked for later, or never."""


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of one step, which add up to all of it.

    compute_s: the device had work; copy_wait_s: it waited for a block to be copied; host_s: it had nothing queued.
    """

    compute_s: float
    copy_wait_s: float
    host_s: float

    def to_json(self) -> dict[str, float]:
        """As JSON values, for the journal."""
        return {name: round(value, 5) for name, value in asdict(self).items()}


class StepClock(Protocol):
    """Tells where a step's seconds went. It waits for nothing."""

    def begin(self) -> None:
        """A step begins."""

    def queued(self) -> None:
        """All work up to the gradients is queued."""

    def updating(self) -> None:
        """That work is done, and nothing is queued; the update comes next."""

    def split(self, seconds: float) -> Split:
        """The update is queued as well. seconds: of the whole step."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is known after one update. seconds: the whole step, checkpoints left out; split: None: not measured."""

    step: int
    num_steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    split: Split | None = None


@dataclass(slots=True)
class Loop:
    """One run's training.

    begin_step: tells the placement that a step begins. losses: the loss of one micro-batch (step, place), with its
    graph. names_of: what a step learns from, to name it when it fails. identity: JSON that a checkpoint must share with the run that resumes it. watch: sees every report.
    asks: called before each checkpoint is written, which what it raises prevents; saved: told of each that was.
    between: called after each step, once what has to be saved is saved, unless the run stops there. clock: None: where a
    step's seconds go is not measured. doing: told when a step begins, and when it has ended. right: asked
    before a checkpoint is committed.
    """

    settings: LoopSettings
    update: Update
    begin_step: Callable[[], None]
    losses: MicroBatches
    names_of: Callable[[int], list[str]]
    requests: Requests
    journal: Journal
    checkpoints: Path
    identity: Mapping[str, Any]
    watch: Callable[[StepReport], None]
    between: Callable[[StepReport], None] | None = None
    clock: StepClock | None = None
    doing: Callable[[Doing], None] | None = None
    asks: Callable[[int], None] | None = None
    saved: Callable[[Path], None] | None = None
    right: Right = field(default_factory=Own)
    start: int = 0

    def run(self) -> Outcome:
        """Train from `start` to the last step, or until asked to stop; both end with a checkpoint."""
        health = HealthWatch()
        for step in range(self.start, self.settings.num_steps):
            report = self._step(step, health)
            request = self.requests.look()
            is_last = step + 1 == self.settings.num_steps
            if request or is_last or (step + 1) % self.settings.checkpoint_every == 0:
                self.save(step + 1, "schedule" if request is None else request[1])
            if request and request[0] == "stop" and not is_last:
                return "stopped"
            if self.between is not None:
                self.between(report)
        return "completed"

    def _step(self, step: int, health: HealthWatch) -> StepReport:
        self._says("step")
        started = time.perf_counter()
        if self.clock is not None:
            self.clock.begin()
        self.begin_step()
        losses = []
        for place in range(self.settings.accumulate):
            loss = self.losses.loss(step, place) / self.settings.accumulate
            loss.backward()  # type: ignore[no-untyped-call] # torch's stub
            self.update.collect_()
            losses.append(loss.detach())
        norm = self.update.grad_norm()
        if step + 1 < self.settings.num_steps:
            self.losses.prepare(step + 1, 0)  # while the device is still at this step
        loss_value, norm_value = self._waited_for(torch.stack(losses).sum(), norm)
        require_finite(loss_value, norm_value, self.update.grads(), step, self.names_of)
        for name in health.look(self.update.grads()):
            self.journal.write("warning", step=step, what="no gradient", tensor=name)
        if self.clock is not None:
            self.clock.updating()
        if self.settings.clip_norm is not None:
            self.update.clip_(self.settings.clip_norm, norm)
        rate = self.settings.rate_at(step)
        self.update.step_(rate)
        seconds = time.perf_counter() - started
        self._says("between")
        return self._report(step, loss_value, norm_value, rate, seconds)

    def _says(self, what: Doing) -> None:
        if self.doing is not None:
            self.doing(what)

    def _waited_for(self, loss: Tensor, norm: Tensor) -> list[float]:
        """Loss and norm: the one wait of a step for the device, so they come together."""
        both = torch.stack([loss, norm.float()])
        if self.clock is not None:
            self.clock.queued()
        found: list[float] = both.tolist()
        return found

    def _report(
        self, step: int, loss: float, norm: float, rate: float, seconds: float
    ) -> StepReport:
        split = None if self.clock is None else self.clock.split(seconds)
        report = StepReport(step + 1, self.settings.num_steps, loss, norm, rate, seconds, split)
        self.journal.write(
            "step", step=report.step, loss=loss, grad_norm=norm, learning_rate=rate,
            seconds=round(seconds, 4), **({} if split is None else split.to_json()),
        )  # fmt: skip
        self.watch(report)
        return report

    def save(self, step: int, reason: str) -> None:
        """Write a checkpoint of `step` finished updates."""
        if self.asks is not None:
            self.asks(step)
        started = time.perf_counter()
        self.right.say("saving")
        tensors, skeleton = self.update.state()
        groups = {"adapter": _on_host(self.update.masters), "optimizer": tensors}
        averaged = self.update.averaged()
        if averaged is not None:
            groups["averaged"] = _on_host(averaged)
        checkpoint = Checkpoint(
            step,
            groups,
            {"optimizer": skeleton, "identity": dict(self.identity)},
        )
        path = save_checkpoint(self.checkpoints, checkpoint, self.right.require)
        if self.saved is not None:
            self.saved(path)
        prune_checkpoints(self.checkpoints, self.settings.checkpoints_kept)
        self.right.say("running")
        self.journal.write(
            "checkpoint", step=step, reason=reason, folder=path.name,
            seconds=round(time.perf_counter() - started, 4),
        )  # fmt: skip

    def resume_(self, checkpoint: Checkpoint) -> None:
        """Take up where a checkpoint ended."""
        with torch.no_grad():
            for name, master in self.update.masters.items():
                master.copy_(checkpoint.groups["adapter"][name])
        self.update.publish_()
        self.update.load_state_(
            checkpoint.groups["optimizer"],
            checkpoint.values["optimizer"],
            checkpoint.groups.get("averaged"),
        )
        self.start = checkpoint.step


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().to("cpu", copy=True) for name, one in tensors.items()}
