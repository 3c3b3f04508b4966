"""What every format loses, by the bits that it takes: the table of docs/formats.md, in Markdown.

    python tools/format_quality.py
    python tools/format_quality.py --rows 4096 --columns 6144 --device cuda

Weights are drawn: Gaussian ones, of Student's t with four degrees of freedom, and those with three columns eight times as
large. Every plug-in of outsize/formats is measured with every combination of its options, by the least bits first.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from outsize.formats.protocol import FORMATS, Format, make_format

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from accuracy import Accuracy, heavy_tailed, measure

_SEED = 0
_OUTLIERS = 3


def every_format() -> Iterator[Format]:
    """Every plug-in with every combination of its options."""
    for name in FORMATS.names():
        plugin = FORMATS.load(name)
        hints = typing.get_type_hints(plugin)
        fields = [field.name for field in dataclasses.fields(plugin)]
        choices = (typing.get_args(hints[field]) or (False, True) for field in fields)
        for values in itertools.product(*choices):
            yield make_format(name, dict(zip(fields, values, strict=True)))


def matrices(num_rows: int, num_columns: int, device: str) -> dict[str, Tensor]:
    """What is measured on, by the name of its column."""
    generator = torch.Generator().manual_seed(_SEED)
    gaussian = 0.02 * torch.randn(num_rows, num_columns, generator=generator)
    found = {
        "Gaussian": gaussian,
        "heavy-tailed": heavy_tailed(num_rows, num_columns, _SEED),
        "and outlying columns": heavy_tailed(num_rows, num_columns, _SEED, outliers=_OUTLIERS),
    }
    return {name: one.to(device) for name, one in found.items()}


def row_of(fmt: Format, found: list[Accuracy]) -> str:
    """One line of the table."""
    described = fmt.describe()
    name = described.pop("name")
    described.pop("code_version")
    options = ", ".join(
        key if value is True else f"{key} {value}" for key, value in described.items()
    )
    errors = " | ".join(f"{one.relative_error:.4f}" for one in found)
    return f"| {found[0].bits_per_weight:.2f} | {name} | {options} | {errors} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=3072)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    drawn = matrices(options.rows, options.columns, options.device)
    print(f"| bits per weight | format | options | {' | '.join(drawn)} |")
    print(f"|{'---|' * (3 + len(drawn))}")
    rows = [(fmt, [measure(fmt, one) for one in drawn.values()]) for fmt in every_format()]
    for fmt, found in sorted(rows, key=lambda row: row[1][0].bits_per_weight):
        print(row_of(fmt, found))


if __name__ == "__main__":
    main()
