"""The decision over the whole of its finite space, against a table that was written for itself."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from registry_support import (
    ENDS,
    LISTED,
    MEMBER,
    NEAR,
    NOBODY,
    NOW,
    OTHER,
    STARTS,
    STRANGER,
    SUBJECT,
    grant_of,
)

from outsize.base.errors import RecipeError
from outsize.registry.decide import CODES, decide
from outsize.registry.records import Grant
from outsize.registry.standing import Standing

# Each axis: what is asked or known, beside what a person who reads the issue says of it.
HEALTHS = {
    "sound": None,
    "locked": "store_locked",
    "broken": "store_broken",
    "unreadable": "store_unreadable",
}
# who asks -> the narrowest scope that lets them in; None: none does
REQUESTERS: dict[str | None, str | None] = {
    SUBJECT: "self",
    NEAR: "self",
    LISTED: "named",
    MEMBER: "group",
    STRANGER: "public",
    NOBODY: None,
    "Ada Lovelace": None,
    None: None,
}
ALLOWED = {"self": (NEAR,), "named": (LISTED,), "group": (MEMBER,)}
WIDTH = {"self": 1, "named": 2, "group": 3, "public": 4}
SUBJECTS = {SUBJECT: True, OTHER: False, "ada@example.com": False}
BASES = ("consent", "public_domain", "own_work", "licence")
PURPOSES = ("train", "render", "export", "merge")
PURPOSES_ASKED = (*PURPOSES, "sell")
SUBSETS = [some for size in range(1, 5) for some in combinations(PURPOSES, size)]
# a moment -> what is wrong with it for a term from STARTS to ENDS
MOMENTS = {
    STARTS - 1: "not_yet_valid",
    STARTS: None,
    ENDS - 1: None,
    ENDS: "expired",
}
# how a grant stands -> whether it still counts, and what is said when it does not
GRANT_AT, LATER, EARLIER = 5, 9, 3
STANDINGS: dict[str, tuple[dict[str, int], bool]] = {
    "never revoked": ({}, True),
    "revoked before": ({SUBJECT: EARLIER}, True),
    "revoked after": ({SUBJECT: LATER}, False),
    "another revoked": ({OTHER: LATER}, True),
}
CLOCKS = (0, -1, 1)  # how far behind the moment the newest entry lies: 1 is before it


def expected(
    *, health: str, subject: str, requester: str | None, asked: str, basis: str,
    grant: Grant | None, ended: bool, moment: int, behind: int, has_revoked: bool,
) -> str:  # fmt: skip
    """The table, from top to bottom: the first row that applies."""
    rows = [
        (health != "sound", HEALTHS[health]),
        (asked == "sell", "purpose_unknown"),
        (not SUBJECTS[subject], "subject_unknown"),
        (REQUESTERS[requester] is None, "requester_unknown"),
        (behind < 0, "clock_backwards"),
        ((grant is None or ended) and has_revoked, "revoked"),
        ((grant is None or ended) and basis != "consent", "basis_is_no_grant"),
        (grant is None or ended, "no_grant"),
        (MOMENTS[moment] is not None, MOMENTS[moment]),
        (grant is not None and asked not in grant.purposes, "purpose_not_granted"),
        (
            grant is not None
            and WIDTH[str(REQUESTERS[requester] or "public")] > WIDTH[grant.scope],
            "requester_not_admitted",
        ),
        (True, "granted"),
    ]
    return next(str(code) for applies, code in rows if applies)


def standing_with(
    grants: dict[int, Grant], *, health: Any = "sound", newest: int = 0,
    basis: Any = "consent", revoked: dict[str, int] | None = None,
) -> Standing:  # fmt: skip
    return Standing(
        health=health,
        why="as the test says",
        revision=12,
        newest=newest,
        subjects={SUBJECT: basis},
        parties=frozenset({NEAR, LISTED, MEMBER, STRANGER}),
        grants=grants,
        revoked=revoked or {},
    )


def grants_for(health: str, basis: str) -> list[Grant | None]:
    """None, and one of each scope for all purposes; of each set of purposes where these can matter."""
    subsets = SUBSETS if (health, basis) == ("sound", "consent") else [PURPOSES]
    return [None] + [
        grant_of(scope=scope, purposes=some, allowed=ALLOWED) for scope in WIDTH for some in subsets
    ]


def test_the_decision_equals_the_table_over_the_whole_space() -> None:
    """Yes is rare: every combination that is not a live positive grant is a no, with the table's reason."""
    seen: dict[str, int] = dict.fromkeys(CODES, 0)
    for health, basis in product(HEALTHS, BASES):
        for grant, (revoked, counts), moment, behind in product(
            grants_for(health, basis), STANDINGS.values(), MOMENTS, CLOCKS
        ):
            known = {} if grant is None else {GRANT_AT: grant}
            standing = standing_with(
                known, health=health, newest=moment - behind, basis=basis, revoked=revoked
            )
            for subject, requester, asked in product(SUBJECTS, REQUESTERS, PURPOSES_ASKED):
                made = decide(
                    standing, subject=subject, requester=requester, purpose=asked, now=moment
                )
                wanted = expected(
                    health=health, subject=subject, requester=requester, asked=asked, basis=basis,
                    grant=grant, ended=not counts, moment=moment, behind=behind,
                    has_revoked=SUBJECT in revoked,
                )  # fmt: skip
                if made.code != wanted or made.allowed != (wanted == "granted"):
                    pytest.fail(
                        f"{made} where the table says {wanted}: {health} {basis} {revoked} {grant}"
                    )
                assert (made.grant == GRANT_AT) == made.allowed
                seen[made.code] += 1
    assert all(seen.values()), f"codes that nothing came to: {seen}"
    num_grants = 61 + 15 * 5  # sound and consent, and the fifteen other pairs
    assert sum(seen.values()) == num_grants * 4 * 4 * 3 * 3 * 8 * 5


def test_of_several_grants_one_suffices_and_none_takes_away_what_another_gives() -> None:
    """Grants are positive only: yes to two of them is yes to the one or to the other."""
    terms = [(STARTS, ENDS), (NOW + 1, ENDS), (STARTS, NOW)]
    some = [
        grant_of(scope=scope, purposes=purposes, starts=starts, ends=ends, allowed=ALLOWED)
        for scope in WIDTH
        for purposes in (("train",), ("render", "export"))
        for starts, ends in terms
    ]
    known = [one for one, way in REQUESTERS.items() if way is not None]
    num_yes = 0
    for one, other in product(some, some):
        for requester, asked in product(known, PURPOSES):
            alone = [
                decide(
                    standing_with({GRANT_AT: grant}),
                    subject=SUBJECT, requester=requester, purpose=asked, now=NOW,
                ).allowed
                for grant in (one, other)
            ]  # fmt: skip
            both = decide(
                standing_with({GRANT_AT: one, GRANT_AT + 1: other}),
                subject=SUBJECT, requester=requester, purpose=asked, now=NOW,
            )  # fmt: skip
            assert both.allowed == any(alone)
            num_yes += both.allowed
    assert num_yes > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"subject": "Ada Lovelace"}, "'Ada Lovelace' is no pseudonym"),
        ({"subject": "ada@example.com"}, "'ada@example.com' is no pseudonym"),
        ({"scope": "everybody"}, "the scope 'everybody' is none of self, named, group, public"),
        ({"purposes": ()}, "purposes are []"),
        ({"purposes": ("sell",)}, "purposes are ['sell']; name some of train, render"),
        ({"evidence": "signed.pdf"}, "the evidence is no SHA-256"),
        ({"ends": STARTS}, "holds no moment"),
        ({"starts": -1}, "holds no moment"),
        ({"ends": 10**15}, "holds no moment that can be written as a date"),
        ({"allowed": {"public": (NEAR,)}}, "public admits everybody"),
        ({"allowed": {"named": ("Bob",)}}, "'Bob' is no pseudonym"),
    ],
    ids=[
        "a name", "an address", "a scope", "no purpose", "a purpose", "evidence", "an empty term",
        "before all time", "after all dates", "a list of public", "a named name",
    ],
)  # fmt: skip
def test_a_grant_that_cannot_mean_anything_is_refused(changes: dict[str, Any], said: str) -> None:
    """What got into the ledger could never be taken out again."""
    with pytest.raises(RecipeError) as caught:
        grant_of(**changes)
    assert said in str(caught.value)


def test_all_faults_of_a_grant_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        grant_of(subject="Ada", evidence="", purposes=())
    assert str(caught.value).count(";") >= 2
