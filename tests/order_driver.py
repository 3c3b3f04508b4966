"""`outsize` and a worker with a hurry, for tests: a processor that is a card, and death at chosen moves of an order.

    python order_driver.py worker              # until no order is open; its children are this program too
    python order_driver.py train RECIPE ...    # as outsize does it

ORDER_TEST (JSON) says: lease_s; card: the uuid that the processor bears; kills: [[state, "before" or "after"], ...], in turn: who
comes to the first of them dies by SIGKILL before or after that move is committed, with its worker; done: folder that remembers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outsize.cli.main import main
from outsize.runs.orders import Orders

TOLD: dict[str, Any] = json.loads(os.environ.get("ORDER_TEST", "{}"))
_moved: list[str] = []


def work() -> int:
    from outsize.app.worker import Pace, Worker
    from outsize.runs.orders import orders_folder

    pace = Pace(lease_s=TOLD.get("lease_s", 60.0), poll_s=0.1, backoff_s=0.1, grace_s=60.0)
    program = [sys.executable, str(Path(__file__).absolute())]
    made = Worker(Orders(orders_folder()), _say, ["--device", "cpu"], pace, program)
    _say(f"{made.run(until_empty=True)} taken")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def die_if_it_is_time(when: str) -> None:
    """Once for each kill: its file is made first."""
    done = Path(TOLD["done"])
    count = len(list(done.iterdir()))
    if count >= len(TOLD["kills"]) or not _moved:
        return
    if [_moved[-1], when] == TOLD["kills"][count]:
        (done / str(count)).touch()
        if sys.argv[1] != "worker":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def patch_kills() -> None:
    note, transaction = Orders._note, Orders._transaction

    def noted(  # noqa: PLR0917 - as it is
        self: Orders, db: Any, number: int, was: str, state: Any, token: int, why: str
    ) -> None:
        note(self, db, number, was, state, token, why)
        _moved.append(state)
        die_if_it_is_time("before")

    @contextmanager
    def transacted(self: Orders) -> Iterator[Any]:
        _moved.clear()
        with transaction(self) as db:
            yield db
        die_if_it_is_time("after")

    Orders._note, Orders._transaction = noted, transacted  # type: ignore[method-assign,assignment]


def patch_card() -> None:
    """Only a training opens a device; a worker must not even import torch."""
    from outsize.devices._sensors import CardId
    from outsize.devices.cpu import Cpu

    Cpu.card = property(lambda _self: CardId("nvidia", "", TOLD["card"]))  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    if TOLD.get("kills"):
        patch_kills()
    if TOLD.get("card") and sys.argv[1] == "train":
        patch_card()
    sys.exit(work() if sys.argv[1] == "worker" else main(sys.argv[1:]))
