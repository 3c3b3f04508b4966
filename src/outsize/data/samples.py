"""Samples: every picture at every resolution, as often as it counts, and the schedule over them.

A picture shown at three resolutions with two repeats is six samples, of which an epoch shows each once. Mirrored, a sample
is the same one with another latent: the schedule says for each draw which of both is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outsize.data.buckets import CropPlan, bucket_of, crop_plan
from outsize.data.manifest import Manifest
from outsize.data.schedule import Entry, Schedule


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture at one resolution. picture: its place in the manifest; crop: how it is brought to its bucket."""

    picture: int
    resolution: int
    crop: CropPlan


def samples_of(manifest: Manifest, resolutions: Sequence[int], multiple: int) -> tuple[Sample, ...]:
    """All samples, in the manifest's order; pictures that are smaller than a resolution are enlarged.

    multiple: of pixels that the image codec takes as one step.
    Raises: RecipeError for a resolution below it.
    """
    found: list[Sample] = []
    for index, picture in enumerate(manifest.pictures):
        size = (picture.width, picture.height)
        times = picture.repeats * manifest.set_of(picture).repeats
        for resolution in resolutions:
            crop = crop_plan(*size, bucket_of(*size, resolution, multiple))
            found += [Sample(index, resolution, crop)] * times
    return tuple(found)


def flips_of(manifest: Manifest, sample: Sample) -> tuple[bool, ...]:
    """In which forms a sample may be drawn: as it is (False), mirrored (True)."""
    flip = manifest.set_of(manifest.pictures[sample.picture]).flip
    return tuple(form for form, is_drawn in ((False, flip < 1), (True, flip > 0)) if is_drawn)


def make_schedule(
    manifest: Manifest,
    samples: Sequence[Sample],
    *,
    seed: int,
    batch: int = 1,
    accumulate: int = 1,
    caption_dropout: float = 0.0,
    held_out: Collection[int] = (),
) -> Schedule:
    """The schedule over samples, in their order, with the shares and flips of the manifest's sets.

    held_out: pictures, by their places in the manifest, that are never drawn.
    """
    entries = [Entry(manifest.pictures[one.picture].set_index, one.crop.bucket) for one in samples]
    return Schedule(
        seed,
        entries,
        batch=batch,
        accumulate=accumulate,
        caption_dropout=caption_dropout,
        shares=[item.share for item in manifest.sets],
        flips=[item.flip for item in manifest.sets],
        held_out=[index for index, one in enumerate(samples) if one.picture in held_out],
    )
