"""`outsize worker`: executes orders, one after the other."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from outsize.cli._site import (
    DEFAULT_RAM,
    DeviceOption,
    HostRamOption,
    OfflineOption,
    RamOption,
    VramLimitOption,
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("worker")(worker)


def worker(
    *,
    once: Annotated[bool, typer.Option("--once", help="Take one order at most, and end.")] = False,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End when no order is open any more.")
    ] = False,
    ram: RamOption = DEFAULT_RAM,
    device: DeviceOption = None,
    vram_limit: VramLimitOption = None,
    host_ram: HostRamOption = None,
    offline: OfflineOption = False,
) -> int:
    """Execute orders in child processes, one by one; start one worker for each card (CUDA_VISIBLE_DEVICES chooses it).

    Ctrl-C saves the order at hand, puts it back into the queue and ends.
    """
    from outsize.app.worker import Worker
    from outsize.runs.orders import Orders, orders_folder

    asked = {
        "--ram": ram, "--device": device, "--vram-limit": vram_limit, "--host-ram": host_ram
    }  # fmt: skip
    given = [word for name, value in asked.items() if value for word in (name, value)]
    made = Worker(
        Orders(orders_folder()),
        lambda line: print(line, file=sys.stderr, flush=True),
        [*given, *["--offline"] * offline],
    )
    taken = made.run(most=1 if once else None, until_empty=until_empty)
    print(f"{taken} orders taken")
    return 0
