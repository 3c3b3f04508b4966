"""The chain: entries as lines of JSON, each of which holds the digest of the one before it.

A line is the canonical writing of its entry, byte for byte, so whatever is changed in a file is seen: within a line by its own
digest, between lines by the next one's. What lies behind the last line feed is a write that was interrupted, and no entry. Cutting
off whole lines at the end leaves a chain; only a head that was kept elsewhere shows that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outsize.base.files import parse_json

FIRST = "0" * 64  # what the first entry follows
_KEYS = {"number", "time", "kind", "body", "previous", "digest"}


def canonical(value: Any) -> bytes:
    """The one way in which a value is written."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. time: seconds since 1970, never less than the entry's before; previous: that one's digest."""

    number: int
    time: int
    kind: str
    body: Mapping[str, Any]
    previous: str
    digest: str

    def line(self) -> bytes:
        """As it stands in the file."""
        return canonical(_values(self) | {"digest": self.digest}) + b"\n"


@dataclass(frozen=True, slots=True)
class Head:
    """How far a chain had come: kept elsewhere, it tells whether the end was cut off. registry: the first entry's digest."""

    registry: str
    count: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `parse_head` reads them back."""
        return {"registry": self.registry, "count": self.count, "digest": self.digest}


@dataclass(frozen=True, slots=True)
class Chain:
    """What a file holds. faults: nothing of it may be believed when there are any. num_torn: bytes behind the last entry."""

    entries: tuple[Entry, ...]
    faults: tuple[str, ...] = ()
    num_torn: int = 0

    @property
    def head(self) -> Head:
        """Of a chain that has begun."""
        return Head(self.entries[0].digest, len(self.entries), self.entries[-1].digest)


def next_entry(before: Entry | None, time: int, kind: str, body: Mapping[str, Any]) -> Entry:
    """The entry that follows another, or begins a chain."""
    number = 0 if before is None else before.number + 1
    previous = FIRST if before is None else before.digest
    time = time if before is None else max(time, before.time)
    bare = Entry(number, time, kind, body, previous, "")
    return Entry(number, time, kind, body, previous, _digest(bare))


def read_chain(content: bytes) -> Chain:
    """Entries of a file, and everything that is wrong with it."""
    *lines, torn = content.split(b"\n")
    entries: list[Entry] = []
    faults: list[str] = []
    for number, line in enumerate(lines):
        entry = _parse(line)
        if entry is None:
            faults.append(f"line {number + 1} is not as an entry is written: it was edited")
            continue
        before = entries[-1] if entries else None
        faults += [f"line {number + 1} {fault}" for fault in _faults(entry, number, before)]
        entries.append(entry)
    return Chain(tuple(entries), tuple(faults), len(torn))


def head_faults(chain: Chain, head: Head) -> Iterator[str]:
    """What a chain lacks of what an earlier head knows of it."""
    if len(chain.entries) < head.count:
        yield f"the head knows {head.count} entries, there are {len(chain.entries)}: the end was cut off"
    elif chain.entries[0].digest != head.registry:
        yield "the first entry is another one: the head is of another registry, or this one was made anew"
    elif chain.entries[head.count - 1].digest != head.digest:
        yield f"entry {head.count - 1} is not the one that the head knows: the chain was written anew"


def parse_head(content: bytes) -> Head:
    """A head that was kept.

    Raises: ValueError when it is none.
    """
    value = parse_json(content)
    if not isinstance(value, dict) or value.keys() != {"registry", "count", "digest"}:
        raise ValueError("a head has registry, count and digest")
    head = Head(**value)
    texts = (head.registry, head.digest)
    if type(head.count) is not int or head.count < 1 or not all(type(one) is str for one in texts):
        raise ValueError("a head's count is a whole number above 0, registry and digest are texts")
    return head


def _parse(line: bytes) -> Entry | None:
    try:
        value = parse_json(line)
        if not isinstance(value, dict) or value.keys() != _KEYS:
            return None
        if type(value["number"]) is not int or type(value["time"]) is not int:
            return None
        if not isinstance(value["body"], dict) or canonical(value) != line:
            return None
    except (ValueError, RecursionError):
        return None
    return Entry(**value)


def _faults(entry: Entry, number: int, before: Entry | None) -> Iterator[str]:
    if entry.digest != _digest(entry):
        yield "has another digest than its content: it was edited"
    if entry.number != number or entry.previous != (FIRST if before is None else before.digest):
        yield "does not follow the line before it: an entry was taken out, put in or moved"
    if before is not None and entry.time < before.time:
        yield "is older than the line before it"


def _values(entry: Entry) -> dict[str, Any]:
    return {
        "number": entry.number,
        "time": entry.time,
        "kind": entry.kind,
        "body": dict(entry.body),
        "previous": entry.previous,
    }


def _digest(entry: Entry) -> str:
    return hashlib.sha256(canonical(_values(entry))).hexdigest()
