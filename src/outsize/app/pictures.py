"""The pictures of a recipe: found, scanned, counted, and joined into samples and a schedule; without torch.

What is encoded of them is encode.py's, what is told of them check.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from outsize.app.tasks.protocol import Preview, Shown, Table
from outsize.base.errors import SourceError
from outsize.data.found import PictureSet
from outsize.data.held_out import held_out_pictures
from outsize.data.manifest import Manifest
from outsize.data.origin import TABLES
from outsize.data.samples import Sample, make_schedule, samples_of
from outsize.data.scanning import find_pictures, scan
from outsize.data.schedule import Schedule
from outsize.families.protocol import FAMILIES, ImageCodec
from outsize.plan.names import components_of
from outsize.recipes import pictures as asked
from outsize.recipes.recipe import Recipe


def picture_set(one: asked.PictureSet) -> PictureSet:
    """A set of the recipe as it is scanned."""
    return PictureSet(**(one.model_dump() | {"background": one.background_rgb}))


def scan_recipe(recipe: Recipe) -> Manifest:
    """All pictures of the recipe, read and hashed.

    Raises: SourceError naming every fault.
    """
    return scan(
        [picture_set(one) for one in recipe.pictures.sets],
        facts_file=recipe.cache_folder() / "pictures.json",
        leaves_out_broken=recipe.pictures.broken == "leave_out",
    )


def samples_for(recipe: Recipe, manifest: Manifest) -> tuple[Sample, ...]:
    """Every picture at every resolution of the recipe, in sizes that its image codec takes."""
    (part,) = (one for one in components_of(recipe) if one.kind == "image")
    codec = cast("ImageCodec", FAMILIES.load(part.family))
    return samples_of(manifest, recipe.pictures.resolutions, codec.pixel_multiple(part.variant))


def schedule_for(recipe: Recipe, manifest: Manifest, samples: Sequence[Sample]) -> Schedule:
    """Which samples each step trains on."""
    return make_schedule(
        manifest,
        samples,
        seed=recipe.train.seed,
        batch=recipe.train.batch,
        accumulate=recipe.train.accumulate,
        caption_dropout=recipe.pictures.caption_dropout,
        held_out=held_out_pictures(manifest, recipe.pictures.held_out),
    )


def count_pictures(recipe: Recipe) -> tuple[int, ...] | None:
    """Pictures that each set names, none of them opened; None when they are not there, or cannot be counted."""
    try:
        return tuple(_count(picture_set(one)) for one in recipe.pictures.sets)
    except SourceError:
        return None


def missing_places(recipe: Recipe) -> list[str]:
    """Folders and manifests that the recipe names and that are not there, each with what it should be."""
    found = []
    for one in recipe.pictures.sets:
        is_table = one.folder.suffix.lower() in TABLES and one.folder.is_file()
        if not (one.folder.is_dir() or is_table):
            found.append(f"no such folder of pictures: {one.folder}")
        if one.manifest is not None and not one.manifest.is_file():
            found.append(f"no such manifest: {one.manifest}")
        if one.masks is not None and not one.masks.is_dir():
            found.append(f"no such folder of masks: {one.masks}")
    return found


def preview_pictures(recipe: Recipe, num_samples: int) -> Preview:
    """Pictures and captions by set; some captions are shown."""
    manifest = scan_recipe(recipe)
    by_set = [
        [one for one in manifest.pictures if one.set_index == number]
        for number in range(len(manifest.sets))
    ]
    rows = tuple(
        (item.folder.name, str(len(found)), str(len({one.caption for one in found})))
        for item, found in zip(manifest.sets, by_set, strict=True)
    )
    shown = tuple(
        Shown(f"{one.origin}: {one.width} x {one.height}", ((one.caption, False),))
        for found in by_set
        for one in found[:num_samples]
    )
    table = Table("What is learned from", ("set", "pictures", "captions"), rows)
    return Preview(table, shown, manifest.warnings)


def _count(item: PictureSet) -> int:
    """Raises: SourceError when the set cannot be counted."""
    found = find_pictures(item)
    if not found.pictures:
        raise SourceError("; ".join(found.faults))
    return len({one.origin for one in found.pictures})
