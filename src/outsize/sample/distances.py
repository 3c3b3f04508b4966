"""How far two pictures are apart, in measures that need no model."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from PIL import Image


@dataclass(frozen=True, slots=True)
class Distance:
    """rms: root mean square difference of RGB values, 0..255. changed: share of pixels that differ by more than 8."""

    rms: float
    changed: float

    def to_json(self) -> dict[str, float]:
        """As JSON values, rounded to what can be told apart."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def distance(first: Image.Image, second: Image.Image) -> Distance:
    """Distance of two pictures of the same size."""
    assert first.size == second.size, "pictures to compare have one size"
    a, b = (np.asarray(one.convert("RGB"), dtype=np.float64) for one in (first, second))
    difference = np.abs(a - b)
    return Distance(
        rms=float(np.sqrt((difference**2).mean())),
        changed=float((difference.max(axis=2) > 8).mean()),
    )


def mean(distances: list[Distance]) -> Distance:
    """The mean of several; zero for none."""
    if not distances:
        return Distance(0.0, 0.0)
    return Distance(
        float(np.mean([one.rms for one in distances])),
        float(np.mean([one.changed for one in distances])),
    )
