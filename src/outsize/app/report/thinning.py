"""As many points as a screen can show: neighbouring steps become one point that keeps their least, largest and mean value.

A spike of one step among a hundred thousand stays visible, which a mean or every n-th value would lose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outsize.app.report.history import FIELDS, Step

MOST_POINTS = 2000
_DIGITS = 6
_WITH_RANGE = ("loss", "grad_norm", "seconds")


def thinned(steps: Sequence[Step], most: int = MOST_POINTS) -> dict[str, Any]:
    """Columns of at most `most` points, and where steps are missing a point without values.

    step: the last step of each point; width: steps that a point stands for; first: the first step; loss, grad_norm, seconds: {lo, hi, mean}; the
    others their means. None: nothing is known there.
    """
    if not steps:
        return {"step": [], "width": 1, "first": 0} | {name: _column(name, []) for name in FIELDS}
    first, last = steps[0].number, steps[-1].number
    width = max(1, -(-(last - first + 1) // most))
    groups = list(_grouped(steps, first, width))
    columns: dict[str, Any] = {
        "step": [end for end, _ in groups],
        "width": width,
        "first": first,
    }
    for name in FIELDS:
        columns[name] = _column(name, [[one.values[name] for one in group] for _, group in groups])
    return columns


def _grouped(steps: Sequence[Step], first: int, width: int) -> Iterator[tuple[int, list[Step]]]:
    """Steps by the point that they become; one empty point for each stretch that is missing."""
    place, group = 0, list[Step]()
    for one in steps:
        here = (one.number - first) // width
        if here != place:
            yield (group[-1].number if group else first + place * width), group
            if here > place + 1:
                yield first + (place + 1) * width, []
            place, group = here, []
        group.append(one)
    yield group[-1].number, group


def _column(name: str, groups: list[list[float | None]]) -> Any:
    known = [[one for one in group if one is not None] for group in groups]
    means = [_rounded(sum(group) / len(group)) if group else None for group in known]
    if name not in _WITH_RANGE:
        return means
    return {
        "lo": [_rounded(min(group)) if group else None for group in known],
        "hi": [_rounded(max(group)) if group else None for group in known],
        "mean": means,
    }


def _rounded(value: float) -> float:
    """To as many digits as anyone can see."""
    return float(f"{value:.{_DIGITS}g}")
