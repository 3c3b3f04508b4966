"""What decoding a picture has shown, by digest of its bytes: so that a warm start need not decode.

Decoding proves that a picture is whole and tells its size as it is looked at. Both follow from its
bytes alone, so a fact can be absent but never out of date. The file is only a memory of work done:
where it is absent or cannot be read, the work is done again with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outsize.base.files import parse_json, write_json_atomically
from outsize.data.media import LOOKS, TRANSFORM, Look

_VERSION = f"{TRANSFORM}, {LOOKS}"


def read_facts(path: Path) -> dict[str, Look]:
    """Looks by digest, of pictures this version of the transform has decoded."""
    try:
        stored = parse_json(path.read_bytes())
        if stored["version"] != _VERSION:
            return {}
        return {str(digest): _look(*values) for digest, values in stored["looks"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}


def add_facts(path: Path, new: Mapping[str, Look]) -> None:
    """Add to the file. Of two processes at once the last one's facts stay, which loses nothing."""
    merged = read_facts(path) | dict(new)
    looks = {
        digest: [one.width, one.height, one.has_alpha, one.has_profile, one.note]
        for digest, one in merged.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, {"version": _VERSION, "looks": looks})


def _look(width: int, height: int, has_alpha: bool, has_profile: bool, note: str) -> Look:  # noqa: FBT001 - as stored
    return Look(int(width), int(height), bool(has_alpha), bool(has_profile), str(note))
