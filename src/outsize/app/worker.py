"""The worker: takes orders one by one and trains each in a child process, so that no crashed context takes it along.

The child is `outsize train` of the recipe as it was ordered, with the order's lease and one end of a pipe: it asks for the lease
at every commit, and ends when the pipe does, which is when its worker is gone. The next worker ends what is left of a child
that hangs, and resumes from the newest checkpoint that verifies. This process touches no device and imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from outsize.app.orders import identity_of
from outsize.base.errors import EXIT_COMPLETED, EXIT_STOPPED, LeaseLost, OutsizeError, SourceError
from outsize.base.files import make_folder, write_json_atomically
from outsize.recipes.load import recipe_from_json
from outsize.runs.folder import RunFolder
from outsize.runs.orders import Lease, Order, Orders
from outsize.runs.process import ProcessId
from outsize.runs.requests import signals_taken
from outsize.runs.right import lent

_INTERRUPTED = 130
_DEFECT_RETRIES, _CRASH_RETRIES = 1, 3
_TAIL = 4000  # characters of a child's log in which its last words are looked for
_GONE_S = 10.0  # until a killed process is gone
_POLL_S = 0.05
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds. lease: how long an order stays a worker's without a heartbeat; poll: between heartbeats, and between looks.

    backoff: before a failed order is tried again, doubled each time; grace: until a child that was asked to stop is ended.
    """

    lease_s: float = 60.0
    poll_s: float = 1.0
    backoff_s: float = 15.0
    grace_s: float = 600.0


@dataclass
class Worker:
    """One worker. options: of `outsize train`, for every order; program: the command line of outsize."""

    orders: Orders
    say: Say
    options: Sequence[str] = ()
    pace: Pace = field(default_factory=Pace)
    program: Sequence[str] = (sys.executable, "-m", "outsize")
    is_ending: bool = field(default=False, init=False)

    def run(self, *, most: int | None = None, until_empty: bool = False) -> int:
        """Work until told to end; how many orders it took. most: at most so many; until_empty: or none is open any more."""
        num_taken = 0
        with signals_taken(self._on_signal):
            while not self.is_ending and (most is None or num_taken < most):
                claimed = self.orders.claim(ProcessId.own(), self.pace.lease_s)
                if claimed is not None:
                    num_taken += 1
                    self._work(*claimed)
                elif self._is_over(most, until_empty=until_empty):
                    break
                else:
                    time.sleep(self.pace.poll_s)
        return num_taken

    def _is_over(self, most: int | None, *, until_empty: bool) -> bool:
        """Whether to end, now that there is nothing to take."""
        if until_empty:
            return not any(one.is_open for one in self.orders.all())
        return most is not None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_ending:
            raise KeyboardInterrupt
        self.is_ending = True
        self.say("ending once the order at hand is saved; once more ends at once")

    def _work(self, lease: Lease, order: Order) -> None:
        self.say(f"order {order.id} ({order.name}): {order.run}")
        try:
            _end_process(order.child)  # of a lease before
            if not self._is_as_ordered(lease, order):
                return
            code = self._train(lease, order)
            self._settle(lease, order, code)
        except LeaseLost as error:
            self.say(str(error))

    def _is_as_ordered(self, lease: Lease, order: Order) -> bool:
        """Whether base and data still are what was ordered; an order that is not ends here."""
        recipe = recipe_from_json(order.recipe, origin=f"order {order.id}")
        try:
            now = identity_of(recipe)
        except SourceError as error:
            self._fail(lease, "SourceError", str(error), SourceError.retries)
            return False
        changed = [name for name, digest in order.identity.items() if now.get(name) != digest]
        if changed:
            why = (
                f"{' and '.join(changed)} changed since it was ordered; put it back, or order anew"
            )
            self._fail(lease, "changed", why, 0)
        return not changed

    def _train(self, lease: Lease, order: Order) -> int:
        """The exit code of the child."""
        folder, run = self.folder_of(order.id), RunFolder(order.run)
        make_folder(folder)
        recipe = folder / "recipe.json"
        write_json_atomically(recipe, dict(order.recipe))
        run.stop_now.unlink(missing_ok=True)  # meant for a training that is over
        command = [*self.program, "train", str(recipe), *self.options]
        with (folder / "log.txt").open("ab") as log:
            child = subprocess.Popen(  # noqa: S603 - a list, no shell
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **lent(lease)},
            )
            try:
                return self._watch(child, lease, run)
            finally:
                assert child.stdin is not None
                child.stdin.close()  # whatever else works for it ends by this
                if child.poll() is None:
                    child.kill()
                child.wait()

    def _watch(self, child: subprocess.Popen[bytes], lease: Lease, run: RunFolder) -> int:
        """Heartbeats until the child ends; who asks to stop is passed on."""
        asked_at: float | None = None
        while True:
            try:
                return child.wait(self.pace.poll_s)
            except subprocess.TimeoutExpired:
                order = lease.beat(self.pace.lease_s)
            if asked_at is None and (order.is_cancelled or self.is_ending):
                asked_at = time.monotonic()
                run.stop_now.parent.mkdir(parents=True, exist_ok=True)
                run.stop_now.touch()
            if asked_at is not None and time.monotonic() - asked_at > self.pace.grace_s:
                return EXIT_STOPPED  # what was saved is kept; the child is ended by the caller

    def _settle(self, lease: Lease, order: Order, code: int) -> None:
        """What becomes of an order whose child ended."""
        RunFolder(order.run).stop_now.unlink(missing_ok=True)
        if code == EXIT_COMPLETED:
            lease.end("completed", "")
        elif code in {EXIT_STOPPED, _INTERRUPTED}:
            if lease.beat(self.pace.lease_s).is_cancelled:
                lease.end("cancelled", "asked for; what was saved is kept")
            elif self.is_ending:
                lease.end("queued", "its worker was asked to end")
            else:
                lease.end("stopped", "asked to stop; `outsize order retry` goes on")
        elif code == LeaseLost.exit_code:
            lease.require()
        else:
            kind, retries = _class_of(code)
            self._fail(lease, kind, f"{kind}: {self._last_words(order.id)}", retries)
        self.say(f"order {order.id}: {self.orders.get(order.id).state}")

    def _fail(self, lease: Lease, kind: str, why: str, retries: int) -> None:
        retry_at = lease.fail(kind, why, retries=retries, backoff_s=self.pace.backoff_s)
        told = "" if retry_at is None else "; tried again later"
        self.say(f"order {lease.id} failed: {why}{told}")

    def folder_of(self, number: int) -> Path:
        """Where an order's recipe and its log lie."""
        return self.orders.folder / str(number)

    def _last_words(self, number: int) -> str:
        text = (self.folder_of(number) / "log.txt").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text[-_TAIL:].splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def _class_of(code: int) -> tuple[str, int]:
    """The class of a failure by its exit code, and how often it is tried again."""
    for one in OutsizeError.__subclasses__():
        if one.exit_code == code:
            return one.__name__, one.retries
    if code == 1:
        return "defect", _DEFECT_RETRIES
    return f"crash ({code})" if code < 0 else f"crash ({code:#x})", _CRASH_RETRIES


def _end_process(process: ProcessId | None) -> None:
    """End what an earlier lease left behind, if it still lives: it may hang, or have been put to sleep.

    One that a driver keeps alive still holds the run folder's lock, which the next training then tells of.
    """
    if process is None or process.is_alive() is not True:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(process.pid).kill()
    until = time.monotonic() + _GONE_S
    # its own parent may sleep and never collect it, so that it cannot be waited for
    while process.is_alive() and time.monotonic() < until:
        time.sleep(_POLL_S)
