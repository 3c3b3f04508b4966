"""`outsize synth`: a random checkpoint in the layout of the real one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from outsize.base.errors import RecipeError
from outsize.base.threads import settle_threads
from outsize.base.units import format_bytes, format_seconds, parse_bytes
from outsize.cli._site import DeviceOption

_HELP = """Write a random checkpoint in the layout of the real one.

To measure with where the real weights cannot be had: the same names, shapes, types and shards, and values that mean
nothing. A base's text encoders and image codec come with --parts. Tokenizers are not written, as they cannot be made
up: copy the published folder (a few MB) beside the text encoder before training.

FAMILY.VARIANT@DEPTH has fewer blocks of the same widths: flux2.dev@2+6 has 2 double and 6 single blocks,
flux2.dev@2+6@4 also a text encoder of 4 layers, mistral3_text.small-24b@4 is that encoder alone. A recipe takes the same
name as its base's variant (dev@2+6).
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("synth", help=_HELP)(synth)


def synth(
    model: Annotated[
        str,
        typer.Argument(metavar="FAMILY.VARIANT", help="What to write.", show_default=False),
    ],
    path: Annotated[
        Path, typer.Argument(help="A new or empty folder to write to.", show_default=False)
    ],
    *,
    parts: Annotated[
        bool, typer.Option("--parts", help="Also a base's text encoders and image codec.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Another seed, other values.")] = 0,
    shard_bytes: Annotated[
        str, typer.Option("--shard-bytes", help="Size of one file at most, as in 10GB.")
    ] = "10GB",
    device: DeviceOption = None,
) -> int:
    """Write it, and say how long it took."""
    family, _, variant = model.partition(".")
    if not variant:
        raise RecipeError(f"{model!r} names no variant; write FAMILY.VARIANT, as in flux2.dev")
    shard = parse_bytes(shard_bytes)
    settle_threads()
    from outsize.app.synth import models_of, synthesise
    from outsize.cli._progress import open_progress
    from outsize.devices.protocol import open_device

    models = models_of(family, variant, path, has_parts=parts)
    began = time.monotonic()
    with open_progress() as progress:
        written = synthesise(
            models,
            path,
            seed=seed,
            shard_bytes=shard,
            device=open_device(device),
            on_progress=lambda label, done, total: progress.advance(
                f"write {label}", done, total, "B"
            ),
        )
    seconds = time.monotonic() - began
    for one in written:
        files = "1 file" if len(one.files) == 1 else f"{len(one.files)} files"
        print(f"{one.label}: {format_bytes(one.num_bytes)} in {files}")
    total = sum(one.num_bytes for one in written)
    print(f"{path}: {format_seconds(seconds)}, {total / max(seconds, 1e-9) / 1e9:.2f} GB/s")
    return 0
