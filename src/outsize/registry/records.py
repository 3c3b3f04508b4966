"""The records: grants, and things that were derived from people. Frozen; a record is superseded, never edited.

A grant is one person's own consent. On what other legal basis somebody's pictures are held (public domain, own work, licence)
is a typed field of the subject, and no such basis opens the gate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from outsize.base.errors import RecipeError
from outsize.base.pseudonyms import pseudonym_fault

Scope = Literal[
    "self", "named", "group", "public"
]  # from the person outward; each holds those before it
Purpose = Literal["train", "render", "export", "merge"]
Kind = Literal["run", "cache", "checkpoint", "adapter", "export", "merge", "sample"]

SCOPES: tuple[Scope, ...] = get_args(Scope)
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
KINDS: tuple[Kind, ...] = get_args(Kind)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LATEST = 253402300799  # the last second of the year 9999, which dates can still be written of


@dataclass(frozen=True, slots=True)
class Grant:
    """What one subject agrees to.

    allowed: third parties by the scope from which on they are admitted. evidence: SHA-256 of the document that was signed, never
    the document. starts, ends: seconds since 1970 in UTC, the second one no longer. replaces: numbers of earlier grants that
    end with this one.
    Raises: RecipeError naming everything that is wrong.
    """

    subject: str
    scope: Scope
    purposes: tuple[Purpose, ...]
    evidence: str
    starts: int
    ends: int
    allowed: Mapping[Scope, tuple[str, ...]] = field(default_factory=dict)
    replaces: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise RecipeError(f"no such grant can be given: {'; '.join(faults)}")

    def admits(self, requester: str) -> bool:
        """Whether somebody who is known to the registry is within the scope."""
        reach = SCOPES[: SCOPES.index(self.scope) + 1]
        is_listed = any(requester in self.allowed.get(scope, ()) for scope in reach)
        return requester == self.subject or is_listed or self.scope == "public"

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` reads them back."""
        return {
            "subject": self.subject,
            "scope": self.scope,
            "purposes": list(self.purposes),
            "evidence": self.evidence,
            "starts": self.starts,
            "ends": self.ends,
            "allowed": {scope: list(parties) for scope, parties in self.allowed.items()},
            "replaces": list(self.replaces),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """A grant of the ledger.

        Raises: RecipeError, TypeError, ValueError or AttributeError for what is none.
        """
        return cls(
            **dict(value)
            | {
                "purposes": tuple(value["purposes"]),
                "allowed": {scope: tuple(parties) for scope, parties in value["allowed"].items()},
                "replaces": tuple(value["replaces"]),
            }
        )

    def _faults(self) -> Iterator[str]:
        if fault := pseudonym_fault(self.subject, "s"):
            yield fault
        if self.scope not in SCOPES:
            yield f"the scope {self.scope!r} is none of {', '.join(SCOPES)}"
        if not self.purposes or set(self.purposes) - set(PURPOSES):
            yield f"purposes are {list(self.purposes)}; name some of {', '.join(PURPOSES)}"
        if not _SHA256.fullmatch(self.evidence):
            yield "the evidence is no SHA-256: 64 of 0-9 and a-f, of the document that was signed"
        if not 0 <= self.starts < self.ends <= _LATEST:
            yield f"the term from {self.starts} to {self.ends} (seconds since 1970) holds no moment that can be written as a date"
        for scope, parties in self.allowed.items():
            if scope not in SCOPES or scope == "public":
                yield f"a list of the scope {scope!r}; there are lists of {', '.join(SCOPES[:-1])}, and public admits everybody"
            yield from (fault for one in parties if (fault := pseudonym_fault(one, "s", "p")))


@dataclass(frozen=True, slots=True)
class Item:
    """A file or folder that was made of people. tensors: digest of what a file of tensors holds, however it is called."""

    path: str
    sha256: str | None = None
    tensors: str | None = None

    def to_json(self) -> dict[str, str]:
        """What is known of it."""
        known = {"path": self.path, "sha256": self.sha256, "tensors": self.tensors}
        return {key: value for key, value in known.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Derived:
    """What came of some subjects."""

    kind: Kind
    subjects: tuple[str, ...]
    items: tuple[Item, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` reads them back."""
        return {
            "kind": self.kind,
            "subjects": list(self.subjects),
            "items": [one.to_json() for one in self.items],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """An entry of the ledger.

        Raises: KeyError, TypeError or ValueError for what is none.
        """
        if value["kind"] not in KINDS or not value["subjects"]:
            raise ValueError(
                f"nothing of kind {value['kind']!r} is derived from {value['subjects']}"
            )
        items = tuple(Item(**one) for one in value["items"])
        return cls(value["kind"], tuple(value["subjects"]), items)
