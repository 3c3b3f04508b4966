"""The watcher of a training: a thread beside it that only reads, so that a step which hangs inside a kernel is seen at all.

Every ten seconds it takes a sample and asks train/stall_judge.py. A stall is journaled and told; then the loop is asked to
save, or to save and stop. A loop that does not answer cannot save: the watcher writes down where it stands, says so, and
ends the process with the exit code of `Stalled`; the last checkpoint stands. A call that hangs while it holds Python's own
lock stops this thread as well, and nothing here can help.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from outsize.app.report.page import write_report
from outsize.base.errors import Stalled
from outsize.base.units import format_seconds
from outsize.runs.checkpoint import all_checkpoints
from outsize.train.stall_judge import Judge
from outsize.train.stalls import SPILLED_BYTES, Baseline, Doing, Limits, Sample, Stall

if TYPE_CHECKING:
    from outsize.app.site import Site
    from outsize.runs.requests import Requests
    from outsize.train.loop import Outcome, StepReport

LIMITS = Limits()
STACKS_NAME = "hung.txt"  # where every thread stood when the process was ended
_SILENT, _PROVED = 3.0, 12.0  # looks for which sensors, and a proof, count
_LAST_WORDS_S = 30.0  # a disk that does not answer must not keep a dead run alive

Mark = tuple[int, Doing]  # counts up, so that a step is told from the next


class StallWatch:
    """Watches one training. Sensors are heard of through the journal; end: ends the process with an exit code."""

    def __init__(
        self,
        site: Site,
        requests: Requests,
        *,
        limits: Limits | None = None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.stall: Stall | None = None  # that the run is stopped for
        self._site, self._requests, self._end = site, requests, end
        self._limits = limits or LIMITS
        self._judge = Judge(self._limits, site.plan.step.seconds)
        self._over = threading.Event()
        self._mark: Mark = (0, "between")
        self._reports: deque[StepReport] = deque(maxlen=1000)
        self._step = 0
        self._step_s: float | None = None
        self._share: float | None = None
        self._clock = _Awake(2 * self._limits.every_s)
        self._process = psutil.Process()
        self._marked: tuple[Mark, float] = (self._mark, 0.0)
        self._asked: tuple[Mark, float] = (self._mark, 0.0)
        self._learned: Baseline | None = None
        self._is_undecided_told = False
        self._told, self._proof = _Heard(), _Heard()
        self._proved_bytes = 0  # that lay on the host at the proof

    def doing(self, what: Doing) -> None:
        """The training's thread begins something."""
        self._mark = (self._mark[0] + 1, what)

    def see(self, report: StepReport) -> None:
        """A step has ended."""
        self._reports.append(report)

    def watched(self, train: Callable[[], Outcome], step: int) -> Outcome:
        """Watch while it trains. step: updates done so far.

        Raises: Stalled when the watcher stopped it; what was done is saved by then.
        """
        self._step = step
        with self.watching():
            outcome = train()
        if outcome == "stopped" and self.stall is not None:
            reached = self._reports[-1].step if self._reports else self._step
            raise Stalled(
                f"{self.stall.text}. Saved after step {reached}; `outsize train` goes on from there"
            )
        return outcome

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)
        with self._site.journal.followed_by(self._hear):
            thread.start()
            try:
                yield
            finally:
                self._over.set()
                thread.join(self._limits.every_s)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._limits.every_s):
                self._look()
        except Exception as error:  # noqa: BLE001 - a training that is well must not end by its watcher
            self._warn(f"stalls are not watched for any more: {type(error).__name__}: {error}")

    def _look(self) -> None:
        sample = self._sample()
        if self.stall is not None:
            self._insist(self.stall, sample)
            return
        found = self._judge.see(sample)
        self._tell_learned()
        self._tell_undecided()
        if self._judge.wants_proof:
            self._requests.ask_proof()
        if found is not None:
            self._act(found)

    def _sample(self) -> Sample:
        """A look at the run and its machine."""
        at_s = self._clock.read()
        mark = self._mark
        if mark != self._marked[0]:
            self._marked = (mark, at_s)
        ended = [self._reports.popleft() for _ in range(len(self._reports))]
        if ended:
            self._step = ended[-1].step
            self._step_s = statistics.median(one.seconds for one in ended)
            self._share = _compute_share(ended)
        return Sample(
            at_s,
            self._step,
            mark[1],
            at_s - self._marked[1],
            self._step_s,
            self._share,
            **_own(self._process),
            **self._sensors(),
        )

    def _hear(self, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if event["event"] == "sensors":
            self._told = _Heard(now, event)
        elif event["event"] == "residency":
            self._proof, self._proved_bytes = _Heard(now, event), _host_bytes(self._told.event)

    def _sensors(self) -> dict[str, Any]:
        """What the card told last; nothing where it has been silent since, as a driver that hangs is."""
        since = time.monotonic() - self._limits.every_s * _SILENT
        told = self._told.event if self._told.at_s > since else None
        found: dict[str, Any] = {}
        if told is not None:
            names = ("busy", "memory_busy", "power_w", "clock_mhz")
            process = ("card_bytes", "host_bytes", "evicted_ms")
            found = {name: told[name] for name in names}
            found |= {name: told["process"][name] for name in process}
        since = time.monotonic() - self._limits.every_s * _PROVED
        is_older = (found.get("host_bytes") or 0) - self._proved_bytes >= SPILLED_BYTES
        if self._proof.at_s > since and not is_older:
            found["proof"] = self._proof.event["verdict"]
        return found

    def _tell_learned(self) -> None:
        """What is held to be healthy from here on; on a card that is far slower than planned from the start, aloud."""
        judge, known = self._judge, self._learned
        if judge.baseline and (known is None or known.step_s != judge.baseline.step_s):
            planned_s = self._site.plan.step.seconds
            healthy = judge.baseline.to_json()
            self._site.journal.write(
                "stall_baseline", step=self._step, planned_step_s=planned_s, **healthy
            )
            if judge.is_doubtful and self._site.device.copies_asynchronously:
                took = format_seconds(judge.baseline.step_s)
                self._warn(
                    f"steps take {took} where {format_seconds(planned_s)} were planned; stalls are judged by that"
                )
        self._learned = judge.baseline or known

    def _tell_undecided(self) -> None:
        """That steps are slow, and what could not be told of it; once, and not where there is no card to tell of."""
        undecided = self._judge.undecided
        if undecided and not self._is_undecided_told and self._site.device.copies_asynchronously:
            self._site.journal.write(
                "stall_undecided",
                step=self._step,
                undecided={name: [*one] for name, one in undecided.items()},
            )
            self._is_undecided_told = True

    def _act(self, stall: Stall) -> None:
        """Tell, and ask the loop to save, or to save and stop."""
        self._site.journal.write("stall", **stall.to_json())
        self._site.progress.say(f"stalled: {stall.text}")
        self._requests.ask(stall.signature.act, f"stall: {stall.signature.name}")
        if stall.signature.act == "stop":
            self.stall, self._asked = stall, (self._mark, self._clock.read())

    def _insist(self, stall: Stall, sample: Sample) -> None:
        """End the process when its training's thread does not answer."""
        if self._mark != self._asked[0]:
            self._asked = (self._mark, sample.at_s)
        is_gone = stall.signature.is_frozen and sample.doing == "step"
        waits_s = self._limits.grace_s if is_gone else self._limits.frozen_s
        if sample.at_s - self._asked[1] < waits_s:
            return
        last = threading.Thread(target=self._say_last_words, args=(stall,), daemon=True)
        last.start()
        last.join(_LAST_WORDS_S)
        self._end(Stalled.exit_code)

    def _say_last_words(self, stall: Stall) -> None:
        run = self._site.run
        with (run.path / STACKS_NAME).open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        saved = all_checkpoints(run.checkpoints)
        kept = f"step {int(saved[0].name)}" if saved else "none"
        message = (
            f"{stall.text}. The training's thread does not answer and cannot save, so the process is ended; newest "
            f"checkpoint: {kept}. `outsize train` goes on from there"
        )
        sys.stderr.write(f"{Stalled.__name__}: {message}\n")
        sys.stderr.flush()
        reason = {"error": Stalled.__name__, "message": message}
        self._site.journal.write("failed", **reason)
        run.set_state("failed", **reason)
        write_report(run)
        sys.stdout.flush()

    def _warn(self, text: str) -> None:
        self._site.progress.say(f"warning: {text}")
        self._site.journal.write("warning", what=text)


@dataclass(frozen=True, slots=True)
class _Heard:
    """An event of the journal, and when it came."""

    at_s: float = float("-inf")
    event: Mapping[str, Any] = field(default_factory=dict)


def _host_bytes(sensors: Mapping[str, Any]) -> int:
    """What lay on the host, as far as anybody told."""
    found: int | None = sensors.get("process", {}).get("host_bytes")
    return found or 0


class _Awake:
    """Seconds that this process was awake: a suspended machine, or a process held by its user, is no stall."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._last, self._total_s = longest_s, time.monotonic(), 0.0

    def read(self) -> float:
        """Seconds so far; of each time since the last look no more than `longest_s` count."""
        now = time.monotonic()
        self._total_s += min(now - self._last, self._longest_s)
        self._last = now
        return self._total_s


def _compute_share(ended: Sequence[StepReport]) -> float | None:
    shares = [one.split.compute_s / one.seconds for one in ended if one.split and one.seconds > 0]
    return statistics.median(shares) if shares else None


def _own(process: psutil.Process) -> dict[str, Any]:
    """What the system counts of this process, and whether the machine is on its battery."""
    times = process.cpu_times()
    found: dict[str, Any] = {"cpu_s": times.user + times.system}
    if hasattr(process, "io_counters"):  # not on macOS
        counters = process.io_counters()
        # Linux counts with read_chars what came over a network, too
        found["read_bytes"] = getattr(counters, "read_chars", counters.read_bytes)
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is not None and battery.power_plugged is not None:
        found["on_battery"] = not battery.power_plugged
    return found
