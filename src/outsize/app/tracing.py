"""Which files of a recipe, or of a folder, it is stated of where they come from: for each task a pair of functions."""

from __future__ import annotations

from pathlib import Path

from outsize.app.pictures import picture_set
from outsize.base.errors import SourceError
from outsize.data.found import PictureSet, files_below, is_picture
from outsize.data.origin import TABLES, Origin, table_columns
from outsize.data.provenance import Traced, traced
from outsize.data.scanning import find_pictures, list_faults
from outsize.data.text_files import data_files, find_files
from outsize.recipes.recipe import Recipe


def traced_pictures(recipe: Recipe) -> tuple[Traced, ...]:
    """Each picture that the recipe names; none of them is opened.

    Raises: SourceError naming what is wrong with folders, captions and manifests.
    """
    leaves_out = recipe.pictures.broken == "leave_out"
    return _of_sets(
        [picture_set(one) for one in recipe.pictures.sets], leaves_out_broken=leaves_out
    )


def pictures_in(folder: Path) -> tuple[Traced, ...]:
    """Each picture in a folder, whatever is said of it there; where there is none, those in its tables.

    Raises: SourceError for tables that cannot be read.
    """
    files = files_below(folder)
    if found := [path for name, path in files.items() if is_picture(name)]:
        return tuple(traced(folder, Origin(path)) for path in found)
    if _holds_tables_of_pictures(folder):
        return _of_sets([PictureSet(folder=folder)], leaves_out_broken=False)
    return ()


def traced_texts(recipe: Recipe) -> tuple[Traced, ...]:
    """Each file of texts that the recipe names.

    Raises: SourceError for a set that names none.
    """
    each = (
        traced(one.path, Origin(path))
        for one in recipe.texts.sets
        for path in find_files(one.path, one.split)
    )
    return tuple(dict.fromkeys(each))


def texts_in(folder: Path) -> tuple[Traced, ...]:
    """Each file of texts in a folder, of whatever split; none beside pictures, where texts are captions.

    Raises: SourceError for tables that cannot be read.
    """
    if any(map(is_picture, files_below(folder))) or _holds_tables_of_pictures(folder):
        return ()
    return tuple(traced(folder, Origin(folder / name)) for name in sorted(data_files(folder)))


def _of_sets(sets: list[PictureSet], *, leaves_out_broken: bool) -> tuple[Traced, ...]:
    findings = [(item, find_pictures(item)) for item in sets]
    if faults := [fault for _, found in findings for fault in found.faults]:
        raise SourceError(list_faults(faults, leaves_out_broken=leaves_out_broken))
    each = (traced(item.folder, one.origin) for item, found in findings for one in found.pictures)
    return tuple(dict.fromkeys(each))


def _holds_tables_of_pictures(folder: Path) -> bool:
    tables = (path for path in files_below(folder).values() if path.suffix.lower() in TABLES)
    return any("picture" in table_columns(path).values() for path in tables)
