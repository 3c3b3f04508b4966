"""What holds now: everything that a ledger's entries add up to. Nothing else is remembered anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from outsize.base.errors import RecipeError, StoreBroken
from outsize.base.legal_basis import BASES, LegalBasis
from outsize.base.pseudonyms import is_pseudonym
from outsize.registry.chain import Entry
from outsize.registry.ledger import BEGUN, VERSION
from outsize.registry.records import Derived, Grant

Health = Literal["sound", "locked", "broken", "unreadable"]
HEALTHS: tuple[Health, ...] = get_args(Health)

PARTY, SUBJECT, GRANT, REVOCATION = "party", "subject", "grant", "revocation"
DECISION, DERIVED, QUARANTINED = "decision", "derived", "quarantined"


@dataclass(frozen=True, slots=True)
class Standing:
    """A registry as far as it was read.

    health, why: whether it may be believed. revision: entries that it was made of; newest: time of the last one. grants: by
    number of entry, replaced ones left out; revoked: number of the newest revocation of each subject.
    """

    health: Health = "sound"
    why: str = ""
    revision: int = 0
    newest: int = 0
    subjects: Mapping[str, LegalBasis] = field(default_factory=dict)
    parties: frozenset[str] = frozenset()
    grants: Mapping[int, Grant] = field(default_factory=dict)
    revoked: Mapping[str, int] = field(default_factory=dict)
    derived: tuple[Derived, ...] = ()

    def knows(self, requester: str) -> bool:
        """Whether somebody who asks is known."""
        return requester in self.parties or requester in self.subjects

    def grants_of(self, subject: str) -> dict[int, Grant]:
        """Those that no revocation has ended, whatever their terms."""
        ended = self.revoked.get(subject, -1)
        return {
            number: one
            for number, one in self.grants.items()
            if one.subject == subject and number > ended
        }

    def derived_from(self, subject: str) -> tuple[Derived, ...]:
        """What came of somebody."""
        return tuple(one for one in self.derived if subject in one.subjects)

    def to_json(self) -> dict[str, Any]:
        """Who is known and what they agreed to, as JSON values."""
        subjects = {
            subject: {
                "basis": basis,
                "has_revoked": subject in self.revoked,
                "grants": {str(key): one.to_json() for key, one in self.grants_of(subject).items()},
                "derived": [one.to_json() for one in self.derived_from(subject)],
            }
            for subject, basis in self.subjects.items()
        }
        parties = sorted(self.parties)
        return {"entries": self.revision, "subjects": subjects, "parties": parties}

    def shown_in(self, *, tensors: Iterable[str] = (), paths: Iterable[Path] = ()) -> set[str]:
        """Whom files show: by what they hold, or by lying where something of theirs was put."""
        digests, places = set(tensors), {place for path in paths for place in _with_parents(path)}
        return {
            subject
            for one in self.derived
            if any(item.tensors in digests or item.path in places for item in one.items)
            for subject in one.subjects
        }


def place_of(path: Path) -> str:
    """A path as items have it."""
    return str(path.expanduser().resolve())


def standing_of(entries: Iterable[Entry]) -> Standing:
    """What a chain that verifies adds up to.

    Raises: StoreBroken for an entry that no version of this program up to now has written.
    """
    folded = _Folded()
    for entry in entries:
        try:
            folded.take(entry)
        except (RecipeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreBroken(
                f"entry {entry.number} ({entry.kind}) of the registry cannot be understood: {error!r}; a newer version wrote it, "
                "or none"
            ) from error
    return folded.standing()


class _Folded:
    """What entries add up to so far."""

    def __init__(self) -> None:
        self._last: Entry | None = None
        self._subjects: dict[str, LegalBasis] = {}
        self._parties: set[str] = set()
        self._grants: dict[int, Grant] = {}
        self._revoked: dict[str, int] = {}
        self._derived: list[Derived] = []

    def take(self, entry: Entry) -> None:
        """Add an entry."""
        body = entry.body
        if (entry.kind == BEGUN) != (entry.number == 0):
            raise ValueError("a registry begins once")
        if entry.kind == BEGUN and body["version"] != VERSION:
            raise ValueError(f"the registry is of version {body['version']}")
        if entry.kind == PARTY:
            self._parties.add(_pseudonym(body["party"], "p"))
        elif entry.kind == SUBJECT:
            self._take_subject(body)
        elif entry.kind == GRANT:
            self._take_grant(entry.number, Grant.from_json(body))
        elif entry.kind == REVOCATION:
            self._revoked[self._known(body["subject"])] = entry.number
        elif entry.kind == DERIVED:
            self._derived.append(Derived.from_json(body))
        elif entry.kind not in {BEGUN, DECISION, QUARANTINED}:
            raise ValueError("nothing of that kind is known")
        self._last = entry

    def standing(self) -> Standing:
        """The sum."""
        last = self._last
        return Standing(
            revision=0 if last is None else last.number + 1,
            newest=0 if last is None else last.time,
            subjects=self._subjects,
            parties=frozenset(self._parties),
            grants=self._grants,
            revoked=self._revoked,
            derived=tuple(self._derived),
        )

    def _take_subject(self, body: Mapping[str, Any]) -> None:
        if body["basis"] not in BASES:
            raise ValueError(f"{body['basis']!r} is no legal basis")
        self._subjects[_pseudonym(body["subject"], "s")] = body["basis"]

    def _take_grant(self, number: int, grant: Grant) -> None:
        self._known(grant.subject)
        for replaced in grant.replaces:
            if self._grants.pop(replaced).subject != grant.subject:
                raise ValueError(f"it replaces grant {replaced}, which somebody else gave")
        self._grants[number] = grant

    def _known(self, subject: str) -> str:
        if subject not in self._subjects:
            raise ValueError(f"{subject!r} is no subject of this registry")
        return subject


def _pseudonym(text: str, kind: Literal["s", "p"]) -> str:
    if not is_pseudonym(text, kind):
        raise ValueError(f"{text!r} is no pseudonym")
    return text


def _with_parents(path: Path) -> list[str]:
    whole = Path(place_of(path))
    return [str(whole), *map(str, whole.parents)]
