"""One process at a time on a card: a lock that is named by the card itself, since indices change with what is visible.

The lock is the system's, so it goes with the process that holds it, however that ends; a note beside it only tells people who
that is. It is taken when a device is opened and held until the process ends, because its context lives as long. A child that
was given the holder's word in OUTSIZE_CARD_LENT works under the holder's right. What other programs compute on a card is told,
and not fought. An underscore begins this file's name because every file without one is a device.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs
import psutil

from outsize.base.files import make_folder, parse_json, write_json_atomically
from outsize.base.units import format_bytes, format_seconds
from outsize.devices._foreign import Foreign, foreign_programs
from outsize.devices._sensors import CardId

LENT = "OUTSIZE_CARD_LENT"
FOLDER = "OUTSIZE_CARD_LOCKS"
TELL_EVERY_S = 30.0
_POLL_S = 0.25
_SAME_S = 1.0  # two readings of when a process began differ by rounding
Tell = Callable[[str], None]

_held: dict[str, filelock.FileLock] = {}  # by card, until this process ends


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a card. began, since: seconds since 1970, of the process and of its hold; word: what it lends by."""

    pid: int
    began: float
    command: str
    since: float
    word: str

    @property
    def is_alive(self) -> bool:
        """Whether that very process is still there."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.began) < _SAME_S
        except psutil.Error:
            return False

    def __str__(self) -> str:
        held = format_seconds(max(0.0, time.time() - self.since))
        return f"process {self.pid} ({self.command}) has held it for {held}"


def say_on_stderr(line: str) -> None:
    """Tell whoever watches the process."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def hold_card(card: CardId | None, name: str, tell: Tell = say_on_stderr) -> None:
    """Hold a card until this process ends; waits, visibly, while another one does. None is the processor, which all share."""
    if card is None or card_key(card) in _held:
        return
    lock = _wait(card, name, tell)
    if lock is not None:
        _held[card_key(card)] = lock


@contextmanager
def lending_card(
    card: CardId | None, name: str, tell: Tell = say_on_stderr
) -> Iterator[dict[str, str]]:
    """Hold a card for children, within the block; what to add to their environment."""
    if card is None:
        yield {}
        return
    lock = _wait(card, name, tell)
    try:
        yield {LENT: _word()}
    finally:
        if lock is not None:
            lock.release()


def card_key(card: CardId) -> str:
    """A card's name among lock files: NVIDIA's uuid; else its place on this machine's bus, for want of better its vendor."""
    whole = card.uuid or f"{card.vendor}-{platform.node()}-{card.pci or 'card'}"
    return re.sub(r"[^A-Za-z0-9.-]+", "_", whole)


def locks_folder() -> Path:
    """Where this user's locks lie: as OUTSIZE_CARD_LOCKS says, or with what this user's programs remember."""
    named = os.environ.get(FOLDER)
    return (
        Path(named) if named else platformdirs.user_state_path("outsize", appauthor=False) / "cards"
    )


def holder_of(card: CardId) -> Holder | None:
    """Who left a note at a card's lock."""
    try:
        return Holder(**parse_json((locks_folder() / f"{card_key(card)}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _wait(card: CardId, name: str, tell: Tell) -> filelock.FileLock | None:
    """The lock of a card, taken; None when its holder lent the card to this process."""
    folder, told_at, began = locks_folder(), -TELL_EVERY_S, time.monotonic()
    make_folder(folder)
    lock = filelock.FileLock(folder / f"{card_key(card)}.lock", timeout=0, thread_local=False)
    while True:
        try:
            lock.acquire()
        except filelock.Timeout:
            holder = holder_of(card)
        else:
            break
        if holder is not None and holder.word == os.environ.get(LENT):
            return None
        if time.monotonic() - told_at >= TELL_EVERY_S:
            told_at = time.monotonic()
            is_known = holder is not None and holder.is_alive
            who = str(holder) if is_known else "a process that left no note holds it"
            tell(f"waiting for {name}: {who}")
        time.sleep(_POLL_S)
    waited_s = time.monotonic() - began
    if waited_s > _POLL_S:
        tell(f"{name} is free after {format_seconds(waited_s)}")
    _leave_note(folder / f"{card_key(card)}.json")
    for line in told_foreign(name, foreign_programs(card)):
        tell(line)
    return lock


def told_foreign(name: str, found: list[Foreign] | None) -> list[str]:
    """What to say of other programs that compute on a card; nothing where nobody tells of any."""
    if not found:
        return []
    each = ", ".join(
        f"{one.pid} ({one.name or 'not to be seen from here'}"
        f"{'' if one.num_bytes is None else f', {format_bytes(one.num_bytes)}'})"
        for one in found
    )
    return [f"warning: other programs compute on {name} as well, and slow both: process {each}"]


def _leave_note(path: Path) -> None:
    own = psutil.Process()
    note: Mapping[str, object] = {
        "pid": own.pid,
        "began": own.create_time(),
        "command": shlex.join(["outsize", *sys.argv[1:]]),
        "since": time.time(),
        "word": _word(),
    }
    write_json_atomically(path, note)


@functools.cache
def _own_word() -> str:
    return uuid.uuid4().hex


def _word() -> str:
    """By which a holder knows those that work under its right: the word it was given itself, or one of its own."""
    return os.environ.get(LENT) or _own_word()
