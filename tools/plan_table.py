"""The README's table of plans: what `outsize plan` says of the examples on four cards with 32 GiB of RAM.

python tools/plan_table.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outsize.devices._profile import MachineProfile, stated
from outsize.plan.plan import Plan
from outsize.plan.planner import make_plan
from outsize.recipes.load import load_recipe

GIB = 2**30
CARDS = {"RTX 4060": 8, "RTX 4070": 12, "RTX 4060 Ti": 16, "RTX 4090": 24}
RAM_GIB = 32
ROWS = {
    "flux1-dev": "Flux.1-dev (12B)",
    "flux2-klein-4b": "Flux.2-klein-4b",
    "flux2-klein-9b": "Flux.2-klein-9b",
    "flux2-dev": "Flux.2-dev (32B)",
}
SIDES = (512, 1024)
_HERE = MachineProfile(
    device="CPU",
    vram_bytes=None,
    vram_free_bytes=None,
    ram_bytes=RAM_GIB * GIB,
    ram_available_bytes=(RAM_GIB - 2) * GIB,
    disk_free_bytes=None,
    num_cores=8,
    os="Linux",
)


def plan_of(path: Path, side: int, card: str) -> Plan:
    """The plan of an example at another size on a card."""
    recipe = load_recipe(path)
    data = recipe.data.model_copy(update={"resolution": side})
    recipe = recipe.model_copy(update={"data": data})
    where = stated(vram_bytes=CARDS[card] * GIB, ram_bytes=RAM_GIB * GIB, gpu=card, base=_HERE)
    return make_plan(recipe, replace(where, os="Linux"))


def cell(plan: Plan) -> str:
    """Blocks on the card, peak and RAM in GiB, seconds a step, and what else the plan does to fit."""
    if not plan.fits:
        return "does not fit"
    chosen = plan.chosen
    kept, total = len(chosen.holding.blocks_in("device")), chosen.holding.num_blocks
    blocks = "all" if kept == total else f"{kept} of {total}"
    where = ", inputs on the host" if chosen.holding.offloads_inputs else ""
    arithmetic = "" if plan.compute.arithmetic == "bf16" else f", {plan.compute.arithmetic}"
    peak, host = chosen.device_bytes / GIB, chosen.host_bytes / GIB
    return f"{blocks}{where}, {peak:.1f}, {host:.1f}, {chosen.step.seconds:.1f} s{arithmetic}"


def main() -> None:
    """Print the table in Markdown."""
    examples = Path(__file__).resolve().parent.parent / "examples"
    print("| base | pixels |" + "".join(f" {size} GiB |" for size in CARDS.values()))
    print("|---|---|" + "---|" * len(CARDS))
    for name, title in ROWS.items():
        for side in SIDES:
            cells = [cell(plan_of(examples / f"{name}.yaml", side, card)) for card in CARDS]
            print(f"| {title if side == SIDES[0] else ''} | {side} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
