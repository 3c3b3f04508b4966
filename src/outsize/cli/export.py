"""`outsize export`: a run's adapter as other programs read it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outsize.cli._site import RunArgument, recipe_and_run


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export")(export)


def export(
    run: RunArgument,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="comfyui, kohya, diffusers, diffusion_model (ComfyUI and diffusers) or peft (a folder); left out: what most "
            "programs read.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File or folder to write; left out: export/ in the run folder.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Write the newest checkpoint's adapter, and prove it by reading it back."""
    from outsize.app.export import export_run, place_of
    from outsize.app.tasks.protocol import task_of
    from outsize.base.units import format_bytes

    recipe, folder = recipe_and_run(run)
    dialect = to or task_of(recipe).dialect
    chosen = target or place_of(recipe, folder, dialect)
    given = export_run(recipe, folder, dialect, chosen)
    made = given.exported
    print(
        f"{made.num_modules} modules, {format_bytes(made.num_bytes)}, largest difference after reading "
        f"back {made.max_difference:g}: {chosen}"
    )
    if given.named_for is not None:
        print(f"modules are named as in {given.named_for}")
    for module in made.silent:
        print(f"warning: the delta of {module} is zero")
    return 0
