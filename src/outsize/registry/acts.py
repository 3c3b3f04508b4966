"""What people do with a registry: add subjects and parties, give and revoke grants, note what is derived from whom.

Each is one entry (a revocation is two: that it holds, and what became of everything derived); none changes an earlier one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from outsize.base.errors import RecipeError
from outsize.base.legal_basis import LegalBasis
from outsize.base.pseudonyms import Kind, new_pseudonym, pseudonym_fault
from outsize.registry.gate import add_derived
from outsize.registry.ledger import Ledger, Open
from outsize.registry.quarantine import Quarantined, quarantine
from outsize.registry.records import Derived, Grant
from outsize.registry.standing import (
    GRANT,
    PARTY,
    QUARANTINED,
    REVOCATION,
    SUBJECT,
    Standing,
    standing_of,
)


@dataclass(frozen=True, slots=True)
class Revoked:
    """What a revocation came to. is_new: false when nothing had been agreed to since an earlier one."""

    is_new: bool
    quarantined: tuple[Quarantined, ...]


def add_subject(ledger: Ledger, basis: LegalBasis, pseudonym: str | None = None) -> str:
    """Add somebody who is shown, or state another legal basis for one who is known; the id.

    Raises: RecipeError for what is no pseudonym.
    """
    chosen = _chosen(pseudonym, "s")
    with ledger.opened(makes=True) as opened:
        if standing_of(opened.entries).subjects.get(chosen) != basis:
            opened.append(SUBJECT, {"subject": chosen, "basis": basis})
    return chosen


def add_party(ledger: Ledger, pseudonym: str | None = None) -> str:
    """Add somebody who asks or is named in grants; the id.

    Raises: RecipeError for what is no pseudonym.
    """
    chosen = _chosen(pseudonym, "p")
    with ledger.opened(makes=True) as opened:
        if chosen not in standing_of(opened.entries).parties:
            opened.append(PARTY, {"party": chosen})
    return chosen


def give_grant(ledger: Ledger, grant: Grant) -> int:
    """Add a grant; its number.

    Raises: RecipeError when its subject, a third party or a grant that it replaces is not known.
    """
    with ledger.opened(makes=True) as opened:
        standing = standing_of(opened.entries)
        known = standing.grants_of(grant.subject)
        named = {party for parties in grant.allowed.values() for party in parties}
        faults = [f"{one} is not known" for one in sorted(named) if not standing.knows(one)]
        faults += [
            f"{grant.subject} has no grant {one} that still holds"
            for one in grant.replaces
            if one not in known
        ]
        if grant.subject not in standing.subjects:
            faults.insert(0, _unknown(grant.subject))
        if faults:
            raise RecipeError(f"no such grant can be given: {'; '.join(faults)}")
        return opened.append(GRANT, grant.to_json()).number


def note(ledger: Ledger, derived: Derived) -> bool:
    """Note what came of subjects; whether any of it was not noted before.

    Raises: RecipeError when a subject is not known.
    """
    with ledger.opened(makes=True) as opened:
        standing = standing_of(opened.entries)
        unknown = [_unknown(one) for one in derived.subjects if one not in standing.subjects]
        if unknown:
            raise RecipeError("; ".join(unknown))
        return add_derived(opened, standing, derived)


def revoke(ledger: Ledger, subject: str) -> Revoked:
    """End all grants of a subject, and put away everything that was derived from them.

    Once this returns, or is killed after its first write, nothing is allowed any more. Called again it goes on with what could
    not be put away.
    Raises: RecipeError when the subject is not known.
    """
    with ledger.opened(makes=True) as opened:
        standing = standing_of(opened.entries)
        if subject not in standing.subjects:
            raise RecipeError(_unknown(subject))
        is_new = subject not in standing.revoked or bool(standing.grants_of(subject))
        if is_new:
            opened.append(REVOCATION, {"subject": subject})
        done = _quarantine(opened, standing, subject)
    return Revoked(is_new, done)


def put_away(ledger: Ledger, subject: str) -> tuple[Quarantined, ...]:
    """Put away what was derived from a subject who has revoked, and agreed to nothing since; nothing of anybody else."""
    with ledger.opened() as opened:
        standing = standing_of(opened.entries)
        if subject not in standing.revoked or standing.grants_of(subject):
            return ()
        return _quarantine(opened, standing, subject)


def _quarantine(opened: Open, standing: Standing, subject: str) -> tuple[Quarantined, ...]:
    done = quarantine(paths_of(standing, subject))
    told = [asdict(one) for one in done if one.became != "gone"]
    if told:
        opened.append(QUARANTINED, {"subject": subject, "paths": told})
    return done


def paths_of(standing: Standing, subject: str) -> list[Path]:
    """Everything derived from a subject, once each; what lies in another of them is left to that one."""
    derived = standing.derived_from(subject)
    paths = {Path(item.path) for one in derived for item in one.items}
    return sorted(path for path in paths if paths.isdisjoint(path.parents))


def _chosen(pseudonym: str | None, kind: Kind) -> str:
    if pseudonym is None:
        return new_pseudonym(kind)
    if fault := pseudonym_fault(pseudonym, kind):
        raise RecipeError(fault)
    return pseudonym


def _unknown(subject: str) -> str:
    fault = pseudonym_fault(subject, "s")
    return fault or f"{subject} is not known to this registry; `outsize registry list` shows who is"
