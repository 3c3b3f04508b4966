"""`outsize import`: another program's file as a recipe, with what became of every key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.errors import RecipeError

if TYPE_CHECKING:
    from outsize.recipes.importers.protocol import Imported


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("import")(import_file)


def import_file(
    file: Annotated[
        Path,
        typer.Argument(
            help="A job of ai-toolkit (YAML), or a dataset file of musubi-tuner or sd-scripts (TOML).",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The recipe to write; left out: NAME.yaml here.", show_default=False
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="FAMILY.VARIANT, where the file does not say which base it is for.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", help="Weights of the base, in place of the file's own.", show_default=False
        ),
    ] = None,
) -> int:
    """Write the recipe that another program's file describes, and say what became of each of its keys.

    Nothing is passed over: a key means the same, means something else, is left out for a reason, or decides nothing. The
    table is in the recipe as well. Where the file's program has other defaults, these are written out.
    """
    from outsize.plan.names import check_names
    from outsize.recipes.importers._file import as_yaml, read_values
    from outsize.recipes.importers.protocol import Asked, importer_of
    from outsize.recipes.load import parse_recipe

    values = read_values(file)
    importer = importer_of(values, str(file))
    made = importer.read(values, Asked(file.stem, base, source))
    missing = [key for key in ("family", "variant", "source") if not made.recipe["base"].get(key)]
    if missing:
        raise RecipeError(
            f"{file} does not say which base it is for; name it by --base FAMILY.VARIANT and --source WEIGHTS"
        )
    target = out or Path(f"{made.recipe['name']}.yaml")
    if target.exists():
        raise RecipeError(f"{target} is already there; name another file by --out")
    text = as_yaml(made, file_name=file.name)
    origin = f"the recipe made of {file}"
    recipe = parse_recipe(text, file=origin, folder=target.absolute().parent)
    check_names(recipe, origin=origin)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    _tell(made, target)
    return 0


def _tell(made: Imported, target: Path) -> None:
    from collections import Counter

    from outsize.cli._tables import print_table
    from outsize.recipes.importers._file import shown

    rows = [(row.verdict, row.where, shown(row), row.how) for row in made.rows]
    heads = ("", "key", "value", "here")
    print_table(f"What became of the keys of {made.program}", heads, rows, words=range(4))
    counts = Counter(row.verdict for row in made.rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f": {target}")
