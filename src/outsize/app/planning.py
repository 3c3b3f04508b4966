"""The plan of a run on the machine at hand, made before torch is imported or a device touched."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from outsize.app.stores import Stores
from outsize.app.tasks.protocol import task_of
from outsize.base.errors import SourceError
from outsize.devices._profile import MachineProfile, limited, read_machine
from outsize.devices._profile import stated as stated_machine
from outsize.devices._rates import rates_folder, rates_of, stated_rates
from outsize.plan.plan import Plan
from outsize.plan.planner import make_plan
from outsize.plan.sizes import Found
from outsize.recipes.recipe import Recipe
from outsize.weights.quantised import holds_states
from outsize.weights.scaled import holds_float8

if TYPE_CHECKING:
    from pathlib import Path

    from outsize.devices.protocol import Device

CPU = "cpu"


def plan_here(
    recipe: Recipe,
    *,
    device_kind: str | None = None,
    vram_limit: int | None = None,
    ram_bytes: int | None = None,
) -> Plan:
    """The recipe's plan on this machine; device_kind "cpu" plans as if there were no GPU.

    vram_limit: bytes of the card that may be used, the driver's context among them. ram_bytes: the RAM that there is, where
    the system tells of less than it will give.
    Raises: RecipeError for names that do not exist.
    """
    machine = machine_here(recipe.cache_folder(), device_kind=device_kind)
    return plan_for(recipe, limited(machine, vram_bytes=vram_limit, ram_bytes=ram_bytes))


def machine_here(cache: Path, *, device_kind: str | None = None) -> MachineProfile:
    """This machine; device_kind "cpu" leaves its GPU out. cache: whose disk is looked at."""
    machine = read_machine(cache)
    if device_kind != CPU:
        return machine
    cpu = stated_machine(vram_bytes=0, ram_bytes=None, gpu=None, base=machine)
    return replace(cpu, is_stated=False)


def plan_for(
    recipe: Recipe, machine: MachineProfile, stated: Mapping[str, float] | None = None
) -> Plan:
    """The recipe's plan on a machine, with the rates that are known of it. stated: rates that a person knows better."""
    rates = rates_of(machine, folder=rates_folder())
    return make_plan(
        recipe,
        machine,
        num_samples=task_of(recipe).count(recipe),
        rates=stated_rates(rates, **(stated or {})),
        has_triton=machine.is_stated or has_triton(),
        found=quantised_sources(recipe),
    )


def quantised_sources(recipe: Recipe) -> dict[str, Found]:
    """What the sources on this machine tell that are in 4 or 8 bits, by slot; of headers and states alone.

    A source that is not here yet, or is no such one, is planned by its family's table.
    Raises: SourceError for one that the recipe's format cannot take.
    """
    found: dict[str, Found] = {}
    stores = Stores(recipe, offline=True)
    for slot, part in stores.parts.items():
        try:
            source = stores.source(slot)
        except SourceError:
            continue  # preparing says what is wrong, or fetches what is missing
        with source:
            if not (holds_states(source.tensors) or holds_float8(source.tensors)):
                continue
            family, variant = part.family, part.variant
            mapped = source.locate(
                family.layouts(variant), family.table(variant), part.packing.adopts
            )
        found[slot] = Found(mapped.num_bytes, frozenset(mapped.quantised))
    return found


def has_triton() -> bool:
    """Whether what compiling needs is installed here; found, not imported."""
    return importlib.util.find_spec("triton") is not None


def plan_on(recipe: Recipe, device: Device, plan: Plan) -> Plan:
    """The plan as it must be once torch has spoken: the same, unless torch finds a card that no tool told of, or none."""
    is_gpu = device.kind != CPU
    if is_gpu == plan.machine.has_gpu:
        return plan
    return plan_for(recipe, machine_with(plan.machine, device))


def machine_with(machine: MachineProfile, device: Device) -> MachineProfile:
    """The profile with the device that torch opened, unless the system's tools told of one like it."""
    is_gpu = device.kind != CPU
    if is_gpu == machine.has_gpu:
        return machine
    free = device.free_bytes() if is_gpu else None
    return replace(machine, device=device.name, vram_bytes=free, vram_free_bytes=free)
