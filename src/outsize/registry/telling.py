"""A person's history in plain words, from the ledger's entries alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from outsize.registry.chain import Entry
from outsize.registry.decide import written
from outsize.registry.records import SCOPES, Derived, Grant
from outsize.registry.standing import (
    DECISION,
    DERIVED,
    GRANT,
    QUARANTINED,
    REVOCATION,
    SUBJECT,
)

_SCOPE_WORDS = {
    "self": "only for this person",
    "named": "for this person and those who are named",
    "group": "for this person, those who are named, and the group",
    "public": "for anybody",
}
_BECAME = {"moved": "was put away as", "stuck": "could not be put away:"}
_MOST_SHOWN = 5  # paths of one entry; the rest is counted


def entries_about(entries: Iterable[Entry], subject: str) -> list[Entry]:
    """Those that name a subject as the one who is shown."""
    return [
        one
        for one in entries
        if one.body.get("subject") == subject or subject in one.body.get("subjects", ())
    ]


def history(entries: Iterable[Entry], subject: str) -> Iterator[str]:
    """One paragraph for each entry about a subject, oldest first."""
    for entry in entries_about(entries, subject):
        first, *rest = _TELLERS[entry.kind](entry.body)
        yield "\n".join([f"{written(entry.time)}  [{entry.number}] {first}", *rest])


def grant_in_words(grant: Grant) -> list[str]:
    """What somebody has agreed to."""
    term = f"from {written(grant.starts)} until {written(grant.ends)}"
    lines = [f"agreed to {_listed(grant.purposes)}, {_SCOPE_WORDS[grant.scope]}, {term}"]
    lines += [
        f"    third parties from the scope {scope} on: {', '.join(grant.allowed[scope])}"
        for scope in SCOPES
        if grant.allowed.get(scope)
    ]
    if grant.replaces:
        lines.append(f"    in place of grant {_listed(grant.replaces)}")
    return [*lines, f"    evidence: a document with SHA-256 {grant.evidence}"]


def _grant(body: Mapping[str, Any]) -> list[str]:
    return grant_in_words(Grant.from_json(body))


def _subject(body: Mapping[str, Any]) -> list[str]:
    return [f"is held on the legal basis: {body['basis'].replace('_', ' ')}"]


def _revocation(_body: Mapping[str, Any]) -> list[str]:
    return ["revoked everything agreed to before"]


def _decision(body: Mapping[str, Any]) -> list[str]:
    who = body["requester"] or "somebody who did not say who"
    when = "at the start" if body["stage"] == "request" else "when the result was let out"
    about = ", ".join(f"{key} {value}" for key, value in body["about"].items())
    answer = "yes" if body["allowed"] else "no"
    told = f" ({about})" if about else ""
    return [
        f"{who} asked to {body['purpose']}, {when}{told}: {answer}, {body['text']} [{body['code']}]"
    ]


def _derived(body: Mapping[str, Any]) -> list[str]:
    derived = Derived.from_json(body)
    others = f", of {len(derived.subjects)} people together" if len(derived.subjects) > 1 else ""
    return [f"came of it: {derived.kind}{others}", *_few([one.path for one in derived.items])]


def _quarantined(body: Mapping[str, Any]) -> list[str]:
    told = (
        f"{one['path']} {_BECAME[one['became']]} {one['lies_at'] or one['why']}"
        for one in body["paths"]
    )
    return [
        f"{len(body['paths'])} things derived from this person were to be put away",
        *_few(list(told)),
    ]


def _few(lines: list[str]) -> list[str]:
    more = [f"    and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
    return [f"    {line}" for line in lines[:_MOST_SHOWN]] + more


def _listed(words: Iterable[object]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


_TELLERS = {
    SUBJECT: _subject,
    GRANT: _grant,
    REVOCATION: _revocation,
    DECISION: _decision,
    DERIVED: _derived,
    QUARANTINED: _quarantined,
}
