"""From a YAML file to a Recipe, or to one RecipeError that names every fault with its line.

Relative paths are relative to the recipe file. A source is a path when it looks like one (begins with '.', '~' or a
root, ends in .safetensors) or when a file or folder of that name lies beside the recipe; otherwise it is a hub id.
Knows nothing of families and formats: their names are checked where the catalogues are known.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from outsize.base.catalogue import nearest
from outsize.base.errors import RecipeError
from outsize.recipes.data import DATA_KINDS
from outsize.recipes.recipe import Recipe
from outsize.recipes.section import Section, sections_in
from outsize.recipes.yaml_tree import Fault, Tree, parse_tree

# What a field must be, in words of people who write YAML; by pydantic's error type.
_MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping (key: value)",
    "path_type": "a path",
    "is_instance_of": "a path",
    "finite_number": "a finite number",
    "string_too_short": "a text that is not empty",
}


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file.

    Raises: RecipeError with every fault: file, line, what was found, what is allowed, the nearest real key.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise RecipeError(
            f"{path}: the recipe cannot be read: there is no such file; "
            "`outsize recipe --new FAMILY.VARIANT` prints one to start from"
        ) from error
    except OSError as error:
        what = "it is a folder; name the YAML file" if path.is_dir() else error.strerror
        raise RecipeError(f"{path}: the recipe cannot be read: {what}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8 text") from error
    return parse_recipe(text, file=str(path), folder=path.absolute().parent)


def parse_recipe(text: str, *, file: str, folder: Path) -> Recipe:
    """Read a recipe from text; `file` is named in faults, relative paths are relative to `folder`.

    Raises: RecipeError as load_recipe.
    """
    tree = parse_tree(text, file=file)
    return _resolve_paths(_validate(tree, origin=file), folder)


def recipe_from_json(value: Mapping[str, Any], *, origin: str) -> Recipe:
    """Read back what Recipe.to_json gave, as a run folder holds it.

    Raises: RecipeError naming origin and every fault.
    """
    return _validate(Tree(None, dict(value)), origin=origin)


def resolve_source(text: str, folder: Path) -> str:
    """An absolute path when the source names something on this machine, else the hub id unchanged."""
    path = Path(text).expanduser()
    looks_like_path = (
        text.startswith((".", "~")) or text.endswith(".safetensors") or path.is_absolute()
    )
    if looks_like_path or (folder / path).exists():
        return str((folder / path).absolute())
    return text


def raise_faults(faults: Iterable[Fault], *, origin: str) -> None:
    """Raise one RecipeError for all faults, in the order of the file; nothing when there are none."""
    listed = sorted(faults, key=lambda fault: fault.line or 0)
    if len(listed) == 1:
        raise RecipeError(f"{origin}: {listed[0]}")
    if listed:
        lines = "\n".join(f"  {fault}" for fault in listed)
        raise RecipeError(f"{origin}: {len(listed)} faults\n{lines}")


def _validate(tree: Tree, *, origin: str) -> Recipe:
    faults = list(tree.faults)
    recipe = None
    try:
        recipe = Recipe.model_validate(tree.value)
    except ValidationError as error:
        details = error.errors(include_url=False)
        faults += [_fault(tree, detail) for detail in details if not _is_consequence(detail)]
    raise_faults(faults, origin=origin)
    assert recipe is not None, "a recipe that is not valid has faults"
    return recipe


def _is_consequence(detail: ErrorDetails) -> bool:
    """Whether a list is called too short only because an item of it, named on its own, is wrong."""
    return detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]


def _fault(tree: Tree, detail: ErrorDetails) -> Fault:
    """One of pydantic's errors in our words."""
    location = detail["loc"]
    written = [part for place, part in enumerate(location) if not _is_kind(location, place)]
    line = tree.line_of(tuple(written))
    where = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in written
    ).lstrip(".")
    kind, message = detail["type"], detail["msg"]
    if kind == "extra_forbidden":
        section = _section_at(location[:-1])
        return Fault(
            line, where, f"unknown key; {nearest(str(location[-1]), section.model_fields)}"
        )
    if kind == "missing" and isinstance(location[-1], int):
        return Fault(
            line,
            where,
            f"missing; {_shown(detail['input'])} of {len(detail['input'])} is too short",
        )
    if kind == "missing":
        meaning = _section_at(location[:-1]).model_fields[str(location[-1])].description
        return Fault(line, where, f"missing; {meaning}")
    if kind == "value_error":
        said = message.removeprefix("Value error, ")
        if isinstance(
            detail["input"], dict | list | tuple
        ):  # several values, which it names itself
            return Fault(line, where, said)
        return Fault(line, where, f"found {_shown(detail['input'])}: {said}")
    return Fault(line, where, f"found {_shown(detail['input'])}, {_demand(location, detail)}")


def _demand(location: tuple[str | int, ...], detail: ErrorDetails) -> str:
    """What the value must be."""
    kind, message, context = detail["type"], detail["msg"], detail.get("ctx", {})
    if kind in {"model_type", "model_attributes_type"}:
        return f"must be a mapping with the keys {', '.join(_section_at(location).model_fields)}"
    if kind == "literal_error":
        expected = str(context["expected"])
        near = difflib.get_close_matches(
            str(detail["input"]), re.findall(r"'([^']*)'", expected), 1
        )
        return f"must be {expected}" + (f"; did you mean {near[0]!r}?" if near else "")
    if kind == "too_short":
        return f"must have at least {context['min_length']} of them"
    if kind == "too_long":
        return f"must have at most {context['max_length']} of them"
    if kind in _MUST_BE:
        return f"must be {_MUST_BE[kind]}"
    return message.replace("Input should be", "must be")


def _shown(value: object) -> str:
    """A value as it may stand in a message."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_kind(location: tuple[str | int, ...], place: int) -> bool:
    """Whether a part of a location is no key but the kind of data that was taken."""
    return location[:place] == ("data",) and location[place] in DATA_KINDS


def _section_at(location: tuple[str | int, ...]) -> type[Section]:
    """The part of the recipe at a place in it (the innermost one that is a section)."""
    section: type[Section] = Recipe
    for place, part in enumerate(location):
        if _is_kind(location, place):
            section = DATA_KINDS[str(part)]
            continue
        known = section.model_fields.get(str(part))
        if known is not None:
            section = next(iter(sections_in(known.annotation)), section)
    return section


def _resolve_paths(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with every path absolute."""

    def absolute(path: Path) -> Path:
        return (folder / path.expanduser()).absolute()

    components = {
        slot: choice.model_copy(
            update={
                name: resolve_source(named, folder)
                for name in ("source", "tokenizer")
                if (named := getattr(choice, name)) is not None
            }
        )
        for slot, choice in recipe.base.components.items()
    }
    base = {"source": resolve_source(recipe.base.source, folder), "components": components}
    return recipe.model_copy(
        update={
            "base": recipe.base.model_copy(update=base),
            "data": _with_paths(recipe.data, absolute),
            "adapter": _with_paths(recipe.adapter, absolute),
            "runs": absolute(recipe.runs),
            "cache": None if recipe.cache is None else absolute(recipe.cache),
        }
    )


def _with_paths(value: Any, change: Callable[[Path], Path]) -> Any:
    """A part of the recipe with every path in it changed."""
    if isinstance(value, Path):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_with_paths(one, change) for one in value)
    if isinstance(value, Section):
        update = {name: _with_paths(one, change) for name, one in value}
        return value.model_copy(update=update)
    return value
