"""What a task is to a plan: which data a recipe of it names, and what that costs beside running the base.

A task is named by the objective of the base's family (`objective` in families/protocol.py), and what it is to a run is the
file of the same name in app/tasks. No task imports torch here: plans are made before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from outsize.plan.work import Conditioner, Demand
from outsize.recipes.recipe import Recipe
from outsize.recipes.section import Section
from outsize.recipes.yaml_tree import Fault

Edits = tuple[tuple[str, Any], ...]  # values by dotted path of a recipe, to be changed together


class PlanTask(Protocol):
    """One kind of thing to learn from."""

    @property
    def section(self) -> type[Section]:
        """What `data` of its recipes is."""

    @property
    def example(self) -> Mapping[str, str]:
        """What a first recipe says of its data, by dotted name: all that must be said."""

    @property
    def synthetic(self) -> Mapping[str, Any]:
        """`data` of a recipe whose data nobody reads, to measure steps with."""

    @property
    def size(self) -> str:
        """The number of a recipe that makes its samples large or small, by dotted name."""

    def faults(self, recipe: Recipe) -> Iterator[Fault]:
        """What of a recipe says something that this task has no use for; data of another kind first of all."""

    def demand(
        self,
        recipe: Recipe,
        conditioners: tuple[Conditioner, ...],
        num_samples: tuple[int, ...] | None,
    ) -> Demand:
        """What a recipe asks of the machine. num_samples: of what there is to learn from, by set; None: not known.

        Raises: RecipeError when the base cannot take such data.
        """

    def shape(self, recipe: Recipe) -> str:
        """What shapes the activations, as in "1024 px"."""

    def intake(self, recipe: Recipe) -> tuple[str, int]:
        """What a step takes in, and how many of it: ("tokens", 8192); padding of rows counts."""

    def levers(self, recipe: Recipe) -> Iterator[list[Edits]]:
        """Changes of what is learned from that save memory, from the mildest on; each from mild to strong."""
