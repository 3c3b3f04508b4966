"""From a recipe and a machine's profile to a plan: a placement that fits, or a refusal with a remedy.

Pure: nothing is opened, no device is touched, torch is not imported.
"""

from __future__ import annotations

import functools

from outsize.devices._profile import MachineProfile
from outsize.devices._rates import Rates, rates_of
from outsize.plan.draft import draft_plan
from outsize.plan.plan import Plan
from outsize.plan.refusal import with_remedy
from outsize.recipes.recipe import Recipe


def make_plan(
    recipe: Recipe,
    machine: MachineProfile,
    *,
    num_pictures: int | None = None,
    rates: Rates | None = None,
    has_triton: bool = True,
) -> Plan:
    """What the recipe costs on the machine; a plan that does not fit says so and names a remedy.

    num_pictures: in the recipe's folders, for the size of the cache; None when it is not known. rates: of the machine; None:
    those of its card in the table, or a guess. has_triton: whether what compiles blocks is installed.
    Raises: RecipeError for names that do not exist or a recipe that would train nothing.
    """
    known = rates_of(machine) if rates is None else rates
    draft = functools.partial(draft_plan, machine=machine, rates=known, has_triton=has_triton)
    plan = draft(recipe, num_pictures=num_pictures)
    return plan if plan.fits else with_remedy(plan, recipe, draft)
