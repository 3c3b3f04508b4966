"""The queue of orders: trainings that are asked for now and done when a worker has time.

One SQLite file (WAL, every commit on disk). An order moves from state to state, each move one transaction that also writes one
row of `events`. Who works at an order has its lease: a time that heartbeats push on, and a token that grows with every lease.
Whatever is written under a lease names its token, and is refused once another lease was given: a worker that slept through its
time can write nothing. Not for network file systems: SQLite's locks do not hold there.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outsize.base.errors import LeaseLost, RecipeError
from outsize.base.files import json_digest, make_folder
from outsize.runs.process import ProcessId

State = Literal[
    "queued", "leased", "preparing", "waiting", "running", "saving",
    "completed", "stopped", "failed", "cancelled",
]  # fmt: skip
HELD: tuple[State, ...] = ("leased", "preparing", "waiting", "running", "saving")
_AFTER_HELD: tuple[State, ...] = ("queued", "completed", "stopped", "failed", "cancelled")
# From a state to those that may come next. Every held one may be leased anew, when its worker is gone, or be taken up by a
# fresh process of the same lease, after a stall; and it may end.
MOVES: Mapping[State, tuple[State, ...]] = {
    "queued": ("leased", "cancelled"),
    "leased": ("leased", "preparing", *_AFTER_HELD),
    "preparing": ("leased", "preparing", "waiting", *_AFTER_HELD),
    "waiting": ("leased", "preparing", "running", *_AFTER_HELD),
    "running": ("leased", "preparing", "saving", *_AFTER_HELD),
    "saving": ("leased", "preparing", "running", *_AFTER_HELD),
    "stopped": ("queued", "cancelled"),
    "failed": ("queued", "leased", "cancelled"),
    "cancelled": ("queued",),
    "completed": (),
}
_VARIABLE = "OUTSIZE_ORDERS"
_FILE = "orders.sqlite3"
_WAIT_S = 60.0  # for other processes, each of which writes for milliseconds
_SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, name TEXT NOT NULL, run TEXT NOT NULL, recipe TEXT NOT NULL,
    identity TEXT NOT NULL, state TEXT NOT NULL, why TEXT NOT NULL DEFAULT '', token INTEGER NOT NULL DEFAULT 0, worker TEXT,
    lease_until REAL NOT NULL DEFAULT 0, child TEXT, is_cancelled INTEGER NOT NULL DEFAULT 0,
    failures TEXT NOT NULL DEFAULT '{}', retry_at REAL
) STRICT;
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, order_id INTEGER NOT NULL REFERENCES orders(id), at REAL NOT NULL, was TEXT NOT NULL,
    state TEXT NOT NULL, token INTEGER NOT NULL, why TEXT NOT NULL
) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Order:
    """One order. identity: digests that make it this one. why: of its state. retry_at: when a failed one is tried again."""

    id: int
    name: str
    state: State
    why: str
    run: Path
    recipe: Mapping[str, Any]
    identity: Mapping[str, str]
    token: int
    is_cancelled: bool
    failures: Mapping[str, int]
    retry_at: float | None
    child: ProcessId | None

    @property
    def is_open(self) -> bool:
        """Whether a worker has, or will have, something to do with it."""
        return self.state in {"queued", *HELD} or (
            self.state == "failed" and self.retry_at is not None
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values, without the recipe."""
        return {
            "id": self.id, "name": self.name, "state": self.state, "why": self.why, "run": str(self.run),
            "identity": dict(self.identity), "retry_at": self.retry_at,
            "is_retryable": self.state == "failed" and self.retry_at is not None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One move. at: seconds since 1970."""

    at: float
    was: str
    state: str
    token: int
    why: str


def orders_folder() -> Path:
    """Where this user's orders lie: as OUTSIZE_ORDERS says, or with this user's data."""
    named = os.environ.get(_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("outsize", appauthor=False)) / "orders"


@dataclass(frozen=True, slots=True)
class Orders:
    """The queue in a folder. clock: seconds since 1970."""

    folder: Path
    clock: Callable[[], float] = time.time

    def add(
        self, name: str, run: Path, recipe: Mapping[str, Any], identity: Mapping[str, str]
    ) -> tuple[Order, bool]:
        """Queue an order; the same one, when it is known already. Whether it is new.

        Raises: RecipeError when another order that is not over yet works in the same run folder.
        """
        key = json_digest(dict(identity))
        with self._transaction() as db:
            found = db.execute("SELECT * FROM orders WHERE key = ?", (key,)).fetchone()
            if found is not None:
                return _order(found), False
            others = db.execute("SELECT * FROM orders WHERE run = ?", (str(run),)).fetchall()
            for other in filter(lambda one: one.is_open, map(_order, others)):
                raise RecipeError(
                    f"order {other.id} ({other.state}) works in {run} too, and differs in "
                    f"{', '.join(k for k in identity if identity[k] != other.identity.get(k))}; give the recipe another "
                    f"name, or `outsize order cancel {other.id}` first"
                )
            cursor = db.execute(
                "INSERT INTO orders (key, name, run, recipe, identity, state) VALUES (?, ?, ?, ?, ?, 'queued')",
                (key, name, str(run), json.dumps(recipe, allow_nan=False), json.dumps(dict(identity))),
            )  # fmt: skip
            number = cursor.lastrowid
            assert number is not None
            self._note(db, number, "", "queued", 0, "added")
            return _read(db, number), True

    def all(self) -> list[Order]:
        """Every order, first the first."""
        with self._transaction() as db:
            return [_order(row) for row in db.execute("SELECT * FROM orders ORDER BY id")]

    def get(self, number: int) -> Order:
        """One order.

        Raises: RecipeError when there is none of that number.
        """
        with self._transaction() as db:
            return _read(db, number)

    def events(self, number: int) -> list[Event]:
        """What happened to an order, in order."""
        with self._transaction() as db:
            rows = db.execute(
                "SELECT at, was, state, token, why FROM events WHERE order_id = ? ORDER BY seq",
                (number,),
            )
            return [Event(*row) for row in rows]

    def cancel(self, number: int) -> Order:
        """Cancel an order; one that is worked at is stopped by its worker, at the next step.

        Raises: RecipeError when it is over.
        """
        with self._transaction() as db:
            order = _read(db, number)
            if order.state in HELD:
                db.execute("UPDATE orders SET is_cancelled = 1 WHERE id = ?", (number,))
                self._note(db, number, order.state, order.state, order.token, "asked to cancel")
            else:
                self._move(db, order, "cancelled", "asked for")
            return _read(db, number)

    def retry(self, number: int) -> Order:
        """Queue an order again that failed, was stopped or cancelled, with a fresh budget of failures.

        Raises: RecipeError when it is queued, worked at or completed.
        """
        with self._transaction() as db:
            order = _read(db, number)
            self._move(db, order, "queued", "asked to try again")
            db.execute(
                "UPDATE orders SET failures = '{}', is_cancelled = 0 WHERE id = ?", (number,)
            )
            return _read(db, number)

    def claim(self, worker: ProcessId, lease_s: float) -> tuple[Lease, Order] | None:
        """Lease the first order that waits, or whose worker is gone; None when there is none now."""
        with self._transaction() as db:
            for row in db.execute("SELECT * FROM orders ORDER BY id").fetchall():
                order = _order(row)
                if not self._is_free(row, order):
                    continue
                if order.is_cancelled:  # its worker did not live to do it
                    self._move(db, order, "cancelled", "asked for")
                    continue
                why = "" if order.state not in HELD else f"its worker was gone while {order.state}"
                token = order.token + 1
                db.execute(
                    "UPDATE orders SET token = ?, worker = ?, lease_until = ? WHERE id = ?",
                    (token, json.dumps(worker.to_json()), self.clock() + lease_s, order.id),
                )
                self._move(db, _read(db, order.id), "leased", why)
                return Lease(self, order.id, token), _read(db, order.id)
        return None

    def _is_free(self, row: sqlite3.Row, order: Order) -> bool:
        now = self.clock()
        if order.state == "failed":
            return order.retry_at is not None and order.retry_at <= now
        if order.state not in HELD:
            return order.state == "queued"
        worker = ProcessId.of_json(json.loads(row["worker"] or "null"))
        return row["lease_until"] < now or (worker is not None and worker.is_alive() is False)

    def _move(
        self,
        db: sqlite3.Connection,
        order: Order,
        state: State,
        why: str,
        *,
        retry_at: float | None = None,
    ) -> None:
        if state not in MOVES[order.state]:
            raise RecipeError(f"order {order.id} is {order.state}, and cannot become {state}")
        db.execute(
            "UPDATE orders SET state = ?, why = ?, retry_at = ? WHERE id = ?",
            (state, why, retry_at, order.id),
        )
        self._note(db, order.id, order.state, state, order.token, why)

    def _note(  # noqa: PLR0917 - a row of the table
        self, db: sqlite3.Connection, number: int, was: str, state: str, token: int, why: str
    ) -> None:
        db.execute(
            "INSERT INTO events (order_id, at, was, state, token, why) VALUES (?, ?, ?, ?, ?, ?)",
            (number, self.clock(), was, state, token, why),
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        make_folder(self.folder)
        db = sqlite3.connect(self.folder / _FILE, timeout=_WAIT_S, isolation_level=None)
        try:
            db.row_factory = sqlite3.Row
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                db.execute(f"PRAGMA {pragma}")
            db.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone stops at the drive's cache
            db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";")[:-1]:
                db.execute(statement)
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")
        finally:
            db.close()


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work at an order. Everything it does raises LeaseLost once another worker has the order."""

    orders: Orders
    id: int
    token: int

    def require(self) -> None:
        """Make sure that the order is still ours."""
        with self._ours():
            pass

    def say(self, state: State) -> None:
        """The process that trains has come to a state."""
        child = json.dumps(ProcessId.own().to_json())
        with self._ours() as (db, order):
            self.orders._move(db, order, state, "")  # noqa: SLF001 - the queue's other half
            db.execute("UPDATE orders SET child = ? WHERE id = ?", (child, self.id))

    def beat(self, lease_s: float) -> Order:
        """Push the end of the lease on."""
        with self._ours() as (db, order):
            until = self.orders.clock() + lease_s
            db.execute("UPDATE orders SET lease_until = ? WHERE id = ?", (until, self.id))
            return order

    def end(self, state: State, why: str) -> None:
        """The work is over, for now or for good."""
        with self._ours() as (db, order):
            self.orders._move(db, order, state, why)  # noqa: SLF001

    def fail(self, kind: str, why: str, *, retries: int, backoff_s: float) -> float | None:
        """The work failed. kind: of failure, which may come `retries` times; when it is tried again, None: it is not."""
        with self._ours() as (db, order):
            count = order.failures.get(kind, 0) + 1
            failures = json.dumps({**order.failures, kind: count})
            is_tried = count <= retries
            retry_at = self.orders.clock() + backoff_s * 2 ** (count - 1) if is_tried else None
            db.execute("UPDATE orders SET failures = ? WHERE id = ?", (failures, self.id))
            self.orders._move(db, order, "failed", why, retry_at=retry_at)  # noqa: SLF001
            return retry_at

    @contextmanager
    def _ours(self) -> Iterator[tuple[sqlite3.Connection, Order]]:
        with self.orders._transaction() as db:  # noqa: SLF001
            order = _read(db, self.id)
            if order.token != self.token or order.state not in HELD:
                raise LeaseLost(
                    f"order {self.id} was given to another worker (token {order.token}, ours is {self.token}), or is over "
                    f"({order.state}): nothing is written"
                )
            yield db, order


def _read(db: sqlite3.Connection, number: int) -> Order:
    row = db.execute("SELECT * FROM orders WHERE id = ?", (number,)).fetchone()
    if row is None:
        raise RecipeError(f"there is no order {number}; `outsize order list` shows all")
    return _order(row)


def _order(row: sqlite3.Row) -> Order:
    return Order(
        id=row["id"], name=row["name"], state=row["state"], why=row["why"], run=Path(row["run"]),
        recipe=json.loads(row["recipe"]), identity=json.loads(row["identity"]), token=row["token"],
        is_cancelled=bool(row["is_cancelled"]), failures=json.loads(row["failures"]), retry_at=row["retry_at"],
        child=ProcessId.of_json(json.loads(row["child"] or "null")),
    )  # fmt: skip
