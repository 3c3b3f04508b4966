"""The gate: asks the ledger anew at each request, and writes down what it said before anybody acts on it.

A yes that cannot be written down is a no. Work asks when it begins and again when its result is let out, so what was revoked or
widened in between counts at once; nothing is remembered between two requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outsize.base.errors import ConsentMissing, MachineFault, StoreBroken
from outsize.registry.decide import Decision, decide
from outsize.registry.ledger import Ledger, Open, registry_folder
from outsize.registry.records import Derived, Purpose
from outsize.registry.standing import DECISION, DERIVED, Health, Standing, standing_of

_PATIENCE_S = 2  # a clock that network time sets back by so little is waited for


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be done with work that shows subjects.

    stage: whether it begins or its result is let out. derived: what comes of it, noted when the answer is yes. about: what else
    the ledger should say of it, as JSON values.
    """

    subjects: tuple[str, ...]
    requester: str | None
    purpose: Purpose
    stage: Literal["request", "release"] = "request"
    derived: Derived | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate of one registry."""

    ledger: Ledger

    def ask(self, request: Request) -> tuple[Decision, ...]:
        """One decision for each subject, all of them in the ledger; so is what was derived, where all are yes.

        Only what cannot be read, believed or written to is told of by the decisions alone.
        """
        more = {"stage": request.stage, "about": dict(request.about)}
        try:
            with self.ledger.opened(makes=True) as opened:
                standing = standing_of(opened.entries)
                decisions = _decided(standing, request, self._settled(standing))
                for one in decisions:
                    opened.append(DECISION, one.to_json() | more)
                if request.derived is not None and all(one.allowed for one in decisions):
                    add_derived(opened, standing, request.derived)
        except (MachineFault, StoreBroken, OSError) as error:
            return _decided(_unbelieved(error), request, self.ledger.now())
        return decisions

    def require(self, request: Request) -> tuple[Decision, ...]:
        """As `ask`.

        Raises: ConsentMissing naming every subject of whom there is a no, with its reason.
        """
        decisions = self.ask(request)
        denied = [one for one in decisions if not one.allowed]
        if denied:
            said = "; ".join(dict.fromkeys(f"[{one.code}] {one.text}" for one in denied))
            codes = tuple(dict.fromkeys(one.code for one in denied))
            raise ConsentMissing(
                f"there is no consent to {request.purpose}: {said}. `outsize registry list` shows who agreed to what",
                codes=codes,
            )
        return decisions

    def standing(self) -> Standing:
        """What the registry says, to look things up in.

        Raises: ConsentMissing when it cannot be read or believed: whom something shows can then not be told.
        """
        try:
            with self.ledger.opened() as opened:
                return standing_of(opened.entries)
        except (MachineFault, StoreBroken, OSError) as error:
            code = f"store_{_unbelieved(error).health}"
            raise ConsentMissing(
                f"whom this work shows cannot be told: [{code}] {error}", codes=(code,)
            ) from error

    def _settled(self, standing: Standing) -> int:
        """The time, once a clock that is hardly behind has caught up."""
        deadline = time.monotonic() + _PATIENCE_S
        now = self.ledger.now()
        while 0 < standing.newest - now <= _PATIENCE_S and time.monotonic() < deadline:
            time.sleep(0.05)
            now = self.ledger.now()
        return now


def default_gate() -> Gate:
    """This user's."""
    return Gate(Ledger(registry_folder()))


def add_derived(opened: Open, standing: Standing, derived: Derived) -> bool:
    """Note what came of subjects, unless all of it is noted already; whether anything was added."""
    known = {
        (one.kind, item, subject)
        for one in standing.derived
        for item in one.items
        for subject in one.subjects
    }
    items = tuple(
        item
        for item in dict.fromkeys(derived.items)
        if any((derived.kind, item, subject) not in known for subject in derived.subjects)
    )
    if items:
        opened.append(DERIVED, replace(derived, items=items).to_json())
    return bool(items)


def _decided(standing: Standing, request: Request, now: int) -> tuple[Decision, ...]:
    subjects: Sequence[str] = tuple(dict.fromkeys(request.subjects))
    return tuple(
        decide(standing, subject=one, requester=request.requester, purpose=request.purpose, now=now)
        for one in subjects
    )


def _unbelieved(error: Exception) -> Standing:
    health: Health = "unreadable"
    if isinstance(error, MachineFault):
        health = "locked"
    elif isinstance(error, StoreBroken):
        health = "broken"
    return Standing(health=health, why=str(error))
