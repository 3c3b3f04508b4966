"""Provenance: what is stated of a corpus's files, held against what lies there now.

A folder's statements bind content, not names: a file that was edited since is told apart from one that was renamed. What is
stated of a whole corpus has one digest, which is the same wherever the files lie and however they are called.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from outsize.base.errors import SourceError
from outsize.base.files import file_digest, json_digest
from outsize.data.origin import Origin
from outsize.data.statements import PROVENANCE, STATED, Statement, read_statements


@dataclass(frozen=True, slots=True)
class Traced:
    """A picture, or a file of texts. folder: where it is stated what it is; name: as a statement calls it."""

    folder: Path
    name: str
    origin: Origin

    def digest(self) -> str | None:
        """SHA-256 of the content; None where it cannot be read."""
        try:
            if self.origin.row < 0:
                return file_digest(self.origin.path)
            return hashlib.sha256(self.origin.read()).hexdigest()
        except (OSError, SourceError):
            return None


@dataclass(frozen=True, slots=True)
class Survey:
    """A folder. lines: None where nothing was stated yet. digests: of a corpus's files in it, None for what cannot be read."""

    folder: Path
    lines: Mapping[str, Statement] | None
    digests: Mapping[str, str | None]
    gone: frozenset[str]

    def statements(self) -> Iterator[Statement]:
        """One for each file that can be read; of a file that has no line, nothing is stated."""
        for name, digest in self.digests.items():
            if digest is not None:
                empty = Statement(file=name, sha256=digest)
                yield (self.lines or {}).get(name, empty)

    @property
    def edited(self) -> tuple[str, ...]:
        """Files that hold something else than their line is of."""
        return tuple(one.file for one in self.statements() if one.sha256 != self.digests[one.file])

    @property
    def unlisted(self) -> tuple[str, ...]:
        """Files that have no line."""
        return tuple(name for name in self.digests if name not in (self.lines or {}))

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Files that are named, and cannot be read."""
        return tuple(name for name, digest in self.digests.items() if digest is None)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What is stated of a corpus. subjects: all who are said to be shown. missing: by field, how many files lack it.

    num_lacking: files that lack anything.
    """

    digest: str
    subjects: tuple[str, ...]
    num_files: int
    num_lacking: int
    missing: Mapping[str, int]

    def __str__(self) -> str:
        shown = {0: "nobody", 1: "1 subject"}.get(
            len(self.subjects), f"{len(self.subjects)} subjects"
        )
        begin = f"provenance of {self.num_files} files is stated, {shown} shown"
        if not self.num_lacking:
            return begin
        by_field = ", ".join(f"{name} of {count}" for name, count in self.missing.items())
        return f"{begin}; {self.num_lacking} of them lack something: {by_field}"


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be stated. values: by field. glob: of the files that are meant; None for all.

    replaces: also where something else is stated. accepts: take files that were edited as they are now.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    glob: str | None = None
    replaces: bool = False
    accepts: bool = False

    def is_for(self, name: str) -> bool:
        """Whether a file is meant; * goes over slashes."""
        return self.glob is None or fnmatchcase(name, self.glob)

    def applied(self, line: Statement) -> Statement:
        """A line with what is to be stated."""
        if not self.is_for(line.file):
            return line
        chosen = {
            key: value
            for key, value in self.values.items()
            if self.replaces or getattr(line, key) is None
        }
        return replace(line, **chosen)


def traced(place: Path, origin: Origin) -> Traced:
    """Something that a set names. place: the set's own folder or file."""
    folder = home_of(place)
    try:
        name = Path(os.path.relpath(origin.path, folder)).as_posix()
    except ValueError:  # on Windows, of another drive
        name = origin.path.absolute().as_posix()
    return Traced(folder, name if origin.row < 0 else f"{name}#{origin.row + 1}", origin)


def home_of(place: Path) -> Path:
    """The folder in which a set's statements lie."""
    return place if place.is_dir() else place.parent


def is_begun(folders: Iterable[Path]) -> bool:
    """Whether anything is stated in any of some folders."""
    return any((folder / PROVENANCE).is_file() for folder in folders)


def survey(files: Iterable[Traced]) -> tuple[Survey, ...]:
    """Read what is stated, and hash what lies there, by folder.

    Raises: SourceError naming every line that is none.
    """
    by_folder: dict[Path, dict[str, Traced]] = defaultdict(dict)
    for one in files:
        by_folder[one.folder][one.name] = one
    surveys = []
    with ThreadPoolExecutor(min(16, (os.cpu_count() or 1) + 2)) as pool:
        for folder, found in sorted(by_folder.items()):
            lines = read_statements(folder)
            digests = dict(zip(found, pool.map(Traced.digest, found.values()), strict=True))
            gone = frozenset(_gone(folder, lines or {}, found.values()))
            surveys.append(Survey(folder, lines, digests, gone))
    return tuple(surveys)


def provenance_of(surveys: Iterable[Survey]) -> Provenance | None:
    """What is stated of all files together; None where nothing is stated of any."""
    surveys = tuple(surveys)
    if all(one.lines is None for one in surveys):
        return None
    lines = [line for one in surveys for line in one.statements()]
    missing = Counter(name for line in lines for name in line.missing)
    told = sorted(json_digest(line.told()) for line in lines)
    return Provenance(
        digest=json_digest(told),
        subjects=tuple(sorted({one for line in lines for one in line.subjects or ()})),
        num_files=len(lines),
        num_lacking=sum(bool(line.missing) for line in lines),
        missing={name: missing[name] for name in STATED if missing[name]},
    )


def brought_up(now: Survey, order: Order) -> dict[str, Statement]:
    """A folder's lines as they should be: new files added, renamed ones found again, vanished ones marked, the order followed.

    What is stated stays, also of files that were edited, whose digest is only taken anew where the order says so; what was
    done to these since is then to be said anew.
    """
    lines = dict(now.lines or {})
    lost = {lines[name].sha256: name for name in now.gone}
    for name, digest in now.digests.items():
        if digest is None:
            continue
        line = lines.get(name)
        if line is None and digest in lost:
            line = replace(lines.pop(lost.pop(digest)), file=name)
        elif line is None:
            line = Statement(file=name, sha256=digest)
        elif line.sha256 != digest and order.accepts and order.is_for(name):
            line = replace(line, sha256=digest, transforms=None)
        lines[name] = replace(order.applied(line), vanished=False)
    for name in now.gone & lines.keys():
        lines[name] = replace(lines[name], vanished=True)
    return lines


def _gone(folder: Path, lines: Iterable[str], found: Iterable[Traced]) -> Iterator[str]:
    """Lines whose file, or row of a table, is not there any more."""
    names = {one.name for one in found}
    tables = {one.name.rpartition("#")[0] for one in found if one.origin.row >= 0}
    for name in lines:
        table = name.rpartition("#")[0]
        is_there = (folder / name).is_file() or (table and (folder / table).is_file())
        if name not in names and (table in tables or not is_there):
            yield name
