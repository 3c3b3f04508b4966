"""`outsize prepare`: make the stores that a recipe needs, within a budget of host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.units import format_bytes, format_seconds
from outsize.cli._site import (
    DEFAULT_RAM,
    DeviceOption,
    OfflineOption,
    RamOption,
    RecipeArgument,
    open_site,
    recipe_and_run,
)

if TYPE_CHECKING:
    from outsize.app.prepare import Figures


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
            figures = site.stores.figures
    else:
        stored, figures = ready, {}
    for slot, store in stored.items():
        if verify:
            store.verify(full=True)
        how = "there already" if slot in ready else "prepared"
        print(f"{slot}: {how}, {format_bytes(store.nbytes)} in {store.folder}")
        if slot in figures:
            print(f"  {_told(figures[slot])}")
            if figures[slot].adopted:
                print(f"  {figures[slot].adopted}")
    return 0


def _told(figures: Figures) -> str:
    """What preparing took, on one line."""
    rate = figures.source_bytes / max(figures.seconds, 1e-3) / 1e9
    return (
        f"{format_seconds(figures.seconds)} for {format_bytes(figures.source_bytes)} of source, {rate:.2f} GB/s; peak "
        f"{format_bytes(figures.peak_private_bytes)} private (+{format_bytes(figures.growth_bytes)}), "
        f"{format_bytes(figures.peak_device_bytes)} on the device"
    )
