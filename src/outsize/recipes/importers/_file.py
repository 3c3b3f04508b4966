"""A file of another program as plain values, and an imported recipe as the YAML that people go on with."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from outsize.base.errors import RecipeError
from outsize.recipes.importers.protocol import Imported, Row
from outsize.recipes.load import raise_faults
from outsize.recipes.recipe import Recipe
from outsize.recipes.yaml_tree import parse_tree

_WIDTH = 98
_LONGEST = 60  # characters of a value that a row shows
_HEAD = """\
Made by `outsize import` of {name}, a file of {program}. Relative paths are now relative to this file.
What became of its keys:"""


def read_values(path: Path) -> dict[str, Any]:
    """A YAML, JSON or TOML file.

    Raises: RecipeError when it cannot be read, is none of them, or names a key twice.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8 text") from error
    if path.suffix.lower() == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"{path}: not readable as TOML: {error}") from error
    tree = parse_tree(text, file=str(path))
    raise_faults(tree.faults, origin=str(path))
    if not isinstance(tree.value, Mapping):
        raise RecipeError(f"{path}: holds no keys, so it is no file of another program")
    return dict(tree.value)


def as_yaml(made: Imported, *, file_name: str) -> str:
    """The recipe, with what became of every key as comments above."""
    head = _HEAD.format(name=file_name, program=made.program)
    lines = [f"# {line}" for line in head.splitlines()]
    for row in made.rows:
        text = f"{row.verdict}: {row.where}: {shown(row)} -> {row.how}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    ordered = {key: made.recipe[key] for key in Recipe.model_fields if key in made.recipe}
    body = yaml.safe_dump(
        {**ordered, **made.recipe}, sort_keys=False, allow_unicode=True, width=_WIDTH
    )
    return "\n".join(lines) + "\n\n" + body


def shown(row: Row) -> str:
    """A row's value on one line."""
    text = json.dumps(row.value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
