"""What decoding a picture has shown, by digest of its bytes: so that a warm start need not decode.

Decoding proves that a picture is whole and tells its size as it is looked at. Both follow from its
bytes alone, so a fact can be absent but never out of date. The file is only a memory of work done:
where it is absent or cannot be read, the work is done again with the same result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from outsize.base.files import write_json_atomically
from outsize.data.media import TRANSFORM

Size = tuple[int, int]


def read_facts(path: Path) -> dict[str, Size]:
    """Width and height by digest, of pictures this version of the transform has decoded."""
    try:
        stored = json.loads(path.read_bytes())
        if stored["transform"] != TRANSFORM:
            return {}
        return {str(digest): (int(w), int(h)) for digest, (w, h) in stored["sizes"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def add_facts(path: Path, new: Mapping[str, Size]) -> None:
    """Add to the file. Of two processes at once the last one's facts stay, which loses nothing."""
    merged = read_facts(path) | dict(new)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, {"transform": TRANSFORM, "sizes": merged})
