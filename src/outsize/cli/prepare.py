"""`outsize prepare`: make the stores that a recipe needs, within a budget of host memory."""

from __future__ import annotations

from typing import Annotated

import typer

from outsize.cli._site import (
    DEFAULT_RAM,
    DeviceOption,
    OfflineOption,
    RamOption,
    RecipeArgument,
    open_site,
    recipe_and_run,
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("prepare")(prepare)


def prepare(
    recipe: RecipeArgument,
    *,
    ram: RamOption = DEFAULT_RAM,
    device: DeviceOption = None,
    offline: OfflineOption = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every byte of the stores, not only what changed.")
    ] = False,
) -> int:
    """Quantise the base and its encoders to disk, once; a second call finds them there."""
    from outsize.base.units import format_bytes

    chosen, run = recipe_and_run(recipe)
    with open_site(chosen, run, ram=ram, device=device, offline=offline, must_fit=False) as site:
        for slot in site.parts:
            store = site.store(slot)
            if verify:
                store.verify(full=True)
            print(f"{slot}: {format_bytes(store.nbytes)} in {store.folder}")
    return 0
