"""`outsize sample`: pictures from a run's adapter, or from its base alone."""

from __future__ import annotations

from typing import Annotated

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
    app.command("sample")(sample)


def sample(
    run: RunArgument,
    *,
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="What to draw; may be given several times.")
    ],
    seed: Annotated[list[int] | None, typer.Option("--seed", help="Seeds; left out: 0.")] = None,
    base: Annotated[bool, typer.Option("--base", help="Leave the adapter out.")] = False,
    ram: RamOption = DEFAULT_RAM,
    device: DeviceOption = None,
    vram_limit: VramLimitOption = None,
    offline: OfflineOption = False,
) -> int:
    """Draw prompts with the run's adapter, by the recipe's compare settings, into samples/ of the run folder."""
    from outsize.app.trained import trained_checkpoint

    recipe, folder = recipe_and_run(run)
    if not base:
        trained_checkpoint(recipe, folder)  # a run without one is told so at once
    with open_site(
        recipe, folder, ram=ram, device=device, offline=offline, vram_limit=vram_limit
    ) as site:
        from outsize.app.render import Shot, render, save_samples, settings_of

        shots = [Shot(text, number) for text in prompt for number in seed or [0]]
        pictures = render(site, folder, shots, settings_of(site), with_adapter=not base)
        for path in save_samples(folder, shots, pictures):
            print(path)
    return 0
