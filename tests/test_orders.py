"""Orders: every move in one transaction, no write under a lease that is over, failures tried again by their class."""

from __future__ import annotations

import dataclasses
import json
import platform
import sqlite3
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from run_support import command, environment, write_pictures
from test_runs import _checkpoint

from outsize.app.worker import _class_of
from outsize.base.errors import LeaseLost, MachineFault, OutsizeError, RecipeError
from outsize.runs.checkpoint import newest_checkpoint, save_checkpoint
from outsize.runs.orders import HELD, MOVES, Lease, Order, Orders, State
from outsize.runs.process import ProcessId

IDENTITY = {"recipe": "a", "base": "b", "data": "c", "seed": "1"}
THIS = ProcessId.own()
GONE = ProcessId(2**22 + 5, 1.0, platform.node())


class Clock:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def orders(tmp_path: Path, clock: Clock) -> Orders:
    return Orders(tmp_path / "orders", clock)


def add(orders: Orders, name: str = "run", **identity: str) -> Order:
    return orders.add(name, Path("runs", name), {"name": name}, IDENTITY | identity)[0]


def claim(orders: Orders, worker: ProcessId = THIS) -> Lease:
    claimed = orders.claim(worker, 60.0)
    assert claimed is not None
    return claimed[0]


def states(orders: Orders, number: int = 1) -> list[str]:
    return [one.state for one in orders.events(number)]


def test_an_order_goes_through_every_state_with_one_event_each(orders: Orders) -> None:
    add(orders)
    lease = claim(orders)
    way: list[State] = ["preparing", "waiting", "running", "saving", "running"]
    for state in way:
        lease.say(state)
    lease.end("completed", "")
    assert states(orders) == ["queued", "leased", *way, "completed"]
    assert all(one.state == two.was for one, two in pairwise(orders.events(1)))
    assert orders.claim(THIS, 60.0) is None


def test_no_move_is_possible_but_those_of_the_table(orders: Orders) -> None:
    """The table is the issue's: queued, leased, preparing, waiting, running and saving by turns, then one of the ends."""
    for was in get_args(State):
        for state in get_args(State):
            order = dataclasses.replace(add(orders), state=was)
            if state in MOVES[was]:
                continue
            with orders._transaction() as db, pytest.raises(RecipeError, match="cannot become"):
                orders._move(db, order, state, "")
    assert MOVES["completed"] == ()
    assert set(MOVES["leased"]) == {
        "leased", "preparing", "queued", "completed", "stopped", "failed", "cancelled"
    }  # fmt: skip


def test_the_same_order_is_added_once_and_another_for_the_same_folder_is_refused(
    orders: Orders,
) -> None:
    first = add(orders)
    again, is_new = orders.add("run", Path("runs/run"), {"name": "run"}, IDENTITY)
    assert (again.id, is_new) == (first.id, False)
    with pytest.raises(RecipeError, match=r"order 1 \(queued\).*differs in data, seed"):
        add(orders, data="x", seed="2")
    assert add(orders, "other", seed="2").id == 2
    orders.cancel(1)
    assert add(orders, data="x").id == 3, "the folder is free again"


def test_a_stale_worker_writes_nothing(orders: Orders, clock: Clock, tmp_path: Path) -> None:
    """Put to sleep and woken, it believes that the order is still its own: state, checkpoint and end are all refused."""
    add(orders)
    stale = claim(orders)
    stale.say("preparing")
    assert orders.claim(THIS, 60.0) is None, "its time is not over"
    clock.now += 61
    fresh = claim(orders)
    before = (orders.get(1), orders.events(1))
    with pytest.raises(LeaseLost):
        stale.say("waiting")
    with pytest.raises(LeaseLost):
        stale.beat(60.0)
    with pytest.raises(LeaseLost):
        stale.end("completed", "")
    with pytest.raises(LeaseLost):
        stale.fail("crash", "", retries=3, backoff_s=1.0)
    with pytest.raises(LeaseLost):
        save_checkpoint(tmp_path / "checkpoints", _checkpoint(1), stale.require)
    assert newest_checkpoint(tmp_path / "checkpoints") == (None, [])
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert (orders.get(1), orders.events(1)) == before
    fresh.say("preparing")
    save_checkpoint(tmp_path / "checkpoints", _checkpoint(1), fresh.require)
    assert newest_checkpoint(tmp_path / "checkpoints")[0] is not None


def test_a_heartbeat_keeps_a_lease_and_a_dead_worker_loses_it_at_once(
    orders: Orders, clock: Clock
) -> None:
    add(orders)
    lease = claim(orders)
    clock.now += 50
    lease.beat(60.0)
    clock.now += 50
    assert orders.claim(THIS, 60.0) is None
    lease.end("queued", "")
    claim(orders, GONE)
    assert claim(orders).token == 3, "the process that had it is not there any more"


@pytest.mark.parametrize("state", [one for one in HELD if one != "leased"])
def test_an_order_is_taken_over_in_every_state(orders: Orders, state: State) -> None:
    add(orders)
    lease = claim(orders, GONE)
    for one in ("preparing", "waiting", "running", "saving"):
        lease.say(one)  # type: ignore[arg-type]
        if one == state:
            break
    assert claim(orders).token == 2
    assert orders.get(1).state == "leased"
    assert orders.events(1)[-1].why == f"its worker was gone while {state}"


def test_a_failure_is_tried_again_later_each_time_until_its_class_is_spent(
    orders: Orders, clock: Clock
) -> None:
    add(orders)
    waits = []
    for _ in range(2):
        retry_at = claim(orders).fail("crash", "boom", retries=2, backoff_s=10.0)
        assert retry_at is not None
        waits.append(retry_at - clock.now)
        assert orders.claim(THIS, 60.0) is None, "not before its time"
        clock.now = retry_at
    assert waits == [10.0, 20.0]
    assert claim(orders).fail("other", "boom", retries=1, backoff_s=10.0) is not None
    clock.now += 100
    assert claim(orders).fail("crash", "boom", retries=2, backoff_s=10.0) is None
    assert not orders.get(1).is_open
    assert orders.claim(THIS, 60.0) is None
    orders.retry(1)
    assert claim(orders).fail("crash", "boom", retries=2, backoff_s=10.0) is not None


def test_what_time_cannot_heal_is_not_tried_again() -> None:
    """A wrong recipe, a missing file, a person's no: by exit code, as the child tells it. A crash may be the machine's."""
    again = {one.__name__: _class_of(one.exit_code)[1] for one in OutsizeError.__subclasses__()}
    assert {name for name, count in again.items() if count} == {"MachineFault", "Stalled", "StoreBroken"}  # fmt: skip
    assert again["ConsentMissing"] == 0
    assert _class_of(MachineFault.exit_code) == ("MachineFault", 3)
    assert _class_of(-9) == ("crash (-9)", 3)
    assert _class_of(0xC0000005) == ("crash (0xc0000005)", 3)
    assert _class_of(1) == ("defect", 1)


def test_cancel_is_at_once_or_asked_of_the_worker_and_survives_it(orders: Orders) -> None:
    add(orders)
    assert orders.cancel(1).state == "cancelled"
    assert orders.retry(1).state == "queued"
    lease = claim(orders, GONE)
    assert orders.cancel(1).state == "leased"
    assert lease.beat(60.0).is_cancelled
    assert orders.claim(THIS, 60.0) is None
    assert orders.get(1).state == "cancelled"
    orders.retry(1)
    claim(orders).end("completed", "")
    for change in (orders.cancel, orders.retry):
        with pytest.raises(RecipeError, match="is completed, and cannot become"):
            change(1)


def test_a_file_of_orders_is_kept_with_full_sync_and_foreign_keys(orders: Orders) -> None:
    add(orders)
    with orders._transaction() as db:
        values = [
            db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
        assert values == ["wal", 2, 1]
        with pytest.raises(sqlite3.IntegrityError):
            orders._note(db, 99, "", "queued", 0, "")


def text_recipe(folder: Path) -> Path:
    """A recipe whose sources are there in name alone: orders do not look inside."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "x.safetensors").write_bytes(b"x")
    write_pictures(folder / "pictures", 2)
    path = folder / "recipe.yaml"
    path.write_text(
        "name: cat\nbase: {family: flux2, variant: tiny, source: ./model}\ncache: cache\n"
        "data: {resolution: 64, sets: [{folder: pictures}]}\n"
    )
    return path


# runs command lines in one process; torch must not come with any of them
SEVERAL = """
import json, sys
from outsize.cli.main import main
for line in json.loads(sys.argv[1]):
    print("CODE", main(line), flush=True)
assert "torch" not in sys.modules
"""


def test_the_commands_answer_without_torch_and_pin_the_recipe(tmp_path: Path) -> None:
    """What was ordered is what is trained, whatever becomes of the file; other data is another order."""
    recipe = text_recipe(tmp_path)
    env = environment() | {"OUTSIZE_ORDERS": str(tmp_path / "queue")}

    def run(*lines: list[str]) -> str:
        words = [sys.executable, "-c", SEVERAL, json.dumps(lines)]
        done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    path = str(recipe)
    said = run(
        ["order", "add", path], ["order", "add", path], ["order", "list"], ["order", "show", "7"],
        ["order", "cancel", "1"], ["order", "retry", "1"], ["order", "list", "--json"],
    )  # fmt: skip
    assert "order 1: queued" in said
    assert "order 1: known already, queued" in said
    assert "RecipeError: there is no order 7" in said
    assert said.count("CODE 0") == 6
    recipe.write_text(recipe.read_text().replace("64", "128"))
    shown: dict[str, Any] = json.loads(run(["order", "show", "1", "--json"]).partition("CODE")[0])
    assert shown["recipe"]["data"]["resolution"] == 64
    assert [one["state"] for one in shown["events"]] == ["queued", "cancelled", "queued"]
    recipe.write_text(recipe.read_text().replace("128", "64"))
    (tmp_path / "pictures" / "00.txt").write_text("another caption")
    assert "differs in data; give the recipe another name" in run(["order", "add", path])


def test_an_order_whose_data_changed_or_that_cannot_be_planned_fails_for_good(
    tmp_path: Path,
) -> None:
    """Trying again would find the same; the reason stands in the order."""
    env = environment() | {"OUTSIZE_ORDERS": str(tmp_path / "queue")}

    def run(*words: str) -> str:
        done = subprocess.run(command(*words), capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for name in ("a", "b"):
        run("order", "add", str(text_recipe(tmp_path / name)))
    (tmp_path / "a" / "pictures" / "00.txt").write_text("another caption")
    run("worker", "--until-empty", "--device", "cpu", "--offline")
    first, second = json.loads(run("order", "list", "--json"))
    assert (first["state"], first["is_retryable"]) == ("failed", False)
    assert first["why"].startswith("data changed since it was ordered")
    assert (second["state"], second["is_retryable"]) == ("failed", False)
    assert second["why"].startswith("SourceError: ")
