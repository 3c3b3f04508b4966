"""The ledger: every edit is found, no crash loses what was finished, and a kill at any write leaves a chain that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest
from crash_support import crashes, put, taken
from registry_support import (
    ENDS,
    NEAR,
    NOW,
    STARTS,
    STRANGER,
    SUBJECT,
    Clock,
    Registry,
    grant_of,
    peopled,
)
from run_support import environment

from outsize.base.errors import ConsentMissing, MachineFault, StoreBroken
from outsize.registry.acts import add_party, add_subject, give_grant, note, revoke
from outsize.registry.chain import canonical, head_faults, next_entry, read_chain
from outsize.registry.gate import Request
from outsize.registry.ledger import Ledger, registry_folder
from outsize.registry.records import Derived, Item
from outsize.registry.standing import standing_of

# --- edits ---------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Registry:
    """A registry with one of each kind of entry."""
    made = Registry(tmp_path / "registry")
    add_subject(made.ledger, "consent", SUBJECT)
    add_party(made.ledger, NEAR)
    give_grant(made.ledger, grant_of())
    assert made.ask() == "granted"
    note(made.ledger, Derived("export", (SUBJECT,), (Item("/nowhere/a.safetensors"),)))
    revoke(made.ledger, SUBJECT)
    return made


def is_found(registry: Registry, content: bytes) -> bool:
    """Whether a ledger with this content is refused, by verify and by the gate alike."""
    registry.ledger.path.write_bytes(content)
    _, faults = registry.ledger.examined()
    if not faults:
        return False
    with pytest.raises(StoreBroken), registry.ledger.opened():
        pytest.fail("it was believed")
    return True


@pytest.mark.slow
def test_every_edit_of_a_single_byte_is_found(written: Registry) -> None:
    """Each byte, with one bit of it flipped, and made a line feed: none passes."""
    whole = written.ledger.path.read_bytes()
    unseen = []
    for place, byte in enumerate(whole):
        for other in {byte ^ 1, ord("\n")} - {byte}:
            edited = bytearray(whole)
            edited[place] = other
            written.ledger.path.write_bytes(edited)
            if not written.ledger.examined()[1]:
                unseen.append((place, byte, other))
    assert not unseen
    assert is_found(written, whole.replace(b'"train"', b'"merge"', 1))
    assert not is_found(written, whole)


def test_every_line_that_is_taken_out_doubled_or_moved_is_found(written: Registry) -> None:
    whole = written.ledger.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    count = len(lines)
    changes: list[list[bytes]] = []
    changes += [lines[:at] + lines[at + 1 :] for at in range(count)]
    changes += [[*lines[: at + 1], *lines[at:]] for at in range(count)]
    for at in range(count - 1):
        changes.append([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]])
    assert len(changes) == 3 * count - 1
    assert all(is_found(written, b"".join(one)) for one in changes)
    assert all(is_found(written, whole[:size]) for size in range(0, len(whole), 7))
    assert is_found(written, whole[:-1]), "the last line feed"


def test_entries_written_anew_from_somewhere_on_are_found_by_the_head_that_was_kept(
    written: Registry,
) -> None:
    """Who knows the format can write a whole chain, and its head.json; a head that lies elsewhere still tells."""
    chain, _ = written.ledger.examined()
    kept = chain.head
    forged = list(chain.entries[:3])
    for entry in chain.entries[3:]:
        forged.append(next_entry(forged[-1], entry.time + 1, entry.kind, entry.body))
    written.ledger.path.write_bytes(b"".join(one.line() for one in forged))
    assert written.ledger.examined()[1], "head.json was not written anew"
    now = read_chain(written.ledger.path.read_bytes())
    written.ledger.head_path.write_bytes(canonical(now.head.to_json()))
    assert not written.ledger.examined()[1]
    assert list(head_faults(now, kept)) == [
        f"entry {kept.count - 1} is not the one that the head knows: the chain was written anew"
    ]


def test_lines_cut_off_together_with_head_json_are_found_by_the_head_that_was_kept(
    written: Registry,
) -> None:
    chain, _ = written.ledger.examined()
    for count in range(2, chain.head.count):
        shorter = read_chain(b"".join(one.line() for one in chain.entries[:count]))
        assert not shorter.faults
        assert list(head_faults(shorter, chain.head)) == [
            f"the head knows {chain.head.count} entries, there are {count}: the end was cut off"
        ]


def test_a_head_that_is_gone_or_edited_is_a_fault(written: Registry) -> None:
    """Else the end could be cut off with it."""
    content = written.ledger.head_path.read_bytes()
    for other in (content + b" ", content.replace(b":", b": ", 1), b"{}", b"", b'{"count":'):
        written.ledger.head_path.write_bytes(other)
        assert len(written.ledger.examined()[1]) == 1, other
    written.ledger.head_path.unlink()
    assert "head.json is gone" in written.ledger.examined()[1][0]
    written.ledger.head_path.write_bytes(content)
    written.ledger.path.unlink()
    assert written.ask() == "store_broken", "a ledger that was thrown away is no empty one"


def test_an_entry_of_a_kind_that_is_not_known_means_no(written: Registry) -> None:
    """A newer version may have written what takes a grant back."""
    with written.ledger.opened() as opened:
        opened.append("restriction", {"subject": SUBJECT})
    assert written.ask() == "store_broken"
    assert written.ledger.examined()[1] == [], "the chain itself is whole"


# --- what the gate makes of it -------------------------------------------------------------------


def test_a_grant_opens_the_gate_and_a_revocation_shuts_it_at_once(tmp_path: Path) -> None:
    made = peopled(tmp_path, granted=False)
    assert made.ask() == "no_grant"
    number = give_grant(made.ledger, grant_of())
    assert made.ask() == "granted"
    assert made.ask(requester=STRANGER) == "requester_not_admitted"
    wider = grant_of(scope="public", replaces=(number,), purposes=("train",))
    give_grant(made.ledger, wider)
    assert made.ask(requester=STRANGER) == "granted", "a widening binds at once"
    assert made.ask("export") == "purpose_not_granted", "and so does a narrowing"
    revoke(made.ledger, SUBJECT)
    assert made.ask() == "revoked"
    give_grant(made.ledger, grant_of())
    assert made.ask() == "granted"


def test_every_decision_is_in_the_ledger_before_it_is_acted_on(tmp_path: Path) -> None:
    made = peopled(tmp_path)
    before = made.kinds()
    made.ask()
    made.ask("merge", requester=None)
    with made.ledger.opened() as opened:
        decisions = [one.body for one in opened.entries if one.kind == "decision"]
    assert made.kinds() == [*before, "decision", "decision"]
    assert [one["code"] for one in decisions] == ["granted", "requester_unknown"]
    assert [one["revision"] for one in decisions] == [len(before), len(before) + 1]


def test_a_ledger_that_somebody_else_holds_means_no(tmp_path: Path) -> None:
    made = peopled(tmp_path)
    with filelock.FileLock(tmp_path / ".lock"):
        assert made.ask() == "store_locked"
        with pytest.raises(MachineFault):
            give_grant(made.ledger, grant_of())
        with pytest.raises(ConsentMissing) as caught:
            made.gate.standing()
    assert caught.value.codes == ("store_locked",)
    assert made.ask() == "granted"


def test_a_yes_that_cannot_be_written_down_is_a_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = peopled(tmp_path)

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert made.ask() == "store_unreadable"


def test_a_clock_that_went_back_means_no_until_it_has_caught_up(tmp_path: Path) -> None:
    made = peopled(tmp_path)
    made.clock.seconds = NOW - 3600
    assert made.ask() == "clock_backwards"
    revoke(made.ledger, SUBJECT)
    made.clock.seconds = NOW
    assert made.ask() == "revoked", "who revokes is heard whatever the clock says"


def test_a_clock_that_is_hardly_behind_is_waited_for(tmp_path: Path) -> None:
    """Network time sets clocks back by milliseconds; a training is not to die of it."""
    made = peopled(tmp_path)

    class Catching(Clock):
        def __call__(self) -> float:
            self.seconds += 0.5
            return self.seconds

    made.clock = Catching(NOW - 1.5)
    assert made.ask() == "granted"


def test_a_term_is_judged_at_each_request(tmp_path: Path) -> None:
    made = peopled(tmp_path)
    codes = []
    for moment in (NOW, ENDS - 1, ENDS):
        made.clock.seconds = moment
        codes.append(made.ask())
    assert codes == ["granted", "granted", "expired"]
    assert STARTS < NOW < ENDS


def test_noting_what_was_derived_twice_is_noting_it_once(tmp_path: Path) -> None:
    made = peopled(tmp_path)
    derived = Derived("adapter", (SUBJECT,), (Item("/a"), Item("/b", tensors="ab" * 32)))
    assert note(made.ledger, derived)
    before = made.kinds()
    assert not note(made.ledger, derived)
    assert made.ask(derived=derived) == "granted"
    assert made.kinds() == [*before, "decision"]
    more = Derived("adapter", (SUBJECT,), (Item("/a"), Item("/c")))
    assert note(made.ledger, more)
    standing = made.gate.standing()
    assert [len(one.items) for one in standing.derived] == [2, 1]
    assert standing.shown_in(paths=[Path("/b/below/it.png")]) == {SUBJECT}
    assert standing.shown_in(tensors=["ab" * 32]) == {SUBJECT}
    assert standing.shown_in(tensors=["cd" * 32], paths=[Path("/d")]) == set()


def test_what_is_denied_is_not_noted_as_made(tmp_path: Path) -> None:
    made = peopled(tmp_path)
    derived = Derived("export", (SUBJECT,), (Item("/a"),))
    assert made.ask(requester=STRANGER, derived=derived) == "requester_not_admitted"
    assert "derived" not in made.kinds()


def test_the_error_names_every_subject_with_its_reason(tmp_path: Path) -> None:
    made = peopled(tmp_path)
    other = "s-0000000000ff"
    with pytest.raises(ConsentMissing) as caught:
        made.gate.require(Request((SUBJECT, other), STRANGER, "render"))
    assert caught.value.codes == ("requester_not_admitted", "subject_unknown")
    assert str(caught.value).startswith("there is no consent to render: [requester_not_admitted] ")
    assert other in str(caught.value)


def test_the_folder_is_the_users_own_unless_a_variable_names_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTSIZE_REGISTRY", str(tmp_path))
    assert registry_folder() == tmp_path
    monkeypatch.delenv("OUTSIZE_REGISTRY")
    assert registry_folder().name == "registry"


# --- crashes -------------------------------------------------------------------------------------


def entry_count(root: Path) -> int:
    """How many entries are believed, after whatever recovery the next writer makes."""
    registry = Registry(root / "registry")
    with registry.ledger.opened(makes=True) as opened:
        standing_of(opened.entries)
        return len(opened.entries)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def counts_after(root: Path, writer: Callable[[], object]) -> tuple[set[int], set[int]]:
    """Entries that are there after a crash at any of the writer's operations, and after its return; each state goes on."""
    states, after = crashes(root, writer, start=taken(root))
    assert len(states) > 5
    found = []
    for several in (states, after):
        counts = set()
        for state in several:
            put(root, state)
            count = entry_count(root)
            registry = Registry(root / "registry")
            with registry.ledger.opened() as opened:
                opened.append("decision", {"subject": SUBJECT})
            assert entry_count(root) == count + 1, "what comes after is neither lost nor doubled"
            counts.add(count)
        found.append(counts)
    return found[0], found[1]


def test_a_registry_begins_whole_or_not_at_all(root: Path) -> None:
    """Whatever is lost, the next writer has one first entry."""
    registry = Registry(root / "registry")

    def begin() -> None:
        with registry.ledger.opened(makes=True):
            pass

    during, after = counts_after(root, begin)
    assert during == after == {1}


def test_a_crash_at_any_operation_of_an_append_leaves_the_entry_or_not(root: Path) -> None:
    """A power cut with whatever was not fsynced lost, and a kill: what was there before stays, and no half entry counts."""
    peopled(root / "registry")
    before = entry_count(root)
    during, after = counts_after(root, lambda: Registry(root / "registry").ask())
    assert during == {before, before + 1}
    assert after == {before + 1}, "what has returned is on disk"


def test_a_crash_while_cleaning_up_after_a_crash_loses_nothing(root: Path) -> None:
    """A torn end, which the next writer cuts off; and that one dies as well."""
    registry = peopled(root / "registry")
    before = entry_count(root)
    line = registry.ledger.examined()[0].entries[-1].line()
    with registry.ledger.path.open("ab") as file:
        file.write(line[: len(line) // 2])
    during, after = counts_after(root, lambda: Registry(root / "registry").ask())
    assert during == {before, before + 1}
    assert after == {before + 1}


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
left = int(sys.argv[1])

def counted(real):
    def act(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL) if os.name != "nt" else os._exit(9)
        return real(*args, **kwargs)
    return act

from registry_support import Registry
registry = Registry(Path(sys.argv[2]))
for name in ("fsync", "replace", "rename", "mkdir"):
    setattr(os, name, counted(getattr(os, name)))
for number in range(3):
    code = registry.ask()
    sys.stdout.write(code + "\\n")
    sys.stdout.flush()
print("whole", flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_of_its_writes_loses_nothing_that_it_reported(
    tmp_path: Path,
) -> None:
    """Kill -9, for real: each decision that was printed is there, at most one more, and the chain verifies."""
    for place in range(1, 60):
        folder = tmp_path / f"{place:02d}"
        before = len(peopled(folder).kinds())
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(place), str(folder), str(Path(__file__).parent)],
            capture_output=True, text=True, check=False, env=environment(),
        )  # fmt: skip
        said = done.stdout.split()
        registry = Registry(folder)
        assert registry.ask() == "granted"
        kinds = registry.kinds()
        num_new = len(kinds) - before - 1
        if said and said[-1] == "whole":
            assert num_new == 3
            break
        assert done.returncode != 0, done.stderr
        assert len(said) <= num_new <= len(said) + 1
        assert set(said) <= {"granted"}
    else:
        pytest.fail("the writer was never left alone")
    assert place > 10, "kills that hit nothing"


def test_two_processes_append_one_after_the_other(tmp_path: Path) -> None:
    """A single writer at a time: forty entries of two processes are forty links of one chain."""
    registry = peopled(tmp_path)
    before = len(registry.kinds())
    program = (
        "import sys; from pathlib import Path; from outsize.registry.ledger import Ledger\n"
        "for number in range(20):\n"
        "    with Ledger(Path(sys.argv[1]), clock=lambda: 1_500_000).opened() as opened:\n"
        "        opened.append('decision', {'by': sys.argv[2], 'number': number})\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), who], env=environment())
        for who in ("one", "other")
    ]
    assert [child.wait(60) for child in children] == [0, 0]
    chain, faults = registry.ledger.examined()
    assert not faults
    new = [one.body for one in chain.entries[before:]]
    for who in ("one", "other"):
        assert [one["number"] for one in new if one["by"] == who] == list(range(20))


def test_a_head_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    registry = peopled(tmp_path)
    head = registry.ledger.examined()[0].head
    kept = json.loads(registry.ledger.head_path.read_text())
    assert kept == {"registry": head.registry, "count": head.count, "digest": head.digest}
    assert Ledger(tmp_path).examined()[0].entries[0].body["version"] == 1
    assert NEAR in registry.gate.standing().parties
