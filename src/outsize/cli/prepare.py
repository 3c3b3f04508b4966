"""`outsize prepare`: make the stores that a recipe needs, within a budget of host memory."""

from __future__ import annotations

from typing import Annotated

import typer

from outsize.base.units import format_bytes
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
    from outsize.app.stores import Stores

    chosen, run = recipe_and_run(recipe)
    stores = Stores(chosen, offline)
    found = {slot: stores.existing(slot) for slot in stores.parts}
    ready = {slot: store for slot, store in found.items() if store is not None}
    if len(ready) < len(found):  # only now is torch imported
        with open_site(
            chosen, run, ram=ram, device=device, offline=offline, must_fit=False
        ) as site:
            stored = {slot: site.store(slot) for slot in site.parts}
    else:
        stored = ready
    for slot, store in stored.items():
        if verify:
            store.verify(full=True)
        how = "there already" if slot in ready else "prepared"
        print(f"{slot}: {how}, {format_bytes(store.nbytes)} in {store.folder}")
    return 0
