"""Workers under fire: killed at every move of an order, put to sleep, killed at random; each order ends once, with its bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_support import checkpoint_bytes, environment, train_here, write_recipe

from outsize.app.orders import add_order
from outsize.recipes.load import load_recipe
from outsize.runs.folder import RunFolder
from outsize.runs.orders import Orders

DRIVER = Path(__file__).with_name("order_driver.py")
TINY: dict[str, Any] = {"checkpoints": {"every": 1, "keep": 20}}
WAIT_S = 120.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="kills and stops by signals"),
]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class Place:
    """A queue, recipes that share a model and its stores, and workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.orders = Orders(folder / "queue")
        self._workers: list[subprocess.Popen[bytes]] = []

    def recipe(self, name: str, seed: int) -> Path:
        train = {"steps": 2, "learning_rate": 1e-2, "seed": seed, "exact": True}
        model = self.folder / "model"
        path = write_recipe(
            self.folder, name=name, train=train, model=model if model.exists() else None, **TINY
        )
        return path.rename(self.folder / f"{name}.yaml")

    def expected(self, seed: int) -> dict[str, bytes]:
        """The bytes of an undisturbed training, in this process."""
        _, run = train_here(self.recipe(f"whole{seed}", seed))
        return checkpoint_bytes(run)

    def worker(self, **told: Any) -> subprocess.Popen[bytes]:
        env = environment() | {
            "OUTSIZE_ORDERS": str(self.orders.folder),
            "OUTSIZE_CARD_LOCKS": str(self.folder / "cards"),
            "ORDER_TEST": json.dumps(told),
        }
        env.pop("OUTSIZE_CARD_LENT")  # these are to exclude each other
        with (self.folder / "worker.log").open("ab") as log:
            made = subprocess.Popen([sys.executable, DRIVER, "worker"], stdout=log, stderr=log, env=env)  # fmt: skip
        self._workers.append(made)
        return made

    def states(self, number: int = 1) -> list[str]:
        return [one.state for one in self.orders.events(number)]

    def wait_for(self, state: str, number: int = 1) -> None:
        until = time.monotonic() + WAIT_S
        while self.orders.get(number).state != state:
            assert time.monotonic() < until, (self.states(number), self.said())
            time.sleep(0.02)

    def said(self) -> str:
        logs = [self.folder / "worker.log", *self.orders.folder.glob("*/log.txt")]
        return "\n".join(one.read_text(errors="replace")[-1500:] for one in logs if one.exists())

    def bytes_of(self, name: str) -> dict[str, bytes]:
        return checkpoint_bytes(RunFolder(self.folder / "runs" / name))

    def close(self) -> None:
        for one in self._workers:
            if one.poll() is None:
                one.send_signal(signal.SIGCONT)
                one.kill()
            one.wait()


@pytest.fixture(autouse=True)
def closed(place: Place) -> Iterator[None]:
    yield
    place.close()


KILLS = [
    [state, when]
    for state in ("leased", "preparing", "waiting", "running", "saving", "completed")
    for when in ("before", "after")
]


def test_a_worker_killed_at_every_move_leaves_an_order_that_the_next_one_finishes(
    place: Place,
) -> None:
    """Kill -9 of worker and child before and after each commit: nothing is lost, nothing is done twice."""
    expected = place.expected(5)
    add_order(place.orders, load_recipe(place.recipe("cat", 5)))
    done = place.folder / "done"
    done.mkdir()
    codes = []
    while len(codes) <= len(KILLS) and place.orders.get(1).state != "completed":
        worker = place.worker(kills=KILLS, done=str(done))
        codes.append(worker.wait(WAIT_S))
    assert place.worker(kills=KILLS, done=str(done)).wait(WAIT_S) == 0
    assert len(list(done.iterdir())) == len(KILLS), place.said()
    assert codes == [-signal.SIGKILL] * len(KILLS), place.said()
    assert place.states().count("completed") == 1
    assert place.states()[-1] == "completed"
    assert place.bytes_of("cat") == expected


def test_a_worker_that_slept_through_its_lease_writes_nothing_when_it_wakes(place: Place) -> None:
    """Worker and child are stopped while training; another worker ends the child and finishes; the woken one goes home."""
    expected = place.expected(5)
    add_order(place.orders, load_recipe(place.recipe("cat", 5)))
    first = place.worker(lease_s=1.5)
    place.wait_for("running")
    child = place.orders.get(1).child
    assert child is not None
    first.send_signal(signal.SIGSTOP)
    os.kill(child.pid, signal.SIGSTOP)
    second = place.worker(lease_s=60.0)
    assert second.wait(WAIT_S) == 0, place.said()
    assert not psutil.pid_exists(child.pid) or psutil.Process(child.pid).status() == "zombie"
    before = place.orders.events(1)
    first.send_signal(signal.SIGCONT)
    assert first.wait(WAIT_S) == 0, place.said()
    assert place.orders.events(1) == before
    assert place.states().count("completed") == 1
    assert place.bytes_of("cat") == expected


def test_two_workers_of_one_card_take_turns_and_an_order_waits_for_it(place: Place) -> None:
    """The card is a processor that bears a name: the second order says that it waits, and for whom."""
    for number, name in enumerate(("cat", "dog")):
        add_order(place.orders, load_recipe(place.recipe(name, number)))
    first = place.worker(card="GPU-pretended")
    place.wait_for("running", 1)
    child = place.orders.get(1).child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    second = place.worker(card="GPU-pretended")
    log = place.orders.folder / "2" / "log.txt"
    until = time.monotonic() + WAIT_S
    while not log.exists() or "waiting for" not in log.read_text(errors="replace"):
        assert time.monotonic() < until, place.said()
        time.sleep(0.05)
    assert place.orders.get(2).state == "waiting"
    assert f"process {child.pid} (outsize train" in log.read_text(errors="replace")
    os.kill(child.pid, signal.SIGCONT)
    assert [first.wait(WAIT_S), second.wait(WAIT_S)] == [0, 0]
    assert [one.state for one in place.orders.all()] == ["completed", "completed"]


def test_a_cancelled_training_saves_stops_and_goes_on_when_it_is_wanted_again(place: Place) -> None:
    train = {"steps": 4000, "learning_rate": 1e-2, "seed": 5, "exact": True}
    path = write_recipe(place.folder, train=train, checkpoints={"every": 1000})
    add_order(place.orders, load_recipe(path))
    worker = place.worker()
    place.wait_for("running")
    place.orders.cancel(1)
    assert worker.wait(WAIT_S) == 0
    assert place.orders.get(1).state == "cancelled", place.said()
    run = RunFolder(place.folder / "runs" / "run")
    assert run.state == "stopped"
    assert not run.stop_now.exists()
    assert checkpoint_bytes(run)


NUM_ORDERS = 20
KILL_FOR_S = 120.0


def test_twenty_orders_two_workers_and_kills_at_random_end_once_each_with_their_bytes(
    place: Place,
) -> None:
    """Nothing lost, nothing twice: workers die, children die, both sleep through their leases."""
    seed = int(os.environ.get("OUTSIZE_SEED", "11"))
    dice, fates = random.Random(seed), Counter[str]()
    print(f"seed {seed}")  # noqa: T201
    expected = {one: place.expected(one) for one in range(NUM_ORDERS)}
    for one in range(NUM_ORDERS):
        add_order(place.orders, load_recipe(place.recipe(f"run{one}", one)))
    workers = [place.worker(lease_s=4.0) for _ in range(2)]
    began = time.monotonic()
    while any(one.is_open for one in place.orders.all()):
        time.sleep(dice.uniform(2.0, 9.0))
        if time.monotonic() - began < KILL_FOR_S:
            number = dice.randrange(2)
            fates[harm(dice, workers[number])] += 1
        workers = [one if one.poll() is None else place.worker(lease_s=4.0) for one in workers]
        assert time.monotonic() - began < 600, (place.said(), fates)
    took = time.monotonic() - began
    print(f"{dict(fates)} in {took:.0f} s")  # noqa: T201
    for one in workers:
        assert one.wait(WAIT_S) == 0
    for one in range(NUM_ORDERS):
        assert place.states(one + 1).count("completed") == 1, place.orders.events(one + 1)
        assert place.bytes_of(f"run{one}") == expected[one], one
    assert fates.total() > 5


def harm(dice: random.Random, worker: subprocess.Popen[bytes]) -> str:
    """Kill a worker, a child, both; or let a worker sleep through its lease."""
    fate = dice.choice(["worker", "worker and child", "child", "sleep"])
    children = psutil.Process(worker.pid).children() if worker.poll() is None else []
    if fate == "sleep" and worker.poll() is None:
        worker.send_signal(signal.SIGSTOP)
        time.sleep(4.5)
        worker.send_signal(signal.SIGCONT)
        return fate
    if "worker" in fate:
        worker.kill()
        worker.wait()
    if "child" in fate:
        for one in children:
            if one.is_running():
                one.kill()
    return fate
