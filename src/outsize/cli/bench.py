"""`outsize bench`: seconds and bytes of training steps, for a recipe or for random weights of any family and variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.base.errors import RecipeError
from outsize.base.threads import settle_threads
from outsize.cli._bench_report import Report
from outsize.cli._site import (
    DeviceOption,
    HostRamOption,
    VramLimitOption,
    limit_bytes,
    open_limited,
)

if TYPE_CHECKING:
    from outsize.app._bench_steps import Timing
    from outsize.devices._profile import MachineProfile
    from outsize.devices.protocol import Device
    from outsize.recipes.recipe import Recipe


TargetArgument = Annotated[
    str | None,
    typer.Argument(help="A recipe, or FAMILY.VARIANT for random weights.", show_default=False),
]
ResolutionOption = Annotated[
    list[int] | None, typer.Option("--resolution", help="Pixels squared; may be repeated.")
]
WindowOption = Annotated[
    list[int] | None, typer.Option("--window", help="Tokens of a row; may be repeated.")
]
RankOption = Annotated[
    list[int] | None, typer.Option("--rank", help="Rank of the adapter; may be repeated.")
]
PlacementOption = Annotated[
    list[str] | None,
    typer.Option("--placement", help="Where the blocks lie, as in a recipe; may be repeated."),
]
ArithmeticOption = Annotated[
    list[str] | None,
    typer.Option("--arithmetic", help="Of products with frozen matrices; may be repeated."),
]
SlotsOption = Annotated[
    int | None, typer.Option("--slots", help="Blocks on the device when streaming.")
]
OffloadOption = Annotated[
    bool | None,
    typer.Option("--offload-inputs/--keep-inputs", help="Block inputs to host memory or not."),
]
CompileOption = Annotated[
    bool | None, typer.Option("--compile/--eager", help="Compile the blocks or not.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other key of a recipe, as in train.batch=2 or placement.resident_bytes=4GiB; one that is repeated varies.",
    ),
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Steps that are timed.")]
WarmupOption = Annotated[int, typer.Option("--warmup", min=1, help="Steps before them.")]
RatesOption = Annotated[
    bool, typer.Option("--rates", help="Measure the machine's own rates, and keep them for plans.")
]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache", help="Folder for stores, and whose disk is measured.", show_default=False
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="File for results, machine and versions; '-': one line a case on standard output, the rows on standard error.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)


def bench(
    target: TargetArgument = None,
    *,
    resolution: ResolutionOption = None,
    window: WindowOption = None,
    rank: RankOption = None,
    placement: PlacementOption = None,
    arithmetic: ArithmeticOption = None,
    slots: SlotsOption = None,
    offload_inputs: OffloadOption = None,
    compile_blocks: CompileOption = None,
    others: SetOption = None,
    steps: StepsOption = 7,
    warmup: WarmupOption = 5,
    rates: RatesOption = False,
    cache: CacheOption = None,
    vram_limit: VramLimitOption = None,
    host_ram: HostRamOption = None,
    device: DeviceOption = None,
    json_file: JsonOption = None,
) -> int:
    """Time training steps: every combination of what is repeated, one row each."""
    from outsize.app.planning import machine_here, machine_with
    from outsize.devices._profile import limited
    from outsize.devices._rates import rates_folder

    if target is None and not rates:
        raise RecipeError(
            "name a recipe or FAMILY.VARIANT to time, or --rates to measure the machine"
        )
    varied: dict[str, list[Any]] = {
        "adapter.rank": list(rank or ()),
        "placement.slots": [] if slots is None else [slots],
        "placement.offload_inputs": [] if offload_inputs is None else [offload_inputs],
        "train.compile": [] if compile_blocks is None else [compile_blocks],
        "train.arithmetic": list(arithmetic or ()),
        "placement.kind": list(placement or ()),
        **_settings(others or ()),
        "data.resolution": list(resolution or ()),
        "data.window": list(window or ()),
    }
    fixed = {} if cache is None else {"cache": str(cache)}
    report = Report(json_file)
    recipes = [] if target is None else _recipes(target, fixed, varied)
    settle_threads()
    from outsize.app._bench_steps import Timing

    limit = limit_bytes(vram_limit)
    machine = machine_here(cache or rates_folder(), device_kind=device)
    opened, cap = open_limited(device, limit)
    machine = machine_with(machine, opened)
    machine = limited(machine, vram_bytes=limit, ram_bytes=limit_bytes(host_ram))
    report.open(machine, opened, cap)
    if rates:
        _measure_rates(opened, machine, cache or rates_folder(), report)
    if recipes:
        _run(recipes, machine, opened, Timing(warmup, steps), report)
    return 0


def _recipes(target: str, fixed: dict[str, Any], varied: dict[str, list[Any]]) -> list[Recipe]:
    from outsize.app._bench_cases import case_recipes

    return case_recipes(target, fixed, varied)


def _settings(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each key: "train.batch=2" and "train.batch=4" give {"train.batch": [2, 4]}; read as YAML.

    Raises: RecipeError for a text without a "=".
    """
    import yaml

    found: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"--set {text!r} says no value; write KEY=VALUE, as in train.batch=2")
        found.setdefault(key.strip(), []).append(yaml.safe_load(value))
    return found


def _measure_rates(device: Device, machine: MachineProfile, folder: Path, report: Report) -> None:
    from outsize.app._bench_rates import keep_rates, measure_rates

    measured = {}
    for name, value, unit in measure_rates(device, folder):
        report.rate(name, value, unit)
        measured[name] = value
    keep_rates(measured, machine.device)


def _run(
    recipes: list[Recipe],
    machine: MachineProfile,
    device: Device,
    timing: Timing,
    report: Report,
) -> None:
    from outsize.app._bench_rates import bus_rate
    from outsize.app.bench import Bench
    from outsize.app.planning import plan_for

    cache = recipes[0].cache_folder()
    with Bench(device, timing, cache, bus_bytes_per_s=bus_rate(device)) as running:
        for recipe in recipes:
            report.case(running.run(recipe, plan_for(recipe, machine)))
