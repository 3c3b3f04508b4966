"""What makes an order the one it is: recipe, base, data and seed. No torch is needed.

The data's files count with every byte. A base's files count by name, size and time of change, since hashing 64 GB is not a
matter of a moment, and one of the hub by its name and revision; training itself goes by the base's content.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outsize.base.errors import SourceError
from outsize.base.files import file_digest, json_digest
from outsize.recipes.recipe import Recipe
from outsize.recipes.section import Section
from outsize.runs.orders import Order, Orders


def add_order(orders: Orders, recipe: Recipe) -> tuple[Order, bool]:
    """Queue a recipe, unless the same order is known; whether it is new.

    Raises: SourceError when a file of the data cannot be read; RecipeError as Orders.add.
    """
    return orders.add(recipe.name, recipe.run_folder(), recipe.to_json(), identity_of(recipe))


def identity_of(recipe: Recipe) -> dict[str, str]:
    """Digests by what they are of."""
    choices = [recipe.base.source, recipe.base.revision] + [
        text
        for slot in sorted(recipe.base.components)
        for one in [recipe.base.components[slot]]
        for text in (slot, one.source, one.revision, one.tokenizer)
    ]
    places = sorted(set(_paths(recipe.data)))
    try:
        return {
            "recipe": recipe.digest(),
            "base": json_digest([[text, _stamps(Path(text)) if text else []] for text in choices]),
            "data": json_digest([[str(one), _contents(one)] for one in places]),
            "seed": str(recipe.train.seed),
        }
    except OSError as error:
        raise SourceError(f"the order's files cannot be read: {error}") from error


def _paths(value: Any) -> Iterator[Path]:
    """Every path in a part of a recipe."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _paths(one)
    elif isinstance(value, Section):
        for _, one in value:
            yield from _paths(one)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def _stamps(path: Path) -> list[list[Any]]:
    if not path.is_absolute():  # of the hub
        return []
    found = [(one, one.stat()) for one in _files(path)]
    return [[str(one.relative_to(path)), stat.st_size, stat.st_mtime_ns] for one, stat in found]


def _contents(path: Path) -> list[list[str]]:
    return [[one.relative_to(path).as_posix(), file_digest(one)] for one in _files(path)]
