"""`outsize sample`: pictures or text from a run's adapter, or from its base alone."""

from __future__ import annotations

from typing import Annotated

import typer

from outsize.base.errors import RecipeError
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


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sample")(sample)


def sample(
    run: RunArgument,
    *,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt", "-p", help="What to draw or to answer; may be given several times."
        ),
    ],
    seed: Annotated[list[int] | None, typer.Option("--seed", help="Seeds; left out: 0.")] = None,
    base: Annotated[bool, typer.Option("--base", help="Leave the adapter out.")] = False,
    adapter: AdapterOption = None,
    ram: RamOption = DEFAULT_RAM,
    device: DeviceOption = None,
    vram_limit: VramLimitOption = None,
    offline: OfflineOption = False,
) -> int:
    """Draw or answer prompts with the run's adapter, by the recipe's compare settings, into samples/ of the run folder."""
    from outsize.app.tasks.protocol import Ask, task_of
    from outsize.app.trained import trained_checkpoint

    recipe, folder = recipe_and_run(run)
    if base and adapter:
        raise RecipeError("--base leaves every adapter out; name one or the other")
    worn = worn_by(recipe, adapter)
    if not base and worn is None:
        trained_checkpoint(recipe, folder)  # a run without one is told so at once
    with open_site(
        recipe, folder, ram=ram, device=device, offline=offline, vram_limit=vram_limit
    ) as site:
        wear(site, worn)
        asks = [Ask(text, number) for text in prompt for number in seed or [0]]
        for one in task_of(recipe).sample(site, folder, asks, with_adapter=not base):
            if one.text is not None:
                print(one.text)
            print(one.path)
    return 0
