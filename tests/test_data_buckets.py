"""Aspect buckets and crops: whole-number geometry, checked as properties."""

from __future__ import annotations

from fractions import Fraction

import pytest
from data_support import UNHURRIED
from hypothesis import given
from hypothesis import strategies as st

from outsize.base.errors import RecipeError
from outsize.data.buckets import (
    ASPECT_LIMIT,
    Bucket,
    aspect_distance,
    bucket_of,
    buckets_at,
    crop_plan,
)

SIDES = st.integers(1, 5000)
GRIDS = st.tuples(st.integers(1, 40), st.sampled_from([8, 16, 32])).map(
    lambda pair: (pair[0] * pair[1] + pair[0] % 3, pair[1])
)


@UNHURRIED
@given(GRIDS)
def test_every_bucket_is_a_multiple_within_the_area_and_the_aspect_limit(
    grid: tuple[int, int],
) -> None:
    resolution, multiple = grid
    buckets = buckets_at(resolution, multiple)
    for bucket in buckets:
        assert bucket.width % multiple == bucket.height % multiple == 0
        assert bucket.area <= resolution**2
        assert (bucket.width + multiple) * bucket.height > resolution**2 or (
            bucket.width + multiple > ASPECT_LIMIT * bucket.height
        ), "a bucket uses the area it has"
        assert max(bucket.width, bucket.height) <= ASPECT_LIMIT * min(bucket.width, bucket.height)
    assert {(b.height, b.width) for b in buckets} == {(b.width, b.height) for b in buckets}
    side = resolution // multiple * multiple
    assert Bucket(side, side) in buckets


def test_buckets_at_usual_resolutions_lose_little_area() -> None:
    for resolution in (512, 768, 1024):
        worst = min(bucket.area for bucket in buckets_at(resolution, 16))
        # A side is cut by less than 16 px; the shorter side is at least resolution / sqrt(3).
        assert worst > resolution**2 * (1 - 16 * 3**0.5 / resolution)


@UNHURRIED
@given(SIDES, SIDES, GRIDS)
def test_a_picture_goes_to_the_bucket_of_the_nearest_aspect(
    width: int, height: int, grid: tuple[int, int]
) -> None:
    bucket = bucket_of(width, height, *grid)
    aspect = Fraction(width, height)

    def difference(other: Bucket) -> Fraction:
        ratio = Fraction(other.width, other.height) / aspect
        return max(ratio, 1 / ratio)

    assert difference(bucket) == min(map(difference, buckets_at(*grid)))
    assert aspect_distance(width, height, bucket) == difference(bucket)


@UNHURRIED
@given(SIDES, SIDES, GRIDS)
def test_the_crop_lies_centred_inside_the_scaled_picture_and_touches_two_sides(
    width: int, height: int, grid: tuple[int, int]
) -> None:
    crop = crop_plan(width, height, bucket_of(width, height, *grid))
    left, top, right, bottom = crop.box
    assert 0 <= left <= right <= crop.scaled_width
    assert 0 <= top <= bottom <= crop.scaled_height
    assert (right - left, bottom - top) == (crop.bucket.width, crop.bucket.height)
    assert left == 0 or top == 0, "never cut on both axes: that would zoom in"
    assert 0 <= (crop.scaled_width - right) - left <= 1
    assert 0 <= (crop.scaled_height - bottom) - top <= 1


@UNHURRIED
@given(SIDES, SIDES, GRIDS)
def test_scaling_keeps_the_aspect_to_half_a_pixel(
    width: int, height: int, grid: tuple[int, int]
) -> None:
    crop = crop_plan(width, height, bucket_of(width, height, *grid))
    if crop.scaled_width == crop.bucket.width:
        exact = Fraction(height * crop.scaled_width, width)
        assert abs(crop.scaled_height - exact) <= Fraction(1, 2)
    else:
        exact = Fraction(width * crop.scaled_height, height)
        assert abs(crop.scaled_width - exact) <= Fraction(1, 2)


def test_a_small_picture_is_enlarged_to_the_resolution() -> None:
    assert bucket_of(64, 64, 512, 16) == Bucket(512, 512)


def test_a_resolution_below_the_multiple_is_refused_with_both_numbers() -> None:
    with pytest.raises(RecipeError, match=r"resolution 8 px is below the 16 px"):
        buckets_at(8, 16)
