"""`outsize recipe`: explain every field, write a first recipe, check a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="recipe")(recipe)


def recipe(
    file: Annotated[Path | None, typer.Argument(help="A recipe file to check.")] = None,
    *,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print every field with its meaning and default.")
    ] = False,
    new: Annotated[
        str | None,
        typer.Option(
            "--new", metavar="FAMILY.VARIANT", help="Print a commented recipe to start from."
        ),
    ] = None,
) -> int:
    """Explain what a recipe may say, print one to start from, or check a file."""
    from outsize.base.errors import RecipeError

    if (file is not None) + explain + (new is not None) != 1:
        raise RecipeError(
            "outsize recipe takes one of: a FILE to check, --explain, --new FAMILY.VARIANT"
        )
    if explain:
        print(_explained(), end="")
    elif new is not None:
        print(new_recipe(new), end="")
    else:
        assert file is not None
        print(_checked(file))
    return 0


def new_recipe(wanted: str) -> str:
    """The commented example of a variant; where none is written, one made from the fields' own descriptions.

    Raises: RecipeError when there is no such family or variant.
    """
    from outsize.plan.names import TASKS, check_variant
    from outsize.recipes.explain import explain

    family, _, variant = wanted.partition(".")
    found = check_variant(family, variant)
    example = _examples_folder() / f"{family}-{variant}.yaml"
    if example.is_file():
        return example.read_text(encoding="utf-8")
    values = {
        "name": f"my-{family}-{variant}",
        "base.family": family,
        "base.variant": variant,
        "base.source": "./model",
        **TASKS.load(found.objective).example,
    }
    return (
        "# Made from the descriptions of all fields; leave out what you do not change.\n"
        + explain(values)
    )


def _explained() -> str:
    from outsize.recipes.explain import explain

    return explain()


def _checked(file: Path) -> str:
    """A line that says the file is right.

    Raises: RecipeError with every fault.
    """
    from outsize.plan.names import check_names
    from outsize.recipes.load import load_recipe

    loaded = load_recipe(file)
    check_names(loaded, origin=str(file))
    return f"{file}: a recipe for {loaded.base.family}.{loaded.base.variant}, digest {loaded.digest()[:12]}"


def _examples_folder() -> Path:
    """Where examples lie: inside an installed package, or beside src in a checkout."""
    import outsize

    package = Path(outsize.__file__).parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parents[1] / "examples"
