"""Put on the path of a child process, it makes a step of a training hang as a kernel does: for good, and not to be interrupted.

HANG_AT: the step, counted from the start of the process. HANG_ONCE: a file; where it is there nothing hangs, and it is made
as something does. HANG_IN: "supervised": only in a process that a parent looks after; the parent itself is left alone. The
watcher's times are shortened to seconds.
"""

import os
import time
from pathlib import Path


def _make_a_step_hang(step: int, once: Path) -> None:
    from outsize.app import stall_watch
    from outsize.train.stalls import Limits
    from outsize.train.update import Update

    stall_watch.LIMITS = Limits(every_s=0.2, hung_s=6.0, frozen_s=6.0, first_s=6.0, grace_s=1.0)
    grad_norm, num_calls = Update.grad_norm, 0

    def hang(update: Update) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == step and not once.exists():
            once.touch()
            while True:  # no signal ends it, as none ends a kernel
                time.sleep(60)
        return grad_norm(update)

    Update.grad_norm = hang  # type: ignore[method-assign, assignment]


if os.environ["HANG_IN"] != "supervised" or "OUTSIZE_SUPERVISED" in os.environ:
    _make_a_step_hang(int(os.environ["HANG_AT"]), Path(os.environ["HANG_ONCE"]))
