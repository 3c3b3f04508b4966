"""`outsize resize`: an adapter of lower rank, with what was lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli._site import names_a_run, recipe_and_run

if TYPE_CHECKING:
    from outsize.app.resize import Resized

_NUM_SHOWN = 8  # modules that lost most


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("resize")(resize)


def resize(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run folder or its recipe, or an adapter's file or folder of any program.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option("--out", help="File to write, or for peft a new folder.", show_default=False),
    ],
    rank: Annotated[
        int | None, typer.Option("--rank", help="Of every module at most.", show_default=False)
    ] = None,
    energy: Annotated[
        float | None,
        typer.Option(
            "--energy",
            help="The smallest rank of each module that keeps this share of its delta's squared norm, as in 0.99.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", help="Dialect; left out: the file's own, or as export.", show_default=False
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="FAMILY.VARIANT that a file is of; left out: as its modules tell.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Write the nearest adapter of a lower rank, found by the singular values of the deltas, and say what is lost."""
    from outsize.app.resize import Target, resize_file, resize_run

    target = Target(rank, energy, to, out)
    if names_a_run(source):
        _tell(resize_run(*recipe_and_run(source), target), out)
    else:
        _tell(resize_file(source, base, target), out)
    return 0


def _tell(made: Resized, out: Path) -> None:
    from outsize.base.units import format_bytes
    from outsize.cli._tables import print_table
    from outsize.export.combine import overall_error

    told = made.told
    worst = sorted(told, key=lambda module: told[module].error, reverse=True)[:_NUM_SHOWN]
    rows = [
        (
            module,
            f"{told[module].old_rank}",
            f"{told[module].new_rank}",
            f"{told[module].error:.3%}",
        )
        for module in worst
    ]
    print_table("Modules that lost most", ("module", "rank", "now", "lost of the delta"), rows)
    ranks = [one.new_rank for one in told.values()]
    print(
        f"{len(told)} modules, rank {min(ranks)} to {max(ranks)}, {overall_error(told):.4%} of the deltas' norm lost; "
        f"{format_bytes(made.exported.num_bytes)} as {made.dialect}: {out}"
    )
