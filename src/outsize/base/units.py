"""Bytes and seconds as people write them: "24 GiB", "0.8 GB", "1 min 20 s"."""

from __future__ import annotations

import re

from outsize.base.errors import RecipeError

_FACTORS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")


def parse_bytes(text: str) -> int:
    """Read "24 GiB", "16GB" or "512MiB" as a number of bytes.

    Raises: RecipeError when the text is no size with a unit.
    """
    match = _PATTERN.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise RecipeError(
            f"{text!r} is not a size; write a number with a unit, as in '24GiB' or '16 GB'"
        )
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(count: int) -> str:
    """Write a number of bytes with the binary unit that keeps it below 1024: "5.6 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Write a duration as a person would: "0.34 s", "1 min 20 s", "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
