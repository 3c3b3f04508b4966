"""What of a recipe decides the numbers of a step: recipes that agree in it may resume each other's runs."""

from __future__ import annotations

from typing import Any

from outsize.base.files import json_digest
from outsize.recipes.section import Added, Section

# Numbers do not change what is learned when only these parts of a recipe differ.
_WITHOUT_EFFECT_ON_NUMBERS = (
    "name",
    "placement",
    "checkpoints",
    "evaluate",
    "compare",
    "previews",
    "track",
    "on_stall",
    "people",
    "runs",
    "cache",
)


def numbers_digest(recipe: Section) -> str:
    """SHA-256 over a whole recipe, hexadecimal.

    Left out: name, folders, placement, checkpoints, evaluate, compare, previews, track, on_stall, people, train.record, and train.steps
    (how far, not how) unless the step size depends on it; and fields marked as Added where they are at their defaults, so that a run can be
    resumed by a version that knows more of them.
    """
    kept = {
        key: value
        for key, value in _without_unused_additions(recipe, recipe.model_dump(mode="json")).items()
        if key not in _WITHOUT_EFFECT_ON_NUMBERS
    }
    without = {"record", "steps"} if kept["train"]["schedule"] == "constant" else {"record"}
    kept["train"] = {key: one for key, one in kept["train"].items() if key not in without}
    return json_digest(kept)


def _without_unused_additions(section: Section, dumped: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        is_added = any(isinstance(one, Added) for one in info.metadata)
        if is_added and value == info.get_default(call_default_factory=True):
            continue
        kept[name] = _pruned(value, dumped[name])
    return kept


def _pruned(value: object, dumped: Any) -> Any:
    """What a field was dumped to, less unused additions inside it; short forms are left as they are."""
    if isinstance(value, Section) and dumped.keys() == type(value).model_fields.keys():
        return _without_unused_additions(value, dumped)
    if isinstance(value, dict) and isinstance(dumped, dict) and value.keys() == dumped.keys():
        return {key: _pruned(one, dumped[key]) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_pruned(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped
