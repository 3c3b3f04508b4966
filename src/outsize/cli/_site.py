"""From the arguments that several commands share to a site and a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.errors import RecipeError
from outsize.base.threads import settle_threads

if TYPE_CHECKING:
    from outsize.app.site import Site
    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder

RecipeArgument = Annotated[
    Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)
]
RunArgument = Annotated[
    Path, typer.Argument(help="A run folder, or the recipe of the run.", show_default=False)
]
RamOption = Annotated[
    str, typer.Option("--ram", help="Host memory that preparing may take, as in 4GiB.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="cuda, rocm or cpu; left out: the best one present.", show_default=False
    ),
]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Ask nothing of the network (as HF_HUB_OFFLINE=1).")
]
DEFAULT_RAM = "2GiB"


def recipe_and_run(path: Path) -> tuple[Recipe, RunFolder]:
    """The recipe that a path names (a YAML file, or a run folder that holds one), and its run folder.

    Raises: RecipeError when it is neither.
    """
    from outsize.recipes.load import load_recipe, recipe_from_json
    from outsize.runs.folder import RunFolder

    if path.is_dir():
        run = RunFolder(path)
        if not run.recipe.exists():
            raise RecipeError(
                f"{path} is no run folder: it holds no {run.recipe.name}; name a recipe file, or a folder below runs/"
            )
        text = run.recipe.read_text(encoding="utf-8")
        return recipe_from_json(json.loads(text), origin=str(run.recipe)), run
    recipe = load_recipe(path)
    return recipe, RunFolder(recipe.run_folder())


@contextmanager
def open_site(
    recipe: Recipe,
    run: RunFolder,
    *,
    ram: str,
    device: str | None,
    offline: bool,
    must_fit: bool = True,
) -> Iterator[Site]:
    """A site whose progress goes to the terminal.

    The plan is made and judged before torch is imported. must_fit: refuse a recipe that does not fit the machine.
    Raises: DoesNotFit; MachineFault when another process works in the run folder.
    """
    from outsize.app.planning import plan_here, plan_on

    plan = plan_here(recipe, device_kind=device)
    if must_fit:
        plan.require_fit()
    settle_threads()
    from outsize.app.site import open_site as open_in_app
    from outsize.base.units import parse_bytes
    from outsize.cli._progress import open_progress
    from outsize.devices.protocol import open_device

    opened = open_device(device)
    plan = plan_on(recipe, opened, plan)
    if must_fit:
        plan.require_fit()
    with (
        open_progress() as progress,
        open_in_app(
            recipe, run, plan, opened, progress, ram_bytes=parse_bytes(ram), offline=offline
        ) as site,
    ):
        yield site
