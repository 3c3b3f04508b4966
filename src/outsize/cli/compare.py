"""`outsize compare`: the same prompts and seeds by the base and by the adapter, side by side."""

from __future__ import annotations

import typer

from outsize.cli._site import (
    DEFAULT_RAM,
    DeviceOption,
    OfflineOption,
    RamOption,
    RunArgument,
    VramLimitOption,
    open_site,
    recipe_and_run,
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare)


def compare(
    run: RunArgument,
    *,
    ram: RamOption = DEFAULT_RAM,
    device: DeviceOption = None,
    vram_limit: VramLimitOption = None,
    offline: OfflineOption = False,
) -> int:
    """Draw a labelled grid of base and adapter, with control prompts, and measure how far they are apart."""
    from outsize.app.trained import trained_checkpoint

    recipe, folder = recipe_and_run(run)
    trained_checkpoint(recipe, folder)  # a run without one is told so at once
    with open_site(
        recipe, folder, ram=ram, device=device, offline=offline, vram_limit=vram_limit
    ) as site:
        from outsize.app.compare import compare as compare_site
        from outsize.cli._tables import print_stages, print_table

        made = compare_site(site, folder)
        rows = [("prompts", f"{made.subject.rms:.2f}", f"{made.subject.changed:.1%}")]
        if made.control is not None:
            rows.append(("controls", f"{made.control.rms:.2f}", f"{made.control.changed:.1%}"))
        print_table("Base against adapter", ("pictures", "rms (0..255)", "pixels changed"), rows)
        print_stages(site.stages.finished)
        print(f"grid: {made.grid}")
    return 0
