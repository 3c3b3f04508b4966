"""Where a step's seconds go: the parts add up, and a wait, an idle queue and work are told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import checkpoint_bytes, site_of, train_here, write_recipe
from tiny import write_tiny

from outsize.app.meter import MeteredPlacement, StepMeter
from outsize.app.train import _Pace
from outsize.base.journal import read_journal
from outsize.base.provenance import code_digest, provenance
from outsize.train.loop import Split, StepReport


class Queue:
    """A card whose queue runs behind the host: marks are read at the time at which the card passes them."""

    copies_asynchronously = True

    def __init__(self) -> None:
        self.host_s = self.card_s = 0.0

    def mark(self) -> Any:
        self.card_s = max(self.card_s, self.host_s)
        at_s = self.card_s

        class Mark:
            passed_s = at_s

            def seconds_after(self, earlier: Any) -> float:
                return float(self.passed_s - earlier.passed_s)

        return Mark()

    def work(self, seconds: float) -> None:
        self.card_s = max(self.card_s, self.host_s) + seconds

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.card_s)


class Slow:
    """Each acquisition makes the queue wait."""

    def __init__(self, queue: Queue, wait_s: float) -> None:
        self._queue, self._wait_s = queue, wait_s

    def acquire(self, _block: int) -> torch.Tensor:
        self._queue.work(self._wait_s)
        return torch.empty(0)

    def begin(self, sweep: str) -> None: ...

    def release(self, block: int) -> None: ...


def _steps(queue: Queue, wait_s: float, idle_s: float, count: int = 4) -> list[Split]:
    placement = MeteredPlacement(Slow(queue, wait_s), queue)  # type: ignore[arg-type]
    meter = StepMeter(queue, placement)  # type: ignore[arg-type]
    splits = []
    for _ in range(count):
        started = queue.host_s
        meter.begin()
        for block in range(3):
            placement.acquire(block)
            queue.work(1.0)
        meter.queued()
        queue.synchronize()
        queue.host_s += idle_s
        meter.updating()
        queue.work(0.5)  # the update
        splits.append(meter.split(queue.host_s - started))
    return splits


@pytest.mark.parametrize(("wait_s", "idle_s"), [(0.0, 0.0), (0.25, 0.0), (0.0, 2.0), (0.25, 2.0)])
def test_work_waits_and_an_empty_queue_are_told_apart(wait_s: float, idle_s: float) -> None:
    """Three blocks of a second and an update of half a one, whatever else there is."""
    first, *others = _steps(Queue(), wait_s, idle_s)
    assert first == Split(3.0, pytest.approx(3 * wait_s), pytest.approx(idle_s))
    for one in others:
        assert one.compute_s == pytest.approx(3.5)
        assert one.copy_wait_s == pytest.approx(3 * wait_s)
        assert one.host_s == pytest.approx(idle_s)


def test_what_is_copied_between_steps_is_no_steps_wait() -> None:
    """Previews go through the same placement."""
    queue = Queue()
    placement = MeteredPlacement(Slow(queue, 1.0), queue)  # type: ignore[arg-type]
    meter = StepMeter(queue, placement)  # type: ignore[arg-type]
    for _ in range(2):
        meter.begin()
        meter.queued()
        queue.synchronize()
        meter.updating()
        split = meter.split(1.0)
        placement.acquire(0)
    assert split.copy_wait_s == 0.0


def test_on_a_device_that_copies_at_once_all_copying_is_a_wait() -> None:
    queue = Queue()
    queue.copies_asynchronously = False
    inner = Slow(queue, 0.0)
    busy: Callable[[object], None] = lambda _: queue.work(1.0)  # noqa: E731
    inner.begin = inner.release = busy  # type: ignore[method-assign,assignment]
    placement = MeteredPlacement(inner, queue)  # type: ignore[arg-type]
    placement.is_on = True
    placement.begin("train")
    placement.release(0)
    assert placement.take_waited_s() == 2.0


@pytest.mark.parametrize("kind", ["resident", "stream"])
def test_the_journal_of_a_run_tells_where_each_step_went(tmp_path: Path, kind: str) -> None:
    """And the stopwatch is no part of the numbers: test_train.py compares both placements to the bit."""
    model = write_tiny("flux2", "tiny", tmp_path / "model")
    _, run = train_here(write_recipe(tmp_path, model=model, placement={"kind": kind, "slots": 2}))
    assert checkpoint_bytes(run)
    events = list(read_journal(run.journal))
    steps = [one for one in events if one["event"] == "step"]
    assert len(steps) == 6
    for one in steps:
        parts = (one["compute_s"], one["copy_wait_s"], one["host_s"])
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(one["seconds"], abs=2e-4)
        assert one["compute_s"] > 0
        assert (one["copy_wait_s"] > 0) == (kind == "stream")
    (identity,) = [one for one in events if one["event"] == "identity"]
    assert identity["code"] == code_digest()
    assert len(identity["base"]) >= 16
    assert identity["libraries"]["torch"] == torch.__version__
    memory = [one for one in events if one["event"] == "memory"]
    assert memory[0]["step"] == 1
    assert memory[0]["host_bytes"] > 2**20


def test_the_digest_of_the_code_is_of_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest()
    code_digest.cache_clear()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path).replace(b"\n", b"\r\n"))
    assert code_digest() == before, "the ends of lines are the checkout's"
    code_digest.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#")
    assert code_digest() != before
    code_digest.cache_clear()
    assert provenance()["libraries"]["numpy"]


class Sizes:
    """A corpus of two sizes, in turn."""

    def sizes_of(self, step: int) -> tuple[int, ...]:
        return (512,) if step % 2 else (1024,)


def test_a_pace_of_two_sizes_is_the_mean_of_both_whatever_one_step_took(tmp_path: Path) -> None:
    """Plans count the mean over resolutions: a median over all steps would be one size's alone."""
    with site_of(write_recipe(tmp_path)) as (site, _):
        pace: Any = _Pace(site, Sizes())  # type: ignore[arg-type]  # all that a pace asks of a corpus
        assert pace.step_s() is None
        for step in range(1, 26):
            seconds = 300.0 if step == 14 else 4.0 if step % 2 else 1.0
            pace.see(StepReport(step, 25, 0.5, 0.1, 1e-4, seconds))
    # twenty are counted, ten of each size; the one that took long is one of ten, and no median
    assert pace.step_s() == (4.0 + 1.0) / 2
