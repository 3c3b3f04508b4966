"""`outsize data preview`: what a recipe would learn from, before anything is trained or any weight is read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.files import write_atomically
from outsize.cli._data_manifest import manifest
from outsize.cli._site import OfflineOption, RecipeArgument

if TYPE_CHECKING:
    from outsize.app.tasks.protocol import Checked, Preview, Shown


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Look at what a recipe learns from.", no_args_is_help=True)
    group.command("preview")(preview)
    group.command("check")(check)
    group.command("manifest")(manifest)
    app.add_typer(group, name="data")


def preview(
    recipe: RecipeArgument,
    *,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=0, help="Samples of each set that are shown.")
    ] = 2,
    offline: OfflineOption = False,
) -> int:
    """Show what is trained of a recipe's samples, and count what tells a wrong template or window.

    On a terminal the trained spans are coloured; elsewhere they stand between {+ and +}.
    """
    from outsize.app.tasks.protocol import task_of
    from outsize.cli._progress import open_progress
    from outsize.cli._site import recipe_and_run

    chosen, _ = recipe_and_run(recipe)
    task = task_of(chosen)
    task.require(chosen)
    with open_progress() as progress:
        made = task.preview(chosen, samples, offline=offline, progress=progress)
    print_preview(made)
    if made.fault is not None:
        raise made.fault
    return 0


def check(
    recipe: RecipeArgument,
    *,
    sheet: Annotated[
        Path | None,
        typer.Option("--sheet", help="Where the contact sheet goes; left out: the run folder."),
    ] = None,
    pictures: Annotated[
        int,
        typer.Option("--pictures", "-n", min=0, help="Of each set on the sheet; 0: no sheet."),
    ] = 60,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object.")
    ] = False,
    offline: OfflineOption = False,
) -> int:
    """List all that a recipe would be trained on, with what is odd about it, and draw a contact sheet of its pictures."""
    from outsize.app.provenance import checked
    from outsize.app.tasks.protocol import task_of
    from outsize.cli._progress import open_progress
    from outsize.cli._site import recipe_and_run

    chosen, run = recipe_and_run(recipe)
    task = task_of(chosen)
    task.require(chosen)
    with open_progress() as progress:
        made = task.check(chosen, pictures, offline=offline, progress=progress)
    provenance, stated = checked(chosen)
    drawn = None
    if made.sheet is not None:
        drawn = sheet or run.path / "data" / "contact-sheet.png"
        drawn.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(drawn, made.sheet)
    if as_json:
        drawn_at = None if drawn is None else str(drawn)
        shown = {**made.facts, "provenance": stated, "sheet": drawn_at}
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        print_checked(made)
        print(provenance)
        if drawn is not None:
            print(f"contact sheet: {drawn}")
    if made.fault is not None:
        raise made.fault
    return 0


def print_checked(made: Checked) -> None:
    """Tables, then what is odd, then what is not trained on."""
    from outsize.cli._tables import print_table

    for table in made.tables:
        words = [i for i, head in enumerate(table.heads) if head in {"set", "kind", "bucket"}]
        print_table(table.title, table.heads, table.rows, words=words or table.words)
        print()
    for note in made.notes:
        print(f"warning: {note}")
    for one in made.left_out:
        print(f"left out: {one}")


def print_preview(made: Preview) -> None:
    """Samples first, since they are long; then what is counted."""
    from outsize.cli._tables import print_table

    for one in made.shown:
        _print_sample(one)
    table = made.table
    print_table(table.title, table.heads, table.rows, words=table.words)
    for note in made.notes:
        print(f"warning: {note}")


def _print_sample(one: Shown) -> None:
    if not sys.stdout.isatty():
        marked = [f"{{+{words}+}}" if is_trained else words for words, is_trained in one.spans]
        print(f"--- {one.title}", "".join(marked), "", sep="\n")
        return
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for words, is_trained in one.spans:
        text.append(words, style="bold green" if is_trained else "dim")
    console = Console(highlight=False)
    console.rule(Text(one.title), align="left")
    console.print(text)
    console.print()
