"""`outsize merge`: the base with an adapter in it, as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli._site import (
    AdapterOption,
    DeviceOption,
    OfflineOption,
    RunArgument,
    recipe_and_run,
    worn_by,
)

if TYPE_CHECKING:
    from outsize.app.merge import Merged
    from outsize.dialects.protocol import AdapterWeights
    from outsize.recipes.recipe import FormatChoice, Recipe
    from outsize.runs.folder import RunFolder

UNPACKED = "16bit"
_NUM_SHOWN = 8  # modules of which least survived


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("merge")(merge)


def merge(
    run: RunArgument,
    *,
    into: Annotated[Path, typer.Option("--into", help="A new folder.", show_default=False)],
    packed: Annotated[
        str,
        typer.Option(
            "--format",
            help="16bit: the types of the source, file by file; or a format that other programs read, as nf4.",
        ),
    ] = UNPACKED,
    adapter: AdapterOption = None,
    shard_bytes: Annotated[
        str, typer.Option("--shard-bytes", help="Size of one file at most, as in 10GB.")
    ] = "10GB",
    device: DeviceOption = None,
    offline: OfflineOption = False,
) -> int:
    """Add an adapter to its base block by block, and say how much of it survives the rounding.

    The whole checkpoint is written, what no adapter touches byte for byte, with the configuration that lies beside it. Of a
    picture base that is its transformer alone: text encoders and codec stay where they are.
    """
    recipe, folder = recipe_and_run(run)
    from outsize.app.merge import Order
    from outsize.app.merge import merge as merge_in_app
    from outsize.base.units import parse_bytes
    from outsize.cli._progress import open_progress
    from outsize.devices.protocol import open_device

    weights, told = _weights(recipe, folder, adapter or [])
    with open_progress() as progress:
        made = merge_in_app(
            recipe,
            weights,
            Order(
                into=into,
                packed=_format(recipe, packed),
                shard_bytes=parse_bytes(shard_bytes),
                device=open_device(device).torch_device,
                offline=offline,
                told=told,
                progress=lambda done, total: progress.advance("merge", done, total, "B"),
            ),
        )
    _tell(made)
    return 0


def _format(recipe: Recipe, name: str) -> FormatChoice | None:
    """What --format says; the options are the recipe's, where it names the same format."""
    from outsize.recipes.recipe import FormatChoice

    if name == UNPACKED:
        return None
    return recipe.base.format if recipe.base.format.name == name else FormatChoice(name=name)


def _weights(
    recipe: Recipe, run: RunFolder, files: list[str]
) -> tuple[AdapterWeights, dict[str, object]]:
    from outsize.app.export import trained_adapter

    worn = worn_by(recipe, files)
    if worn is not None:
        return worn.weights, {"adapters": worn.told}
    trained = trained_adapter(recipe, run)
    return trained.weights, {"adapter": trained.metadata}


def _tell(made: Merged) -> None:
    from outsize.base.units import format_bytes
    from outsize.cli._tables import print_table

    meter = made.meter
    heads = ("how it was added", "norm", "cosine", "share")
    overall = ((way, meter.overall(way)) for way in meter.ways)
    rows = [
        (way, f"{one.ratio:.4f}", f"{one.cosine:.4f}", f"{one.share:.4f}") for way, one in overall
    ]
    print_table("What is left of the deltas", heads, rows)
    of_modules = meter.of_modules(meter.ways[0])
    worst = sorted(of_modules, key=lambda module: of_modules[module].share)[:_NUM_SHOWN]
    rows = [
        (name, f"{one.ratio:.4f}", f"{one.cosine:.4f}", f"{one.share:.4f}")
        for name, one in ((module, of_modules[module]) for module in worst)
    ]
    print_table(f"Modules of which least is left, {meter.ways[0]}", ("module", *heads[1:]), rows)
    print(
        f"{format_bytes(made.num_bytes)}, at most {format_bytes(made.growth_bytes)} of host memory: {made.folder}; every "
        "module's figures are in merge.json there"
    )
