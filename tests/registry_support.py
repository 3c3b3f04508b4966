"""A registry with a clock that tests set, and people in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outsize.registry.acts import add_party, add_subject, give_grant
from outsize.registry.gate import Gate, Request
from outsize.registry.ledger import Ledger
from outsize.registry.records import PURPOSES, Grant

SUBJECT, OTHER = "s-000000000001", "s-000000000002"
NEAR, LISTED, MEMBER, STRANGER = (f"p-00000000000{number}" for number in "1234")
NOBODY = "p-999999999999"  # is not in the registry
EVIDENCE = hashlib.sha256(b"a signed sheet of paper").hexdigest()
STARTS, NOW, ENDS = 1_000_000, 1_500_000, 2_000_000


@dataclass
class Clock:
    """Seconds since 1970, as somebody sets them."""

    seconds: float = NOW

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Registry:
    """One in a folder."""

    folder: Path
    clock: Clock = field(default_factory=Clock)

    @property
    def ledger(self) -> Ledger:
        """Opened anew, as each process does."""
        return Ledger(self.folder, clock=self.clock, wait_s=0.0)

    @property
    def gate(self) -> Gate:
        return Gate(self.ledger)

    def ask(self, purpose: str = "train", requester: str | None = NEAR, **more: Any) -> str:
        """The code of the decision about SUBJECT."""
        (made,) = self.gate.ask(Request((SUBJECT,), requester, purpose, **more))  # type: ignore[arg-type]
        assert made.allowed == (made.code == "granted")
        return made.code

    def kinds(self) -> list[str]:
        chain, faults = self.ledger.examined()
        assert not faults
        return [one.kind for one in chain.entries]


def grant_of(**changes: Any) -> Grant:
    """Consent to everything, for those who are near."""
    whole: dict[str, Any] = {
        "subject": SUBJECT,
        "scope": "self",
        "purposes": PURPOSES,
        "evidence": EVIDENCE,
        "starts": STARTS,
        "ends": ENDS,
        "allowed": {"self": (NEAR,)},
    }
    return Grant(**whole | changes)


def peopled(folder: Path, *, granted: bool = True) -> Registry:
    """A registry of one subject and the parties, with one grant or none."""
    made = Registry(folder)
    add_subject(made.ledger, "consent", SUBJECT)
    for one in (NEAR, LISTED, MEMBER, STRANGER):
        add_party(made.ledger, one)
    if granted:
        give_grant(made.ledger, grant_of())
    return made
