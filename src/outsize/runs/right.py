"""The right to write to a run: everybody's own, or that of an order's lease, which is asked at every commit.

A worker starts a training with the lease in OUTSIZE_LEASE and holds the other end of its standard input. When that closes the
worker is gone, and the training ends at once: what was saved is resumed by whoever works at the order next.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from outsize.runs.orders import Lease, Orders, State

VARIABLE = "OUTSIZE_LEASE"
_EXIT_ORPHANED = 130  # as if it had been interrupted: nobody is left to read it


class Right(Protocol):
    """Asked before anything is committed to a run folder, and told of what the training has come to."""

    def require(self) -> None:
        """Raises LeaseLost when the run is another worker's by now."""

    def say(self, state: State) -> None:
        """The training has come to a state. Raises: as require."""


class Own:
    """Of a training that no worker started: the lock of the run folder is all the right it needs."""

    def require(self) -> None:
        """It always may."""

    def say(self, state: State) -> None:
        """Nobody asks."""


def right_of(environment: Mapping[str, str] = os.environ) -> Right:
    """This process's right; with a lease, it also ends with its worker."""
    text = environment.get(VARIABLE)
    if not text:
        return Own()
    told = json.loads(text)
    threading.Thread(target=_end_with_worker, name="leash", daemon=True).start()
    return Lease(Orders(Path(told["folder"])), told["id"], told["token"])


def lent(lease: Lease) -> dict[str, str]:
    """What gives a child the lease."""
    told = {"folder": str(lease.orders.folder), "id": lease.id, "token": lease.token}
    return {VARIABLE: json.dumps(told)}


def _end_with_worker() -> None:
    """Wait for the end of standard input, to which nothing is ever written."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(_EXIT_ORPHANED)
