"""From the arguments that several commands share to a site and a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.errors import RecipeError
from outsize.base.garbage import collection_paused
from outsize.base.threads import settle_threads
from outsize.base.waypoints import Waypoints

if TYPE_CHECKING:
    from outsize.app.site import Site
    from outsize.devices.protocol import Device
    from outsize.dialects.protocol import AdapterWeights
    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder
    from outsize.runs.right import Right

RecipeArgument = Annotated[
    Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)
]
RunArgument = Annotated[
    Path, typer.Argument(help="A run folder, or the recipe of the run.", show_default=False)
]
RamOption = Annotated[
    str, typer.Option("--ram", help="Host memory that preparing may take, as in 4GiB.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="cuda, rocm or cpu; left out: the best one present.", show_default=False
    ),
]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Ask nothing of the network (as HF_HUB_OFFLINE=1).")
]
VramLimitOption = Annotated[
    str | None,
    typer.Option(
        "--vram-limit",
        help="Take no more of the card than this in all, as in 8GiB: stands in for a smaller card.",
        show_default=False,
    ),
]
HostRamOption = Annotated[
    str | None,
    typer.Option(
        "--host-ram",
        help="RAM that there is, as in 64GiB, where the system tells of less than it will give.",
        show_default=False,
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        help="An adapter's file or folder, of any program, in place of the run's own; FILE:0.8 for a weight. May be given "
        "several times: they are added.",
        show_default=False,
    ),
]
DEFAULT_RAM = "2GiB"


def names_a_run(path: Path) -> bool:
    """Whether a path names a run, by its recipe or its folder, rather than an adapter's files."""
    if path.suffix in {".yaml", ".yml"} or not path.exists():
        return path.suffix != ".safetensors"
    return path.is_dir() and (path / "recipe.json").exists()


def recipe_and_run(path: Path) -> tuple[Recipe, RunFolder]:
    """The recipe that a path names (a YAML file, or a run folder that holds one), and its run folder.

    Raises: RecipeError when it is neither.
    """
    from outsize.recipes.load import load_recipe, recipe_from_json
    from outsize.runs.folder import RunFolder

    if path.is_dir():
        run = RunFolder(path)
        if not run.recipe.exists():
            raise RecipeError(
                f"{path} is no run folder: it holds no {run.recipe.name}; name a recipe file, or a folder below runs/"
            )
        text = run.recipe.read_text(encoding="utf-8")
        return recipe_from_json(json.loads(text), origin=str(run.recipe)), run
    from outsize.plan.names import check_names

    if path.suffix == ".json":  # as a run folder holds it, and an order
        recipe = recipe_from_json(json.loads(path.read_text(encoding="utf-8")), origin=str(path))
    else:
        recipe = load_recipe(path)
    check_names(recipe, origin=str(path))
    return recipe, RunFolder(recipe.run_folder())


@dataclass(frozen=True, slots=True)
class WornFiles:
    """Adapters from files as one, and which they are: digest, dialect and weight of each."""

    weights: AdapterWeights
    told: list[dict[str, object]]


def worn_by(recipe: Recipe, files: list[str] | None) -> WornFiles | None:
    """The adapters that --adapter names, read and held to the recipe's base; None when it names none.

    Raises: RecipeError for files that are not there; AdapterError for those that do not fit.
    """
    if not files:
        return None
    from outsize.app.adapter_files import parse_worn, read_adapter
    from outsize.export.combine import combined

    settle_threads()  # before torch reads the files
    base = recipe.base
    several = [parse_worn(text) for text in files]
    found = [(read_adapter(one.path, base.family, base.variant), one.weight) for one in several]
    told: list[dict[str, object]] = [
        {"sha256": one.digest, "dialect": one.dialect, "weight": weight} for one, weight in found
    ]
    return WornFiles(combined([(one.weights, weight) for one, weight in found]), told)


def wear(site: Site, worn: WornFiles | None) -> None:
    """Put adapters from files in the place of the run's own."""
    if worn is not None:
        site.worn = worn.weights
        site.journal.write("worn", adapters=worn.told)


@contextmanager
def open_site(
    recipe: Recipe,
    run: RunFolder,
    *,
    ram: str,
    device: str | None,
    offline: bool,
    vram_limit: str | None = None,
    host_ram: str | None = None,
    must_fit: bool = True,
    waypoints: Waypoints | None = None,
    right: Right | None = None,
) -> Iterator[Site]:
    """A site whose progress goes to the terminal.

    The plan is made and judged before torch is imported. must_fit: refuse a recipe that does not fit the machine.
    waypoints: of the way so far. right:
    to write to the run, where a worker gave it.
    Raises: DoesNotFit; MachineFault when another process works in the run folder, or there is no card to limit.
    """
    from outsize.app.planning import plan_here, plan_on

    waypoints = waypoints or Waypoints()
    limit = limit_bytes(vram_limit)
    plan = plan_here(recipe, device_kind=device, vram_limit=limit, ram_bytes=limit_bytes(host_ram))
    if must_fit:
        plan.require_fit()
    waypoints.mark("planned")
    settle_threads()
    with collection_paused():
        import torch  # noqa: F401 - here, to know what it takes

        waypoints.mark("torch imported")
        from outsize.app.site import open_site as open_in_app
    from outsize.base.units import parse_bytes
    from outsize.cli._progress import open_progress

    opened, cap = _taken(device, limit, right)
    waypoints.mark("device opened")
    plan = plan_on(recipe, opened, plan)
    if must_fit:
        plan.require_fit()
    with (
        open_progress() as progress,
        open_in_app(
            recipe,
            run,
            plan,
            opened,
            progress,
            ram_bytes=parse_bytes(ram),
            offline=offline,
            waypoints=waypoints,
        ) as site,
    ):
        site.right = right or site.right
        if cap is not None:
            site.progress.say(str(cap))
            site.journal.write("vram_limit", **cap.to_json())
        yield site


def _taken(kind: str | None, limit: int | None, right: Right | None) -> tuple[Device, Cap | None]:
    """The device as open_limited gives it; an order is told that its training waits, and when it need not any more."""
    if right is None:
        return open_limited(kind, limit)
    right.say("waiting")
    found = open_limited(kind, limit)
    right.say("running")
    return found


def limit_bytes(text: str | None) -> int | None:
    """What --vram-limit or --host-ram says."""
    from outsize.base.units import parse_bytes

    return None if text is None else parse_bytes(text)


@dataclass(frozen=True, slots=True)
class Cap:
    """A limit on a card's memory, and what of it is left for tensors once the driver has its share."""

    limit_bytes: int
    left_bytes: int

    def __str__(self) -> str:
        from outsize.base.units import format_bytes

        context = format_bytes(self.limit_bytes - self.left_bytes)
        return (
            f"limited to {format_bytes(self.limit_bytes)} of the card: {format_bytes(self.left_bytes)} for tensors, "
            f"{context} for the driver's context and libraries"
        )

    def to_json(self) -> dict[str, int]:
        """As JSON values."""
        return {
            "limit_bytes": self.limit_bytes,
            "left_bytes": self.left_bytes,
            "context_bytes": self.limit_bytes - self.left_bytes,
        }


def open_limited(kind: str | None, limit: int | None) -> tuple[Device, Cap | None]:
    """The device, its memory limited where that was asked for.

    Raises: MachineFault when there is no such device, or nothing to limit.
    """
    from outsize.devices.protocol import open_device

    opened = open_device(kind)
    return opened, None if limit is None else Cap(limit, opened.limit_memory(limit))
