"""`outsize plan`: what a recipe costs on this machine or a stated one, before anything is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outsize.devices._profile import MachineProfile
    from outsize.plan.plan import Plan
    from outsize.recipes.recipe import Recipe


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="plan")(plan)


def plan(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    *,
    vram: Annotated[
        str | None, typer.Option("--vram", help="GPU memory to plan for, as in 8GiB; 0GiB: no GPU.")
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", help="RAM to plan for, as in 16GiB.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Name of the card to plan for.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as one JSON object.")
    ] = False,
) -> int:
    """Say what a recipe costs, by phase and owner, without opening anything; exit code 4 when it does not fit."""
    from outsize.app.planning import count_pictures
    from outsize.plan.planner import make_plan
    from outsize.recipes.load import load_recipe

    asked = load_recipe(recipe)
    made = make_plan(asked, _machine(asked, vram, ram, gpu), num_pictures=count_pictures(asked))
    if as_json:
        print(json.dumps(made.to_json(), indent=2, ensure_ascii=False))
    else:
        print_plan(made)
    made.require_fit()
    return 0


def print_plan(made: Plan) -> None:
    """The plan as tables and sentences."""
    from outsize.cli._tables import print_table
    from outsize.plan.report import headline, sentences, tables

    print(headline(made))
    for table in tables(made):
        print()
        print_table(table.title, table.heads, table.rows, words=(0, len(table.heads) - 1))
    print()
    for sentence in sentences(made):
        print(sentence)


def _machine(recipe: Recipe, vram: str | None, ram: str | None, gpu: str | None) -> MachineProfile:
    """This machine, or the stated one."""
    from outsize.base.units import parse_bytes
    from outsize.devices._profile import read_machine, stated

    here = read_machine(recipe.cache_folder())
    if vram is None and ram is None and gpu is None:
        return here
    sizes = [None if text is None else parse_bytes(text) for text in (vram, ram)]
    return stated(vram_bytes=sizes[0], ram_bytes=sizes[1], gpu=gpu, base=here)
