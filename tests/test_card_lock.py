"""One process at a time on a card: by the card's own name, visibly, and never longer than its holder lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outsize.devices import _card_lock, _foreign
from outsize.devices._card_lock import FOLDER, LENT, card_key, holder_of, lending_card, told_foreign
from outsize.devices._foreign import Foreign, foreign_programs, kfd_processes
from outsize.devices._sensors import CardId

CARD = CardId("nvidia", "0000:c1:00.0", "GPU-5c2a8a7c-6f4e-11ee-9a1b-0242ac120002")
HOLD = """
import sys, time
from outsize.devices._card_lock import hold_card
from outsize.devices._sensors import CardId
hold_card(CardId("nvidia", "", sys.argv[1]), "a card", lambda line: print(line, flush=True))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks of this test alone, and no right that a test run lends."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "cards"))
    monkeypatch.delenv(LENT, raising=False)
    return tmp_path / "cards"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for one in started:
        one.kill()
        one.communicate()


def start(children: list[subprocess.Popen[str]], uuid: str = CARD.uuid) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, uuid],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    children.append(child)
    return child


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_second_process_waits_says_for_whom_and_follows_a_killed_holder(
    children: list[subprocess.Popen[str]],
) -> None:
    """Two contexts on one card poison each other (ROCm on Windows) or share its memory badly; a kill leaves no lock."""
    first = start(children)
    assert line(first) == "held"
    second = start(children)
    said = line(second)
    assert f"waiting for a card: process {first.pid} (outsize" in said
    assert "has held it for" in said
    first.kill()
    assert line(second).startswith("a card is free after")
    assert line(second) == "held"
    holder = holder_of(CARD)
    assert holder is not None
    assert (holder.pid, holder.is_alive) == (second.pid, True)
    second.kill()
    second.wait()
    assert not holder.is_alive


def test_another_card_is_another_lock(children: list[subprocess.Popen[str]]) -> None:
    assert line(start(children)) == "held"
    assert line(start(children, "GPU-other")) == "held"


def test_who_was_lent_the_card_does_not_wait_and_who_was_not_does(
    children: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of doctor that waited for doctor would wait for ever."""
    with lending_card(CARD, "a card") as environment:
        stranger = start(children)
        assert line(stranger).startswith("waiting for a card")
        monkeypatch.setenv(LENT, environment[LENT])
        assert line(start(children)) == "held"
    assert line(stranger).startswith("a card is free")
    assert line(stranger) == "held"


def test_a_lock_whose_note_is_of_a_dead_process_is_not_said_to_be_its(
    folder: Path, children: list[subprocess.Popen[str]]
) -> None:
    """Between taking the lock and leaving the note a process may be killed, and the next one be on its way."""
    first = start(children)
    assert line(first) == "held"
    path = folder / f"{card_key(CARD)}.json"
    note = json.loads(path.read_text()) | {"began": time.time() - 1e6}
    path.write_text(json.dumps(note))
    assert line(start(children)) == "waiting for a card: a process that left no note holds it"


def test_a_card_is_named_by_itself_and_a_place_on_the_bus_by_its_machine_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An index changes with CUDA_VISIBLE_DEVICES; a place on the bus is the same in two machines with one home folder."""
    assert card_key(CARD) == CARD.uuid
    amd = CardId("amd", "0000:03:00.0")
    monkeypatch.setattr(_card_lock.platform, "node", lambda: "one")
    first = card_key(amd)
    monkeypatch.setattr(_card_lock.platform, "node", lambda: "two")
    assert first != card_key(amd)
    assert set(first + card_key(amd)).isdisjoint(':/\\*?"<>|')


def test_the_processor_is_shared(folder: Path) -> None:
    _card_lock.hold_card(None, "CPU", pytest.fail)
    with lending_card(None, "CPU") as environment:
        assert environment == {}
    assert not folder.exists()


def test_foreign_programs_are_told_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    listed = [(own, 5), (999_999_999, 3 << 30), (999_999_998, None)]
    monkeypatch.setattr(_foreign, "compute_processes", lambda _card: listed)
    found = foreign_programs(CARD)
    assert found == [Foreign(999_999_999, 3 << 30), Foreign(999_999_998, None)]
    (said,) = told_foreign("a card", found)
    assert "999999999 (not to be seen from here, 3.0 GiB)" in said
    assert told_foreign("a card", []) == told_foreign("a card", None) == []


def test_kfd_lists_who_holds_memory_on_this_card(tmp_path: Path) -> None:
    """The layout is the kernel's: /sys/class/kfd/kfd/proc/PID/vram_GPUID. Not verified on hardware."""
    kfd = tmp_path / "sys/class/kfd/kfd"
    for number, (gpu_id, location) in enumerate([("0", 0), ("4660", 768), ("9999", 2048)]):
        node = kfd / "topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu_id}\n")
        (node / "properties").write_text(f"simd_count 120\nlocation_id {location}\ndomain 0\n")
    for pid, name, used in [
        ("41", "vram_4660", "1048576"),
        ("42", "vram_9999", "7"),
        ("43", "vram_4660", "0"),
    ]:
        process = kfd / "proc" / pid
        process.mkdir(parents=True)
        (process / name).write_text(f"{used}\n")
    assert kfd_processes(tmp_path, CardId("amd", "0000:03:00.0")) == [(41, 1048576)]
    assert kfd_processes(tmp_path, CardId("amd", "0000:09:00.0")) is None
    assert kfd_processes(tmp_path / "none", CardId("amd")) is None
