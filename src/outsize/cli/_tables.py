"""Tables on standard output: drawn by rich on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from outsize.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outsize.app.stages import Stage


def print_table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Collection[int] = (0,),
) -> None:
    """Print rows under a head. words: the columns that hold words and stand left; the others stand right."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for column, name in enumerate(head):
            table.add_column(name, justify="left" if column in words else "right")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print(title)
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def print_stages(stages: Sequence[Stage]) -> None:
    """Where time and memory went, stages of one name together; the largest peak is the run's peak."""
    from outsize.app.stages import merged

    rows = [
        (
            one.name,
            format_seconds(one.seconds),
            format_bytes(one.device_bytes) if one.device_bytes else "-",
            format_bytes(one.host_bytes),
        )
        for one in merged(stages)
    ]
    if rows:
        rows.append(
            (
                "all, and the largest peak",
                format_seconds(sum(one.seconds for one in stages)),
                format_bytes(max(one.device_bytes for one in stages)) or "-",
                format_bytes(max(one.host_bytes for one in stages)),
            )
        )
    print_table("Where time and memory went", ("stage", "time", "device peak", "host peak"), rows)
