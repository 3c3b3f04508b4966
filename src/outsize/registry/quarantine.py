"""Quarantine: a thing derived from somebody who has revoked is renamed where it lies, so that no program takes it for what it was.

A rename moves no bytes, works for a folder of 60 GB, and is undone by renaming back. What cannot be renamed (a file that a
program on Windows has open) is said, and tried again by the next call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outsize.base.files import sync_folder

SUFFIX = ".quarantined"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What became of a path. why: in words of the system, where it could not be moved; lies_at: its new path."""

    path: str
    became: Literal["moved", "gone", "stuck"]
    lies_at: str | None = None
    why: str | None = None


def quarantine(paths: Iterable[Path]) -> tuple[Quarantined, ...]:
    """Put everything away that is there."""
    return tuple(_quarantined(path) for path in paths)


def _quarantined(path: Path) -> Quarantined:
    if not path.exists():
        return Quarantined(str(path), "gone")
    target = _free_name(path)
    try:
        path.rename(target)
        sync_folder(path.parent)
    except OSError as error:
        return Quarantined(str(path), "stuck", why=str(error))
    return Quarantined(str(path), "moved", lies_at=str(target))


def _free_name(path: Path) -> Path:
    """Where nothing is: something of that name may have been put away before."""
    names = itertools.chain((SUFFIX,), (f"{SUFFIX}-{number}" for number in itertools.count(2)))
    return next(one for name in names if not (one := path.with_name(path.name + name)).exists())
