"""`outsize data preview`: what a recipe would learn from, before anything is trained or any weight is read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli._site import OfflineOption, RecipeArgument

if TYPE_CHECKING:
    from outsize.app.tasks.protocol import Preview, Shown


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Look at what a recipe learns from.", no_args_is_help=True)
    group.command("preview")(preview)
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
