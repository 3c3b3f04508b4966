"""`outsize demo`: the whole way on a small model that ships with the package, in two minutes on two cores."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.threads import settle_threads
from outsize.cli._site import DeviceOption

if TYPE_CHECKING:
    from outsize.app.demo import DemoResult


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    *,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for everything the demo makes.")
    ] = Path("outsize-demo"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of the training.")] = 0,
    device: DeviceOption = None,
    arithmetic: Annotated[
        str | None,
        typer.Option(
            "--arithmetic",
            help="Products with the frozen matrices, as train.arithmetic in a recipe; left out: as planned.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line.")
    ] = False,
) -> int:
    """Teach a small 4-bit base what cats are, draw the proof, and score it."""
    started = time.perf_counter()
    settle_threads()
    from outsize.app.demo import run_demo, to_json
    from outsize.cli._progress import open_progress
    from outsize.cli.train import show_step
    from outsize.devices.protocol import open_device

    changes = {} if arithmetic is None else {"arithmetic": arithmetic}
    with open_progress() as progress:
        result = run_demo(
            out,
            open_device(device),
            progress,
            show_step,
            seed=seed,
            changes=changes,
            started=started,
        )
    _print_result(result)
    if as_json:
        print(json.dumps(to_json(result)))
    return 0


def _print_result(result: DemoResult) -> None:
    from outsize.base.units import format_seconds
    from outsize.cli._tables import print_table

    scores = result.scores
    print_table(
        "Scores (nearest real picture, no trained judge)",
        ("share of pictures", "base", "with adapter"),
        [
            ("asked for a cat, is a cat", f"{scores.base:.0%}", f"{scores.adapter:.0%}"),
            (
                "other subjects recognised",
                f"{scores.control_before:.0%}",
                f"{scores.control_after:.0%}",
            ),
        ],
    )
    print_table(
        "Where time went",
        ("phase", "time"),
        [(name, format_seconds(value)) for name, value in result.seconds.items()],
    )
    for name, path in result.paths.items():
        print(f"{name}: {path}")
