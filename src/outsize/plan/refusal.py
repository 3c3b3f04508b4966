"""Saying no well: what does not fit, by how much, made of what, and the smallest change that would.

Changes are tried in the order of what they cost: first those that change no number (placement, slots), then those that
change rounding (splitting a batch, 8-bit state, another format for an encoder), then those that change what is learned.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from outsize.base.units import format_bytes
from outsize.plan.names import AUTO, TASKS, base_family, components_of, optimizer_of
from outsize.plan.plan import Plan
from outsize.plan.pools import Phase
from outsize.plan.tasks.protocol import PlanTask
from outsize.recipes.recipe import Recipe

_GROUPS = {
    "Base": (
        "blocks kept",
        "ring",
        "streamed blocks",
        "blocks in ordinary memory",
        "staging",
        "outside the blocks",
        "vocabulary",
        "decode scratch",
        "codec",
    ),
    "activations": (
        "block inputs",
        "slots of block inputs",
        "waiting block inputs",
        "working set",
        "working set of the codec",
        "operands",
        "activations",
        "batch",
        "hidden states",
        "logits",
        "attention masks",
        "recurrent states",
        "recorded kernels",
        "keys and values",
    ),
    "adapter and optimizer": (
        "adapter",
        "optimizer state",
        "gradients",
        "accumulated gradients",
        "checkpoint",
    ),
}


@dataclass(frozen=True)
class Change:
    """One change of a recipe: values by dotted path, together."""

    edits: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        nested: dict[str, Any] = {}
        for path, value in self.edits:
            _put(nested, path, value)
        return _as_yaml(nested)[1:-1]

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with this change, validated anew."""
        values = json.loads(json.dumps(recipe.to_json()))
        for path, value in self.edits:
            _put(values, path, value)
        return Recipe.model_validate(values)


Draft = Callable[[Recipe], Plan]


def with_remedy(plan: Plan, recipe: Recipe, draft: Draft) -> Plan:
    """The same plan with a refusal that says what does not fit and what to change. draft: the plan of a changed recipe."""
    said = list(_shortages(plan, recipe))
    if plan.compute_fault is not None:
        said.insert(0, f"{plan.compute_fault}.")
    text = " ".join([*said, _remedy(plan, recipe, draft)])
    return replace(plan, refusal=text)


def _shortages(plan: Plan, recipe: Recipe) -> Iterator[str]:
    """One sentence for each pool that overflows, from its fullest phase."""
    budget, machine = plan.budget, plan.machine
    fullest = max(plan.phases, key=lambda phase: phase.device_bytes)
    if budget.device_bytes is not None and fullest.device_bytes > budget.device_bytes:
        free = f"{format_bytes(budget.device_bytes)} are {'there' if machine.is_stated else 'free'}"
        need = format_bytes(fullest.device_bytes)
        yield f"{fullest.name} needs {need} on {machine.device}, {free}. {_made_of(fullest, 'device', recipe)}"
    fullest = max(plan.phases, key=lambda phase: phase.host_bytes)
    if fullest.host_bytes > budget.host_bytes:
        need, free = format_bytes(fullest.host_bytes), format_bytes(budget.host_bytes)
        made_of = _made_of(fullest, "host", recipe)
        yield f"{fullest.name} needs {need} of RAM, {free} are free for it. {made_of}"
    pinned = max(phase.total("pinned") for phase in plan.phases)
    if budget.pinned_bytes < min(pinned, budget.host_bytes):
        need, free = format_bytes(pinned), format_bytes(budget.pinned_bytes)
        yield f"{need} of RAM are to be pinned, {machine.os} lets {free} be."


def _made_of(phase: Phase, pool: str, recipe: Recipe) -> str:
    """The owners in groups, in GiB: base, activations with what shaped them, adapter, the rest."""
    pools = {"device"} if pool == "device" else {"pinned", "private"}
    left = {item.owner: 0 for item in phase.items}
    for item in phase.items:
        left[item.owner] += item.num_bytes if item.pool in pools else 0
    said = []
    for group, owners in _GROUPS.items():
        total = sum(left.pop(owner, 0) for owner in owners)
        shape = f"{_task(recipe).shape(recipe)}, batch {recipe.train.batch}"
        detail = f" ({shape})" if group == "activations" else ""
        if total:
            said.append(f"{group} {total / 2**30:.1f}{detail}")
    rest = sum(left.values())
    if rest:
        said.append(f"program and driver {rest / 2**30:.1f}")
    return ", ".join(said) + " GiB."


def _remedy(plan: Plan, recipe: Recipe, draft: Draft) -> str:
    """The smallest change, or combination of changes, that fits; or how much machine is wanting."""
    levers = [lever for lever in _levers(plan, recipe) if lever]
    for lever in levers:
        for change in lever:
            tried = draft(change.apply(recipe))
            if tried.fits:
                return f"Smallest change that fits: `{change}` ({_peak(tried)})."
    made: list[Change] = []
    tried = plan
    for lever in levers:
        made.append(lever[0])
        for change in lever:
            made[-1] = change
            changed = functools.reduce(lambda so_far, one: one.apply(so_far), made, recipe)
            tried = draft(changed)
            if tried.fits:
                return f"Smallest changes that fit together: {_listed(made)} ({_peak(tried)})."
    even = f" even with {_listed(made)}" if made else ""
    return f"No change of this recipe fits:{even} it takes {_peak(tried)}; take a smaller base or variant."


def _levers(plan: Plan, recipe: Recipe) -> Iterator[list[Change]]:
    """Changes in the order of what they cost, each from the mildest to the strongest."""
    if plan.compute_fault is not None:
        yield [Change((("train.arithmetic", AUTO),))]
    if recipe.previews.every is not None and recipe.previews.decode == "now":
        yield [Change((("previews.decode", AUTO),))]
    yield from _placement_levers(recipe)
    if recipe.train.compile is True:
        yield [Change((("train.compile", None),))]
    if recipe.previews.every is not None:
        yield [Change((("previews.every", None),))]
    yield from _rounding_levers(recipe)
    for lever in _task(recipe).levers(recipe):
        yield [Change(edits) for edits in lever]
    rank = recipe.adapter.rank
    yield [Change((("adapter.rank", small),)) for small in (rank // 2, rank // 4) if small >= 4]


def _task(recipe: Recipe) -> PlanTask:
    task: PlanTask = TASKS.load(base_family(recipe.base.family).objective)
    return task


def _placement_levers(recipe: Recipe) -> Iterator[list[Change]]:
    """What changes no number: limits that a recipe sets, each given back to the planner."""
    placement = recipe.placement
    if placement.resident_bytes is not None:
        yield [Change((("placement.kind", AUTO), ("placement.resident_bytes", None)))]
    elif placement.kind != AUTO:
        yield [Change((("placement.kind", AUTO),))]
    caps = ("pinned_bytes", "pageable_bytes")
    if any(getattr(placement, cap) is not None for cap in caps):
        yield [Change(tuple((f"placement.{cap}", None) for cap in caps))]
    for name in ("offload_inputs", "vocabulary_on_host"):
        if getattr(placement, name) is not None:
            yield [Change(((f"placement.{name}", None),))]
    if placement.recompute is False:
        yield [Change((("placement.recompute", None),))]
    if (placement.slots or 2) > 2:
        yield [Change((("placement.slots", 2),))]


def _rounding_levers(recipe: Recipe) -> Iterator[list[Change]]:
    """What changes rounding: splitting a batch, other formats for encoders, 8-bit state."""
    train = recipe.train
    if train.batch > 1:
        passes = train.accumulate * train.batch
        yield [Change((("train.batch", 1), ("train.accumulate", passes)))]
    for component in components_of(recipe):
        chosen = recipe.base.component_format(component.slot, component.kind)
        if component.kind == "text" and chosen != recipe.base.format:
            path = f"base.components.{component.slot}.format"
            yield [Change(((path, recipe.base.format.model_dump()),))]
    smaller = getattr(optimizer_of(recipe), "smaller", None)
    if smaller is not None:
        yield [Change((("train.optimizer", smaller),))]


def _peak(plan: Plan) -> str:
    """What a plan peaks at, in the pools that count."""
    device = max(phase.device_bytes for phase in plan.phases)
    host = max(phase.host_bytes for phase in plan.phases)
    if plan.budget.device_bytes is None:
        return f"{format_bytes(host)} of RAM"
    return f"{format_bytes(device)} on the device, {format_bytes(host)} of RAM"


def _listed(changes: list[Change]) -> str:
    return ", ".join(f"`{change}`" for change in changes)


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by dotted path, making the sections on the way."""
    *keys, last = path.split(".")
    for key in keys:
        values = values.setdefault(key, {})
    values[last] = value


def _as_yaml(value: Any) -> str:
    """A value in YAML's one-line form."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_yaml(one)}" for key, one in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)
