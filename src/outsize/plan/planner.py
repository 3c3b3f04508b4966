"""From a recipe and a machine's profile to a plan: a placement that fits, or a refusal with a remedy.

Pure: nothing is opened, no device is touched, torch is not imported.
"""

from __future__ import annotations

from outsize.devices._profile import MachineProfile
from outsize.plan.draft import draft_plan
from outsize.plan.plan import Plan
from outsize.plan.refusal import with_remedy
from outsize.recipes.recipe import Recipe


def make_plan(recipe: Recipe, machine: MachineProfile, *, num_pictures: int | None = None) -> Plan:
    """What the recipe costs on the machine; a plan that does not fit says so and names a remedy.

    num_pictures: in the recipe's folders, for the size of the cache; None when it is not known.
    Raises: RecipeError for names that do not exist or a recipe that would train nothing.
    """
    plan = draft_plan(recipe, machine, num_pictures=num_pictures)
    return plan if plan.fits else with_remedy(plan, recipe)
