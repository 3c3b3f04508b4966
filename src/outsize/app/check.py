"""What a recipe of pictures will be trained on: counts by set, resolution, bucket and caption, and what is odd about it."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from outsize.app.pictures import samples_for, scan_recipe, schedule_for
from outsize.app.tasks.protocol import Checked, Table
from outsize.data.found import together
from outsize.data.held_out import held_out_pictures
from outsize.data.manifest import Manifest, Picture
from outsize.data.samples import Sample, flips_of
from outsize.data.scanning import with_trigger
from outsize.data.schedule import Schedule
from outsize.data.sheet import Section, draw_sheet
from outsize.recipes.recipe import Recipe

_FEW_WORDS = 3  # a caption of fewer tells next to nothing of its picture
_MUCH_CUT = Fraction(1, 4)  # of a picture's area


@dataclass(frozen=True, slots=True)
class _SetFacts:
    """One set. share: of all samples. seen: how often each of its pictures comes in the whole training, on average."""

    folder: str
    is_regularisation: bool
    pictures: int
    repeats: int
    share: float
    seen: float
    loss_weight: float
    flip: float
    captions: int
    without_caption: int
    masks: int
    latents: int
    left_out: int
    held_out: int


def check_pictures(recipe: Recipe, num_shown: int) -> Checked:
    """Everything about the recipe's pictures; nothing is encoded. num_shown: pictures of each set on the sheet.

    Raises: SourceError naming every fault.
    """
    manifest = scan_recipe(recipe)
    samples = samples_for(recipe, manifest)
    schedule = schedule_for(recipe, manifest, samples)
    sets = [_facts(recipe, manifest, samples, schedule, n) for n in range(len(manifest.sets))]
    buckets = _buckets(manifest, samples)
    notes = (*manifest.warnings, *_odd(recipe, manifest, samples))
    left_out = tuple(f"{one.origin}: {one.reason}" for one in manifest.left_out)
    facts = {
        "sets": [asdict(one) for one in sets],
        "buckets": buckets,
        "pictures": _pictures(manifest, samples),
        "warnings": list(notes),
        "left_out": list(left_out),
    }
    return Checked(
        (_sets_table(sets), _buckets_table(buckets)),
        facts,
        notes=notes,
        left_out=left_out,
        sheet=_sheet(recipe.name, manifest, samples, sets, num_shown) if num_shown else None,
    )


def _facts(
    recipe: Recipe, manifest: Manifest, samples: Sequence[Sample], schedule: Schedule, number: int
) -> _SetFacts:
    item = manifest.sets[number]
    found = [one for one in manifest.pictures if one.set_index == number]
    ours = [one for one in samples if manifest.pictures[one.picture].set_index == number]
    share = float(dict(schedule.shares).get(number, 0))
    drawn = recipe.train.steps * recipe.train.batch * recipe.train.accumulate * share
    held = held_out_pictures(manifest, recipe.pictures.held_out)
    num_held = sum(manifest.pictures[index].set_index == number for index in held)
    forms = {
        (manifest.pictures[one.picture].digest, one.crop, form)
        for one in ours
        for form in flips_of(manifest, one)
    }
    return _SetFacts(
        folder=str(item.folder),
        is_regularisation=item.is_regularisation,
        pictures=len(found),
        repeats=item.repeats,
        share=share,
        held_out=num_held,
        seen=drawn / (len(found) - num_held) if len(found) > num_held else 0.0,
        loss_weight=item.loss_weight,
        flip=item.flip,
        captions=len({one.caption for one in found}),
        without_caption=sum(not one.has_own_caption for one in found),
        masks=sum(one.mask is not None for one in found),
        latents=len(forms),
        left_out=sum(one.set_index == number for one in manifest.left_out),
    )


def _buckets(manifest: Manifest, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """How many pictures of each set go to each size, the largest first."""
    found = Counter(
        (manifest.pictures[one.picture].set_index, one.resolution, one.crop.bucket)
        for one in set(samples)
    )
    return [
        {
            "set": str(manifest.sets[number].folder),
            "resolution": side,
            "width": bucket.width,
            "height": bucket.height,
            "pictures": count,
        }
        for (number, side, bucket), count in sorted(
            found.items(), key=lambda pair: (pair[0][0], -pair[0][1], -pair[1], pair[0][2])
        )
    ]


def _pictures(manifest: Manifest, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Every picture with what becomes of it."""
    sizes: dict[int, list[str]] = {}
    for one in dict.fromkeys(samples):
        bucket = one.crop.bucket
        sizes.setdefault(one.picture, []).append(f"{bucket.width}x{bucket.height}")
    return [
        {
            "file": str(one.origin),
            "set": str(manifest.set_of(one).folder),
            "width": one.width,
            "height": one.height,
            "caption": one.caption,
            "has_own_caption": one.has_own_caption,
            "repeats": one.repeats * manifest.set_of(one).repeats,
            "loss_weight": one.weight * manifest.set_of(one).loss_weight,
            "mask": None if one.mask is None else str(one.mask.origin),
            "buckets": sizes[index],
        }
        for index, one in enumerate(manifest.pictures)
    ]


def _odd(recipe: Recipe, manifest: Manifest, samples: Sequence[Sample]) -> Iterator[str]:
    """What is allowed, and often not meant."""
    yield from _enlarged(manifest, samples)
    cut = {manifest.pictures[one.picture].origin: None for one in samples if _cut(one) > _MUCH_CUT}
    yield from together("more than a quarter is cut off", list(cut))
    bare = [one.origin for one in manifest.pictures if not one.has_own_caption]
    yield from together("no caption of its own: the trigger or default_caption stands in", bare)
    short = [one.origin for one in manifest.pictures if _says_little(manifest, one)]
    yield from together(f"the caption has fewer than {_FEW_WORDS} words", short)
    batch = recipe.train.batch
    counts = Counter((manifest.pictures[one.picture].set_index, one.crop.bucket) for one in samples)
    for (number, bucket), count in sorted(counts.items()):
        if count < batch:
            yield (
                f"{manifest.sets[number].folder}: {count} in the bucket {bucket.width} x {bucket.height}, fewer than the "
                f"batch of {batch}: they come several times in one batch, and as much less often"
            )


def _enlarged(manifest: Manifest, samples: Sequence[Sample]) -> Iterator[str]:
    """Pictures that are smaller than what they are shown at, by resolution."""
    by_side: dict[int, dict[Any, float]] = {}
    for one in samples:
        picture = manifest.pictures[one.picture]
        factor = one.crop.scaled_width / picture.width
        if one.crop.scaled_width > picture.width and one.crop.scaled_height > picture.height:
            by_side.setdefault(one.resolution, {})[picture.origin] = factor
    for side, factors in sorted(by_side.items()):
        worst = f"by up to {max(factors.values()):.2g}"
        yield from together(f"smaller than {side} px squared, enlarged {worst}", list(factors))


def _cut(sample: Sample) -> Fraction:
    """Which share of the picture's area the crop loses."""
    whole = sample.crop.scaled_width * sample.crop.scaled_height
    return 1 - Fraction(sample.crop.bucket.area, whole)


def _says_little(manifest: Manifest, picture: Picture) -> bool:
    """Whether a caption of its own has next to no words beside the trigger."""
    trigger = manifest.set_of(picture).trigger
    words = set(picture.caption.split()) - set(with_trigger("", trigger).split())
    words -= {f"{trigger},"}
    return picture.has_own_caption and len(words) < _FEW_WORDS


def _sets_table(sets: Sequence[_SetFacts]) -> Table:
    rows = tuple(
        (
            one.folder,
            "regularisation" if one.is_regularisation else "subject",
            str(one.pictures),
            str(one.repeats),
            f"{one.share:.1%}",
            f"{one.seen:.1f}",
            f"{one.loss_weight:g}",
            f"{one.flip:.0%}",
            str(one.captions),
            str(one.masks),
            str(one.latents),
            str(one.left_out),
            str(one.held_out),
        )
        for one in sets
    )
    heads = (
        "set", "kind", "pictures", "repeats", "share", "seen each", "loss weight", "mirrored", "captions",
        "masks", "latents", "left out", "held out",
    )  # fmt: skip
    return Table("What is learned from", heads, rows)


def _buckets_table(buckets: Sequence[dict[str, Any]]) -> Table:
    rows = tuple(
        (
            str(one["set"]),
            str(one["resolution"]),
            f"{one['width']} x {one['height']}",
            str(one["pictures"]),
        )
        for one in buckets
    )
    return Table("Sizes", ("set", "resolution", "bucket", "pictures"), rows)


def _sheet(
    name: str,
    manifest: Manifest,
    samples: Sequence[Sample],
    sets: Sequence[_SetFacts],
    num_shown: int,
) -> bytes:
    """Some pictures of each set at their largest size, at even distances, as PNG."""
    largest = {
        one.picture: one for one in samples
    }  # of a picture's samples the last is the largest
    sections = []
    for number, facts in enumerate(sets):
        ours = [
            one for one in largest.values() if manifest.pictures[one.picture].set_index == number
        ]
        count = min(num_shown, len(ours))
        chosen = [ours[i * len(ours) // count] for i in range(count)]
        kind = "regularisation" if facts.is_regularisation else "subject"
        some = f"{count} of {len(ours)} pictures" if count < len(ours) else f"{count} pictures"
        heading = f"{manifest.sets[number].folder.name} ({kind}): {some}, {facts.share:.0%} of all samples"
        sections.append(Section(heading, chosen))
    num_latents = sum(one.latents for one in sets)
    title = f"{name}: {len(manifest.pictures)} pictures, {num_latents} latents"
    buffer = io.BytesIO()
    draw_sheet(title, manifest, sections).save(buffer, "PNG")
    return buffer.getvalue()
