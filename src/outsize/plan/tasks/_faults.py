"""What recipes of one task may not say: data of another kind, and settings that only other tasks read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce

from pydantic_core import PydanticUndefined

from outsize.recipes.data import kind_of_data
from outsize.recipes.recipe import Recipe
from outsize.recipes.section import Section
from outsize.recipes.yaml_tree import Fault


def wrong_data(recipe: Recipe, section: type[Section], noun: str) -> Iterator[Fault]:
    """Data of another kind than the base's family learns from. noun: what it learns from."""
    if not isinstance(recipe.data, section):
        yield Fault(
            None,
            "data",
            f"{recipe.base.family} learns from {noun}, so data has the keys {', '.join(section.model_fields)}; found "
            f"those of {kind_of_data(recipe.data)}",
        )


def unused(recipe: Recipe, paths: Iterable[str], noun: str) -> Iterator[Fault]:
    """Settings by dotted path that differ from their defaults though nothing reads them."""
    for path in paths:
        *parents, name = path.split(".")
        section: Section = reduce(getattr, parents, recipe)
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        assert default is not PydanticUndefined, f"{path} has a default"
        if getattr(section, name) != default:
            yield Fault(
                None, path, f"has no meaning for a base that learns from {noun}; leave it out"
            )
