"""`outsize train`: plan, prepare what is missing, train, and say where time and memory went."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from outsize.base.errors import EXIT_COMPLETED, EXIT_STOPPED
from outsize.base.waypoints import Waypoints
from outsize.cli._site import (
    DEFAULT_RAM,
    DeviceOption,
    HostRamOption,
    OfflineOption,
    RamOption,
    RecipeArgument,
    VramLimitOption,
    open_site,
    recipe_and_run,
)

if TYPE_CHECKING:
    from outsize.app.site import Site
    from outsize.app.train import Trained
    from outsize.train.loop import StepReport


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train)


def train(
    context: typer.Context,
    recipe: RecipeArgument,
    *,
    ram: RamOption = DEFAULT_RAM,
    device: DeviceOption = None,
    vram_limit: VramLimitOption = None,
    host_ram: HostRamOption = None,
    offline: OfflineOption = False,
) -> int:
    """Train a recipe, from its newest checkpoint if there is one. Ctrl-C saves and stops."""
    from outsize.app.supervise import is_supervised, supervise
    from outsize.app.tasks.protocol import task_of
    from outsize.cli.report import reported
    from outsize.runs.right import right_of
    from outsize.train.optimizers.protocol import require_optimizer

    waypoints = context.ensure_object(Waypoints)
    waypoints.mark("command read")
    chosen, run = recipe_and_run(recipe)
    task_of(chosen).require(chosen)
    require_optimizer(chosen.train.optimizer)
    if chosen.on_stall == "resume" and not is_supervised():
        asked = {
            "--ram": ram, "--device": device, "--vram-limit": vram_limit, "--host-ram": host_ram
        }  # fmt: skip
        given = [word for name, value in asked.items() if value for word in (name, value)]
        again = ["train", str(recipe), *given, *["--offline"] * offline]
        return supervise(run, again, lambda text: print(text, file=sys.stderr, flush=True))
    right = right_of()
    right.say("preparing")
    with (
        open_site(
            chosen,
            run,
            ram=ram,
            device=device,
            offline=offline,
            vram_limit=vram_limit,
            host_ram=host_ram,
            waypoints=waypoints,
            right=right,
        ) as site,
        reported(run),
    ):
        from outsize.app.train import train as train_site
        from outsize.cli._tables import print_stages

        waypoints.mark("trainer imported")
        say_plan(site)
        trained = train_site(site, run, lambda report: show_step(site, report))
        if trained.last is not None:
            print_start(waypoints)
        print_stages(site.stages.finished)
        print_comparison(site, trained)
        print_evaluated(trained)
        print_pace(site, trained)
        print(f"{trained.outcome} after step {trained.step} of {chosen.train.steps}: {run.path}")
    return EXIT_COMPLETED if trained.outcome == "completed" else EXIT_STOPPED


def say_plan(site: Site) -> None:
    """Where the base will be held, and why."""
    from outsize.base.units import format_bytes

    chosen = site.plan.chosen
    memory = chosen.device_bytes or chosen.host_bytes
    site.progress.say(f"plan: {chosen.holding.kind}, {format_bytes(memory)} at most; {chosen.why}")


def print_evaluated(trained: Trained) -> None:
    """What was measured on data that was held out."""
    from outsize.cli._tables import print_table

    table = trained.evaluated
    if table is not None:
        print_table(table.title, table.heads, table.rows, words=table.words)


def print_start(waypoints: Waypoints) -> None:
    """Where the time to the first step went."""
    from outsize.base.units import format_seconds
    from outsize.cli._tables import print_table

    rows = [
        (leg.name, format_seconds(leg.at_s), format_seconds(leg.seconds), f"{leg.share:.0%}")
        for leg in waypoints.legs()
    ]
    title = "Boot: from process start to the end of the first step"
    print_table(title, ("waypoint", "at", "took", "share"), rows)


def print_pace(site: Site, trained: Trained) -> None:
    """How fast the steps came, and whether the same run would give the same bytes."""
    from outsize.base.units import format_seconds

    if trained.step_s is not None:
        print(f"a step took {format_seconds(trained.step_s)} (median)")
    if site.plan.compute.is_exact:
        print(
            "this run can be repeated bit for bit on such a machine: only exact kernels were used"
        )
    else:
        print(
            "this run cannot be repeated bit for bit: train.exact is off, so kernels may add in any order"
        )


def print_comparison(site: Site, trained: Trained) -> None:
    """The plan beside what was measured, stage by stage."""
    from outsize.app.stages import measured, prepare_seconds
    from outsize.cli._tables import print_table
    from outsize.plan.compare import MeasuredRun, compare_run
    from outsize.plan.report import comparison_table

    run = MeasuredRun(
        measured(site.stages.finished, site.device),
        step_s=trained.step_s,
        boot_s=trained.boot_s,
        prepare_s=prepare_seconds(site.stages.finished),
    )
    rows = compare_run(site.plan, run)
    for row in rows:
        site.journal.write("plan_compared", **row.to_json())
    table = comparison_table(rows)
    print_table(table.title, table.heads, table.rows, words=(0, len(table.heads) - 1))


def show_step(site: Site, report: StepReport) -> None:
    """Tell the person watching how a step went."""
    site.progress.advance("train", report.step, report.num_steps, "steps")
    is_first = report.step == 1
    if is_first or report.step % max(1, report.num_steps // 20) == 0:
        site.progress.say(
            f"step {report.step}: loss {report.loss:.4f}, gradient {report.grad_norm:.3g}, "
            f"{report.seconds:.2f} s"
        )
