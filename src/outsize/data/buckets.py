"""Aspect buckets: to which size a picture is scaled and cropped, in whole numbers only.

A bucket is a picture size whose sides are multiples of what the image codec needs and whose area
stays at or below resolution squared, so that no bucket needs more memory than the square one that
was planned for. A picture goes to the bucket that crops least of it; the crop is centred. There is
no floating point here: the same picture gets the same crop on every machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from outsize.base.errors import RecipeError

ASPECT_LIMIT = 3  # longer pictures are cropped to 3:1; beyond it a bucket loses too much area


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A size in pixels that pictures are brought to."""

    width: int
    height: int

    @property
    def area(self) -> int:
        """Pixels."""
        return self.width * self.height


@dataclass(frozen=True, slots=True)
class CropPlan:
    """Scale the picture to scaled_width x scaled_height, then cut the bucket out at (left, top)."""

    bucket: Bucket
    scaled_width: int
    scaled_height: int
    left: int
    top: int

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right, bottom in the scaled picture."""
        return (
            self.left,
            self.top,
            self.left + self.bucket.width,
            self.top + self.bucket.height,
        )

    def describe(self) -> dict[str, Any]:
        """All that shapes the pixels, as JSON values, for cache keys."""
        return {"scaled": [self.scaled_width, self.scaled_height], "box": list(self.box)}


@functools.lru_cache(maxsize=256)
def buckets_at(resolution: int, multiple: int) -> tuple[Bucket, ...]:
    """All buckets at a resolution, narrowest first.

    Every bucket has sides that are multiples of `multiple`, an area of at most resolution ** 2, an
    aspect of at most 3:1, and cannot be widened or heightened within that area.
    Raises: RecipeError when not even one square of `multiple` fits.
    """
    if multiple < 1 or resolution < multiple:
        raise RecipeError(
            f"resolution {resolution} px is below the {multiple} px that the model takes as one "
            f"step; set at least {multiple}"
        )
    budget = resolution * resolution
    found = set()
    for width in range(multiple, ASPECT_LIMIT * resolution + 1, multiple):
        height = budget // width // multiple * multiple
        if height and max(width, height) <= ASPECT_LIMIT * min(width, height):
            widest = min(budget // height // multiple * multiple, ASPECT_LIMIT * height)
            found.add(Bucket(widest // multiple * multiple, height))
    mirrored = {Bucket(bucket.height, bucket.width) for bucket in found}
    return tuple(sorted(found | mirrored))


def aspect_distance(width: int, height: int, bucket: Bucket) -> Fraction:
    """By how much the aspects differ: 1 when equal, 2 when one is twice as wide. Exact."""
    across, down = width * bucket.height, height * bucket.width
    return Fraction(max(across, down), min(across, down))


@functools.lru_cache(maxsize=8192)
def bucket_of(width: int, height: int, resolution: int, multiple: int) -> Bucket:
    """The bucket that crops least of a picture of width x height; among equals the larger, then the wider.

    Raises: RecipeError for an impossible resolution.
    """
    return min(
        buckets_at(resolution, multiple),
        key=lambda bucket: (aspect_distance(width, height, bucket), -bucket.area, -bucket.width),
    )


def crop_plan(width: int, height: int, bucket: Bucket) -> CropPlan:
    """Cover the bucket with the picture, aspect kept, and cut out the centre."""
    if bucket.width * height >= bucket.height * width:
        scaled = (bucket.width, max(bucket.height, _divide_rounded(height * bucket.width, width)))
    else:
        scaled = (max(bucket.width, _divide_rounded(width * bucket.height, height)), bucket.height)
    return CropPlan(
        bucket,
        scaled[0],
        scaled[1],
        (scaled[0] - bucket.width) // 2,
        (scaled[1] - bucket.height) // 2,
    )


def _divide_rounded(dividend: int, divisor: int) -> int:
    """Nearest whole quotient, halves up."""
    return (2 * dividend + divisor) // (2 * divisor)
