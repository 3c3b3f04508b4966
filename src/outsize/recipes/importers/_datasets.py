"""What the dataset files of kohya's programs share: TOML with [general] and [[datasets]], in three levels of defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outsize.recipes.importers._rows import Draft, Told
from outsize.recipes.importers.protocol import Asked

NOT_OURS = (
    "tell the base by --base and --source; rank, steps and the rest are the defaults of a recipe"
)


def begun(asked: Asked) -> Draft:
    """A recipe of which the file says the pictures alone."""
    draft = Draft()
    draft.recipe["name"] = asked.name
    family, _, variant = (asked.base or "").partition(".")
    draft.recipe["base"] = {"family": family, "variant": variant, "source": asked.source or ""}
    draft.recipe["data"] = {"sets": []}
    return draft


def add_side(draft: Draft, value: Any) -> Told:
    """A resolution of theirs: a number, or width and height, of which the area counts."""
    sides = value if isinstance(value, list) else [value, value]
    if not sides or not all(isinstance(one, int) for one in sides):
        return "left out", "no number of pixels"
    side = round((sides[0] * sides[-1]) ** 0.5)
    data = draft.recipe["data"]
    before = data.get("resolution")
    known = before if isinstance(before, list) else [] if before is None else [before]
    union = sorted({*known, side})
    data["resolution"] = union if len(union) > 1 else union[0]
    if known and known != [side]:
        return (
            "changed",
            "data.resolution, which is that of all sets: every picture is shown at each of them",
        )
    if sides[0] != sides[-1]:
        return "changed", f"data.resolution: {side}, the side of a square of that area"
    return "taken", "data.resolution"


def resolved(value: Mapping[str, Any], key: str, *levels: Mapping[str, Any]) -> Any:
    """A key of a set, or of what stands above it; None when nobody says."""
    for level in (value, *levels):
        if level.get(key) is not None:
            return level[key]
    return None
