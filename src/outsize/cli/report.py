"""`outsize report`: one page that shows a run, from its folder alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from outsize.cli._site import RunArgument, recipe_and_run

if TYPE_CHECKING:
    from outsize.runs.folder import RunFolder


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(run: RunArgument) -> int:
    """Write report.html into the run folder: curves, times, memory, previews, and what the run was made of."""
    from outsize.app.report.page import write_report
    from outsize.base.errors import RecipeError

    _, folder = recipe_and_run(run)
    if not folder.journal.exists():
        raise RecipeError(f"{folder.path} holds no journal yet; train first")
    print(f"report: {write_report(folder)}")
    return 0


@contextmanager
def reported(folder: RunFolder) -> Iterator[None]:
    """However the block ends, the run's page then shows it; an error of the block is the one that is told."""
    from outsize.app.report.page import write_report

    try:
        yield
    except BaseException:
        try:
            write_report(folder)
        except Exception as error:  # noqa: BLE001 - the first error matters more
            sys.stderr.write(f"warning: no report could be written: {error}\n")
        raise
    print(f"report: {write_report(folder)}")


def refresh_report(folder: RunFolder) -> None:
    """Write the page of a run again where there is one, since there is more to show."""
    if folder.report.exists():
        from outsize.app.report.page import write_report

        print(f"report: {write_report(folder)}")
