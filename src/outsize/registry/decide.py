"""The decision, and nothing else: a pure function of what a registry says, who asks for whom, for what, and when.

There is one way to yes: a grant of that person, given after the last revocation, within its term, for that purpose, whose scope
admits who asks. Everything else is no, each with a reason of its own; where several grants fail, the one that came nearest tells.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any, Literal, get_args

from outsize.base.pseudonyms import is_pseudonym, pseudonym_fault
from outsize.registry.records import PURPOSES, Grant
from outsize.registry.standing import Standing

Code = Literal[
    "granted",
    "store_locked",
    "store_broken",
    "store_unreadable",
    "purpose_unknown",
    "subject_unknown",
    "requester_unknown",
    "clock_backwards",
    "revoked",
    "basis_is_no_grant",
    "no_grant",
    "not_yet_valid",
    "expired",
    "purpose_not_granted",
    "requester_not_admitted",
]
CODES: tuple[Code, ...] = get_args(Code)
_HEALTH_CODES: dict[str, Code] = {
    "locked": "store_locked",
    "broken": "store_broken",
    "unreadable": "store_unreadable",
}
# from the farthest miss to the nearest
_MISSES: tuple[Code, ...] = (
    "expired",
    "not_yet_valid",
    "purpose_not_granted",
    "requester_not_admitted",
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Yes or no to one request. grant: number of the entry that says yes; revision: entries that were known."""

    subject: str
    requester: str | None
    purpose: str
    allowed: bool
    code: Code
    text: str
    revision: int
    grant: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "subject": self.subject,
            "requester": self.requester,
            "purpose": self.purpose,
            "allowed": self.allowed,
            "code": self.code,
            "text": self.text,
            "revision": self.revision,
            "grant": self.grant,
        }


def decide(
    standing: Standing, *, subject: str, requester: str | None, purpose: str, now: int
) -> Decision:
    """Whether somebody may use what shows a subject. now: seconds since 1970."""

    def said(code: Code, text: str, grant: int | None = None) -> Decision:
        is_yes = grant is not None
        return Decision(subject, requester, purpose, is_yes, code, text, standing.revision, grant)

    refused = _unfit(standing, subject, requester, purpose, now)
    if refused is not None:
        return said(*refused)
    assert requester is not None, "found unfit otherwise"
    misses: list[tuple[Code, str]] = []
    grants = standing.grants_of(subject)
    for number, grant in grants.items():
        miss = _miss(number, grant, requester, purpose, now)
        if miss is None:
            return said("granted", f"{subject} agreed to it: grant {number}", number)
        misses.append(miss)
    if misses:
        return said(*max(misses, key=lambda miss: _MISSES.index(miss[0])))
    return said(*_without_grant(standing, subject))


def _unfit(
    standing: Standing, subject: str, requester: str | None, purpose: str, now: int
) -> tuple[Code, str] | None:
    """Why a request is not even looked at."""
    if standing.health != "sound":
        return _HEALTH_CODES[standing.health], standing.why
    if purpose not in PURPOSES:
        return "purpose_unknown", f"{purpose!r} is no purpose; there are {', '.join(PURPOSES)}"
    unknown = _unknown(standing, subject, requester)
    if unknown is not None:
        return unknown
    if now < standing.newest:
        return "clock_backwards", (
            f"the clock says {written(now)}, the registry was last written at {written(standing.newest)}: whether a term is "
            "over cannot be told; set the clock"
        )
    return None


def _unknown(standing: Standing, subject: str, requester: str | None) -> tuple[Code, str] | None:
    """Why it is not known who is shown, or who asks."""
    if subject not in standing.subjects:
        fault = pseudonym_fault(subject, "s")
        return (
            "subject_unknown",
            fault or f"the registry knows no {subject}, so nobody can have agreed",
        )
    if requester is None:
        why = "nobody says who asks: name people.requester in the recipe, or set OUTSIZE_REQUESTER"
        return "requester_unknown", why
    if not is_pseudonym(requester, "s", "p") or not standing.knows(requester):
        fault = pseudonym_fault(requester, "s", "p")
        return "requester_unknown", fault or f"the registry knows no {requester}, who asks"
    return None


def _miss(
    number: int, grant: Grant, requester: str, purpose: str, now: int
) -> tuple[Code, str] | None:
    """Why one grant does not cover a request; None when it does."""
    if now >= grant.ends:
        return "expired", f"grant {number} of {grant.subject} ended at {written(grant.ends)}"
    if now < grant.starts:
        return (
            "not_yet_valid",
            f"grant {number} of {grant.subject} begins at {written(grant.starts)}",
        )
    if purpose not in grant.purposes:
        purposes = ", ".join(grant.purposes)
        return (
            "purpose_not_granted",
            f"grant {number} of {grant.subject} is for {purposes}, not for {purpose}",
        )
    if not grant.admits(requester):
        return (
            "requester_not_admitted",
            f"grant {number} of {grant.subject} has the scope {grant.scope!r}, which does not admit {requester}",
        )
    return None


def _without_grant(standing: Standing, subject: str) -> tuple[Code, str]:
    basis = standing.subjects[subject]
    if subject in standing.revoked:
        return "revoked", f"{subject} has revoked: entry {standing.revoked[subject]}"
    if basis != "consent":
        return (
            "basis_is_no_grant",
            f"{subject} is held on the basis {basis}, which is no consent; only a grant opens the gate",
        )
    return "no_grant", f"{subject} has agreed to nothing"


def written(time: int) -> str:
    """A moment as people read it."""
    moment = dt.datetime.fromtimestamp(time, tz=dt.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
