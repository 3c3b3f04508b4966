"""No sequence of operations gives access without a live positive grant: a machine that does anything, in any order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import filelock
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from registry_support import LISTED, NEAR, NOBODY, OTHER, SUBJECT, Registry, grant_of

from outsize.base.errors import MachineFault, RecipeError, StoreBroken
from outsize.registry.acts import add_party, add_subject, give_grant, note, revoke
from outsize.registry.gate import Request
from outsize.registry.records import PURPOSES, Derived, Grant, Item

PEOPLE = st.sampled_from([SUBJECT, OTHER])
ASKING = st.sampled_from([SUBJECT, OTHER, NEAR, LISTED, NOBODY, "Ada", None])
TERMS = st.tuples(st.integers(-20, 20), st.integers(1, 30))


class Anything(RuleBasedStateMachine):
    """The registry beside a list of what was agreed to, kept by the simplest means."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.registry = Registry(Path(self.folder.name) / "registry")
        self.agreed: dict[
            int, Grant
        ] = {}  # those that neither a revocation nor another grant has ended
        self.known: set[str] = set()
        self.latest = 0  # when something was last written
        self.is_altered = False

    def teardown(self) -> None:
        self.folder.cleanup()

    @property
    def now(self) -> int:
        return int(self.registry.clock.seconds)

    def wrote(self) -> None:
        self.latest = max(self.latest, self.now)

    @initialize()
    def begin(self) -> None:
        for party in (NEAR, LISTED):
            add_party(self.registry.ledger, party)
        self.wrote()

    @rule(
        subject=PEOPLE, basis=st.sampled_from(["consent", "public_domain", "own_work", "licence"])
    )
    @precondition(lambda self: not self.is_altered)
    def add(self, subject: str, basis: Any) -> None:
        """A basis is stated; it is never a grant."""
        add_subject(self.registry.ledger, basis, subject)
        self.known.add(subject)
        self.wrote()

    @rule(
        subject=PEOPLE, scope=st.sampled_from(["self", "named", "group", "public"]),
        purposes=st.sets(st.sampled_from(PURPOSES), min_size=1), term=TERMS, replaces=st.booleans(),
    )  # fmt: skip
    @precondition(lambda self: not self.is_altered)
    def agree(
        self, subject: str, scope: str, purposes: set[str], term: tuple[int, int], *, replaces: bool
    ) -> None:
        """Whatever is agreed to, wider or narrower than before."""
        mine = [number for number, one in self.agreed.items() if one.subject == subject]
        starts = self.now + term[0]
        grant = grant_of(
            subject=subject, scope=scope, purposes=tuple(sorted(purposes)), starts=starts,
            ends=starts + term[1], allowed={"self": (NEAR,), "named": (LISTED,)},
            replaces=tuple(mine) if replaces else (),
        )  # fmt: skip
        try:
            number = give_grant(self.registry.ledger, grant)
        except RecipeError:
            assert not {subject} <= self.known
            return
        for one in grant.replaces:
            del self.agreed[one]
        self.agreed[number] = grant
        self.wrote()

    @rule(subject=PEOPLE)
    @precondition(lambda self: not self.is_altered)
    def take_back(self, subject: str) -> None:
        """A revocation, or one more."""
        if subject not in self.known:
            return
        revoke(self.registry.ledger, subject)
        self.agreed = {key: one for key, one in self.agreed.items() if one.subject != subject}
        # one that is said again, with nothing agreed to in between, is not written again
        self.latest = self.registry.gate.standing().newest

    @rule(subject=PEOPLE, path=st.sampled_from(["/nowhere/a", "/nowhere/b"]))
    @precondition(lambda self: not self.is_altered)
    def derive(self, subject: str, path: str) -> None:
        """Something came of somebody; that is no consent either."""
        if subject in self.known and note(
            self.registry.ledger, Derived("adapter", (subject,), (Item(path),))
        ):
            self.wrote()

    @rule(seconds=st.integers(-15, 25))
    def turn_the_clock(self, seconds: int) -> None:
        """Forward, or back."""
        self.registry.clock.seconds += seconds

    @rule(cut=st.integers(1, 60))
    @precondition(lambda self: not self.is_altered)
    def die_while_writing(self, cut: int) -> None:
        """A writer leaves a piece of a line behind."""
        line = self.registry.ledger.examined()[0].entries[-1].line()
        with self.registry.ledger.path.open("ab") as file:
            file.write(line[:cut])

    @rule(place=st.floats(0, 0.999))
    def alter(self, place: float) -> None:
        """Somebody edits a byte, for good."""
        content = bytearray(self.registry.ledger.path.read_bytes())
        end = content.rindex(b"\n")  # what lies behind is believed by nobody
        content[int(place * end)] ^= 1
        self.registry.ledger.path.write_bytes(content)
        self.is_altered = bool(self.registry.ledger.examined()[1])
        assert self.is_altered or content == self.registry.ledger.path.read_bytes()

    @rule(subject=PEOPLE, requester=ASKING, purpose=st.sampled_from(PURPOSES), held=st.booleans())
    def ask(self, subject: str, requester: str | None, purpose: Any, *, held: bool) -> None:
        """Yes exactly where a live grant says so, in a registry that can be believed."""
        request = Request((subject,), requester, purpose)
        if held:
            with filelock.FileLock(self.registry.folder / ".lock"):
                (made,) = self.registry.gate.ask(request)
        else:
            (made,) = self.registry.gate.ask(request)
        live = any(self._covers(one, subject, requester, purpose) for one in self.agreed.values())
        is_fit = not held and not self.is_altered and self.now >= self.latest
        assert made.allowed == (live and is_fit), f"{made} where live is {live}, fit {is_fit}"
        if not held and not self.is_altered:
            self.wrote()

    def _covers(self, grant: Grant, subject: str, requester: str | None, purpose: str) -> bool:
        is_inside = (
            requester in {subject, NEAR}
            or (requester == LISTED and grant.scope != "self")
            or (grant.scope == "public" and requester in self.known)
        )
        is_live = grant.starts <= self.now < grant.ends
        return grant.subject == subject and is_live and purpose in grant.purposes and is_inside


Anything.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnything = Anything.TestCase


def test_an_altered_registry_refuses_to_be_written(tmp_path: Path) -> None:
    """What the machine relies on: no operation mends a chain by writing to it."""
    registry = Registry(tmp_path)
    add_subject(registry.ledger, "consent", SUBJECT)
    content = registry.ledger.path.read_bytes()
    registry.ledger.path.write_bytes(content.replace(SUBJECT.encode(), OTHER.encode()))
    for act in (
        lambda: give_grant(registry.ledger, grant_of()),
        lambda: revoke(registry.ledger, SUBJECT),
        lambda: add_party(registry.ledger),
    ):
        try:
            act()
        except (StoreBroken, MachineFault):
            continue
        raise AssertionError("it was written to")
