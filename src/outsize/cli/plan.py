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
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", help='Card to plan for, as in "RTX 4090"; its memory unless --vram says.'
        ),
    ] = None,
    disk_rate: Annotated[
        str | None, typer.Option("--disk-rate", help="What the disk reads in a second, as in 3GB.")
    ] = None,
    bus_rate: Annotated[
        str | None,
        typer.Option("--bus-rate", help="What reaches the card in a second, as in 24GB."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as one JSON object.")
    ] = False,
) -> int:
    """Say what a recipe costs in bytes and seconds, without opening anything; exit code 4 when it does not fit."""
    from outsize.app.planning import plan_for
    from outsize.plan.names import check_names
    from outsize.recipes.load import load_recipe

    asked = load_recipe(recipe)
    check_names(asked, origin=str(recipe))
    rates = {"disk_read_bytes_per_s": disk_rate, "bus_bytes_per_s": bus_rate}
    stated = {name: float(_rate(text)) for name, text in rates.items() if text is not None}
    made = plan_for(asked, _machine(asked, vram, ram, gpu), stated)
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
    from outsize.devices._rates import require_card

    here = read_machine(recipe.cache_folder())
    if vram is None and ram is None and gpu is None:
        return here
    vram_bytes, ram_bytes = (None if text is None else parse_bytes(text) for text in (vram, ram))
    if gpu is not None:
        card = require_card(gpu)
        vram_bytes = card.vram_bytes if vram_bytes is None else vram_bytes
        gpu = card.name
    return stated(vram_bytes=vram_bytes, ram_bytes=ram_bytes, gpu=gpu, base=here)


def _rate(text: str) -> int:
    """Bytes per second, the "/s" left out or not."""
    from outsize.base.units import parse_bytes

    return parse_bytes(text.removesuffix("/s"))
