"""`outsize compare`: the same prompts and seeds by the base and by the adapter, side by side; pictures or text."""

from __future__ import annotations

import typer

from outsize.cli._site import (
    DEFAULT_RAM,
    AdapterOption,
    DeviceOption,
    OfflineOption,
    RamOption,
    RunArgument,
    VramLimitOption,
    open_site,
    recipe_and_run,
    wear,
    worn_by,
)
from outsize.cli.report import refresh_report


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare)


def compare(
    run: RunArgument,
    *,
    adapter: AdapterOption = None,
    ram: RamOption = DEFAULT_RAM,
    device: DeviceOption = None,
    vram_limit: VramLimitOption = None,
    offline: OfflineOption = False,
) -> int:
    """Lay base and adapter side by side, with control prompts, and measure how far they are apart."""
    from outsize.app.tasks.protocol import task_of
    from outsize.app.trained import trained_checkpoint

    recipe, folder = recipe_and_run(run)
    worn = worn_by(recipe, adapter)
    if worn is None:
        trained_checkpoint(recipe, folder)  # a run without one is told so at once
    with open_site(
        recipe, folder, ram=ram, device=device, offline=offline, vram_limit=vram_limit
    ) as site:
        wear(site, worn)
        from outsize.cli._tables import print_stages, print_table

        made = task_of(recipe).compare(site, folder)
        table = made.table
        print_table(table.title, table.heads, table.rows, words=table.words)
        print_stages(site.stages.finished)
        for label, path in made.shown:
            print(f"{label}: {path}")
    refresh_report(folder)
    return 0
