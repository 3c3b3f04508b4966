"""Statements: what people say of where a picture or a file of texts comes from; a line of JSON each, in a file beside the data.

Nothing here guesses. What is null is not stated yet, an empty list states that there is none. A line is bound to its file by
the digest of the content; provenance.py holds lines against what lies there.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from outsize.base.errors import SourceError
from outsize.base.files import parse_json, write_atomically
from outsize.base.legal_basis import BASES, LegalBasis
from outsize.base.pseudonyms import pseudonym_fault

PROVENANCE = "provenance.jsonl"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEEDS_NO_LICENCE = ("consent", "public_domain", "own_work")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One line. file: below the folder, with forward slashes, and behind a # the row of a table, from 1.

    sha256: of the content that the rest is said of. source: an id or URL. licence: an SPDX id, or its text. subjects: ids of
    those who are shown. retrieved: a date, as 2026-11-30. transforms: what was done to it since. vanished: it lay there once.
    """

    file: str
    sha256: str
    source: str | None = None
    licence: str | None = None
    basis: LegalBasis | None = None
    subjects: tuple[str, ...] | None = None
    retrieved: str | None = None
    transforms: tuple[str, ...] | None = None
    vanished: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """What is not stated. A licence is needed where the use rests on one, or nobody says on what."""
        needless = {"licence"} if self.basis in _NEEDS_NO_LICENCE else set()
        return tuple(one for one in STATED if getattr(self, one) is None and one not in needless)

    def told(self) -> dict[str, Any]:
        """All but how the file is called, and whether it is there, as JSON values."""
        return {key: value for key, value in asdict(self).items() if key not in _OF_THE_FILE}


_OF_THE_FILE = ("file", "vanished")
_KEYS = tuple(one.name for one in fields(Statement))
STATED = tuple(one for one in _KEYS if one not in {*_OF_THE_FILE, "sha256"})


def read_statements(folder: Path) -> dict[str, Statement] | None:
    """The lines of a folder by their files; None where nobody has begun any.

    Raises: SourceError naming every line that is none.
    """
    path = folder / PROVENANCE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error
    found: dict[str, Statement] = {}
    faults: list[str] = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        wrong, value = _parsed(line)
        if not wrong and value["file"] in found:
            wrong = [f"a second line of {value['file']}"]
        faults += [f"line {number}: {one}" for one in wrong]
        if not wrong:
            found[value["file"]] = Statement(**value)
    if faults:
        listed = "\n  ".join(faults)
        raise SourceError(f"{path}: {len(faults)} faults; mend the lines:\n  {listed}")
    return found


def write_statements(folder: Path, lines: Mapping[str, Statement]) -> None:
    """Write the lines of a folder, whole or not at all.

    Raises: SourceError where the folder cannot be written to.
    """
    text = "".join(f"{_written(one)}\n" for _, one in sorted(lines.items()))
    try:
        # names that are no text keep their bytes as JSON's own escapes
        write_atomically(folder / PROVENANCE, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise SourceError(f"{folder / PROVENANCE}: cannot be written: {error}") from error


def faults_in(value: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with some fields of a line, as JSON values or as they are here."""
    for key, field in value.items():
        if key not in _KEYS:
            yield f"{key!r} is no field; there are {', '.join(_KEYS)}"
        elif field is None and key in STATED:
            continue
        elif key in {"subjects", "transforms"} and not isinstance(field, list | tuple):
            yield f"{key} must be a list, and is {field!r:.60}; an empty one says that there are none"
        else:
            yield from (f"{key}: {fault}" for fault in _CHECKS[key](field))
    if value.get("basis") == "consent" and value.get("subjects") in ([], ()):
        yield "it rests on consent, and shows nobody who could have given it"


def _parsed(line: bytes) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with a line; where nothing is, its fields."""
    try:
        value = parse_json(line)
    except ValueError as error:
        return [f"is not JSON: {error}"], {}
    if not isinstance(value, dict):
        return ["must be an object"], {}
    lacking = [f"has no {key}" for key in ("file", "sha256") if key not in value]
    faults = [*lacking, *faults_in(value)]
    return faults, {
        key: tuple(field) if isinstance(field, list) else field for key, field in value.items()
    }


def _written(one: Statement) -> str:
    value = asdict(one)
    if not one.vanished:
        del value["vanished"]
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _texts(field: object) -> Iterator[str]:
    if not isinstance(field, str) or not field.strip():
        yield f"must be a text, and is {field!r:.60}"


def _digests(field: object) -> Iterator[str]:
    if not isinstance(field, str) or not _SHA256.fullmatch(field):
        yield f"must be a SHA-256, 64 of 0-9 and a-f, and is {field!r:.80}"


def _bases(field: object) -> Iterator[str]:
    if field not in BASES:
        yield f"must be one of {', '.join(BASES)}, and is {field!r:.60}"


def _subjects(field: tuple[object, ...]) -> Iterator[str]:
    for one in field:
        if fault := pseudonym_fault(str(one), "s"):
            yield fault


def _dates(field: object) -> Iterator[str]:
    try:
        is_date = dt.date.fromisoformat(str(field)).isoformat() == field
    except ValueError:
        is_date = False
    if not is_date:
        yield f"must be a date, as 2026-11-30, and is {field!r:.60}"


def _lists(field: tuple[object, ...]) -> Iterator[str]:
    for one in field:
        yield from _texts(one)


def _flags(field: object) -> Iterator[str]:
    if not isinstance(field, bool):
        yield f"must be true or false, and is {field!r:.60}"


_CHECKS: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "file": _texts,
    "sha256": _digests,
    "source": _texts,
    "licence": _texts,
    "basis": _bases,
    "subjects": _subjects,
    "retrieved": _dates,
    "transforms": _lists,
    "vanished": _flags,
}
