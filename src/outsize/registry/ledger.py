"""The ledger on disk: appended to by one process at a time, and read whole each time.

ledger.jsonl holds the chain, and is the only thing that means anything. head.json says how many entries were finished; it is
written after each one. So a writer that was killed leaves behind at most one whole entry that head.json does not know, which
counts, or part of one, which is cut off by the next writer; and an entry that was finished cannot pass for one that was not.
Every append is on disk before it returns, and a chain that cannot be believed is never written to.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from outsize.base.errors import MachineFault, StoreBroken
from outsize.base.files import make_folder, sync_file, write_atomically
from outsize.registry.chain import (
    Chain,
    Entry,
    Head,
    canonical,
    head_faults,
    next_entry,
    parse_head,
    read_chain,
)

WAIT_S = 10.0  # for another process, which holds the ledger for milliseconds
VERSION = 1
BEGUN = "registry"  # the kind of the first entry
_VARIABLE = "OUTSIZE_REGISTRY"


def registry_folder() -> Path:
    """Where this user's registry lies: as OUTSIZE_REGISTRY says, or with this user's data."""
    named = os.environ.get(_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("outsize", appauthor=False)) / "registry"


@dataclass(frozen=True)
class Ledger:
    """One registry. clock: seconds since 1970."""

    folder: Path
    clock: Callable[[], float] = time.time
    wait_s: float = WAIT_S

    @property
    def path(self) -> Path:
        """The chain."""
        return self.folder / "ledger.jsonl"

    @property
    def head_path(self) -> Path:
        """How far it has come."""
        return self.folder / "head.json"

    def now(self) -> int:
        """Whole seconds."""
        return int(self.clock())

    @contextmanager
    def opened(self, *, makes: bool = False) -> Iterator[Open]:
        """The ledger for the time of the block, for this process alone; empty where there is none. makes: begin it then.

        Raises: MachineFault when another process holds it too long; StoreBroken when it cannot be believed; OSError.
        """
        if not makes and not self.path.exists() and not self.head_path.exists():
            yield Open(self, [])
            return
        _make_private(self.folder)
        lock = filelock.FileLock(self.folder / ".lock", timeout=self.wait_s)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise MachineFault(
                f"another process has held the registry in {self.folder} for {self.wait_s:g} s; try again when it has ended"
            ) from None
        try:
            yield self._believed()
        finally:
            lock.release()

    def examined(self) -> tuple[Chain, list[str]]:
        """What the files hold, and everything that is wrong with them; nothing is changed, or believed.

        Raises: as `opened`; OSError.
        """
        chain = read_chain(self.path.read_bytes() if self.path.exists() else b"")
        return chain, [*chain.faults, *self._head_faults(chain)]

    def _believed(self) -> Open:
        chain, faults = self.examined()
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise StoreBroken(
                f"the registry in {self.folder} was altered, and nothing in it is believed: {faults[0]}{more}; "
                "`outsize registry verify` lists all. Put back the copy that you trust"
            )
        opened = Open(self, list(chain.entries), chain.num_torn)
        if not opened.entries:
            opened._begin()  # noqa: SLF001 - its other half
        elif self._kept_head() != chain.head:  # its writer was killed before it could
            sync_file(self.path)  # or even before this
            self._keep(chain.head)
        return opened

    def _head_faults(self, chain: Chain) -> Iterator[str]:
        """What head.json knows and the chain lacks, or the other way round."""
        count = len(chain.entries)
        try:
            head = self._kept_head()
        except ValueError as error:
            yield f"{self.head_path.name} is not as it is written: {error}"
            return
        if head is None and count > 1:
            yield f"{self.head_path.name} is gone, and {count} entries are there"
        elif head is not None and count > head.count + 1:
            yield f"{count} entries are there, of which {head.count} were finished: some were put in"
        elif head is not None:
            yield from head_faults(chain, head)

    def _kept_head(self) -> Head | None:
        """Raises: ValueError when it is not byte for byte as it was written."""
        if not self.head_path.exists():
            return None
        content = self.head_path.read_bytes()
        head = parse_head(content)
        if canonical(head.to_json()) != content:
            raise ValueError("it was edited")
        return head

    def _keep(self, head: Head) -> None:
        write_atomically(self.head_path, canonical(head.to_json()))


class Open:
    """A ledger that this process holds. entries: all of them, in order."""

    def __init__(self, ledger: Ledger, entries: list[Entry], num_torn: int = 0) -> None:
        self._ledger = ledger
        self._num_torn = num_torn
        self.entries = entries

    def append(self, kind: str, body: Mapping[str, Any]) -> Entry:
        """Add an entry; it is on disk when this returns."""
        entry = next_entry(self.entries[-1], self._ledger.now(), kind, body)
        with self._ledger.path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            if self._num_torn:
                end -= self._num_torn
                file.truncate(end)
                file.seek(end)
            file.write(entry.line())
            file.flush()
            os.fsync(file.fileno())
        self._num_torn = 0
        self.entries.append(entry)
        self._ledger._keep(Chain(tuple(self.entries)).head)  # noqa: SLF001 - its other half
        return entry

    def _begin(self) -> None:
        """The first entry, by which this registry is told from all others."""
        body = {"version": VERSION, "salt": secrets.token_hex(8)}
        entry = next_entry(None, self._ledger.now(), BEGUN, body)
        write_atomically(self._ledger.path, entry.line())
        self.entries.append(entry)
        self._ledger._keep(Chain((entry,)).head)  # noqa: SLF001 - its other half


def _make_private(folder: Path) -> None:
    """Who agreed to what is nobody else's business (on Windows a user's folders are private as they are)."""
    if not folder.is_dir():
        make_folder(folder)
        folder.chmod(0o700)
