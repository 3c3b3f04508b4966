"""Datasets of an ai-toolkit job; read in toolkit/config_modules.py and toolkit/data_loader.py of 27a03a91."""

from __future__ import annotations

import re
from typing import Any

from outsize.recipes.importers._rows import Draft, Rule, Told, if_on, truth, unless

_AT = re.compile(r"datasets\[(\d+)\]")

# What a dataset that says nothing of it has there, where it differs from here.
DEFAULTS: dict[str, Any] = {"resolution": 512, "caption_dropout_rate": 0.0}


def the_set(draft: Draft) -> dict[str, Any]:
    """The set of the recipe that the key in hand belongs to."""
    match = _AT.match(draft.where)
    assert match is not None, "only datasets have such keys"
    sets = draft.recipe.setdefault("data", {}).setdefault("sets", [])
    while len(sets) <= int(match[1]):
        sets.append({})
    found: dict[str, Any] = sets[int(match[1])]
    return found


def _into(key: str) -> Rule:
    def rule(draft: Draft, value: Any) -> Told:
        if value is None or value == "":
            return "no effect", "empty"
        the_set(draft)[key] = value
        return "taken", f"data.sets: {key}"

    return rule


def _extension(draft: Draft, value: Any) -> Told:
    text = str(value)
    the_set(draft)["caption_extension"] = text if text.startswith(".") else f".{text}"
    return (
        "taken",
        "data.sets: caption_extension; a picture without such a file is an error here, a blank caption there",
    )


def _default_caption(draft: Draft, value: Any) -> Told:
    if value in (None, ""):
        return (
            "changed",
            "a blank caption is not taken for granted: a picture without one is an error",
        )
    the_set(draft)["default_caption"] = str(value)
    return "taken", "data.sets: default_caption"


def trigger(draft: Draft, value: Any) -> Told:
    """The word before captions, of one set or of all."""
    if value in (None, ""):
        return "no effect", "empty"
    sets = (
        [the_set(draft)]
        if draft.where.startswith("datasets")
        else draft.recipe.get("data", {}).get("sets", [])
    )
    for one in sets:
        if not one.get("is_regularisation"):
            one.setdefault("trigger", str(value))
    return "changed", (
        "data.sets: trigger, put before every caption; there only before those that do not hold it, and [trigger] inside "
        "captions is replaced, which it is not here"
    )


def _resolution(draft: Draft, value: Any) -> Told:
    sides = [int(one) for one in (value if isinstance(value, list) else [value])]
    data = draft.recipe.setdefault("data", {})
    before = data.get("resolution")
    known = [] if before is None else before if isinstance(before, list) else [before]
    union = sorted({*known, *sides})
    if not sides:
        raise ValueError("a side of pictures, or several")
    data["resolution"] = union if len(union) > 1 else union[0]
    several = (
        " as one set for each, so that an epoch is as many times longer" if len(sides) > 1 else ""
    )
    if known and sorted(known) != sorted(sides):
        return (
            "changed",
            "data.resolution, which is that of all sets: every picture is shown at each of them",
        )
    if several:
        return (
            "taken",
            f"data.resolution: every picture at each of them, there{several}; steps are counted alike",
        )
    return "taken", "data.resolution"


def _dropout(draft: Draft, value: Any) -> Told:
    data = draft.recipe.setdefault("data", {})
    share = float(value or 0)
    before = data.get("caption_dropout")
    data["caption_dropout"] = share if before is None else max(before, share)
    if before not in {None, share}:
        return "changed", "data.caption_dropout, which is that of all sets: the largest"
    return "taken", "data.caption_dropout"


def _regularisation(draft: Draft, value: Any) -> Told:
    if not truth(value):
        return "no effect", "no regularisation set"
    the_set(draft)["is_regularisation"] = True
    total = sum(truth(one) for key, one in draft.values.items() if key.endswith("].is_reg"))
    num_sets = sum(key.endswith("].folder_path") for key in draft.values)
    if total < num_sets:
        the_set(draft)["share"] = round(0.5 / total, 6)
    return "changed", (
        "data.sets: is_regularisation, with a share of a half of all samples; there every other step is one, but none where "
        "a checkpoint or sample is due"
    )


def _flip(draft: Draft, _value: Any) -> Told:
    the_set(draft)["flip"] = 0.5
    return (
        "changed",
        "data.sets: flip 0.5, half of the samples; there each picture is in the set twice",
    )


def _mask(draft: Draft, value: Any) -> Told:
    if value in (None, ""):
        return "no effect", "no masks"
    the_set(draft)["masks"] = str(value)
    return "changed", (
        "data.sets: masks, their weights divided by their mean for each picture; there by that of the whole batch"
    )


def _mask_floor(draft: Draft, value: Any) -> Told:
    at = draft.where.removesuffix(".mask_min_value")
    has_masks = bool(draft.get(f"{at}.mask_path")) or truth(draft.get(f"{at}.alpha_mask", False))
    if not has_masks or not value:
        return "no effect", "no masks, or black counts nothing"
    the_set(draft)["mask_floor"] = float(value)
    return "taken", "data.sets: mask_floor"


def _alpha_mask(draft: Draft, _value: Any) -> Told:
    the_set(draft)["alpha_as_mask"] = True
    return "changed", "data.sets: alpha_as_mask, its weights divided by their mean for each picture"


def _batch_size(draft: Draft, value: Any) -> Told:
    if value in (None, draft.get("train.batch_size", 1)):
        return "no effect", "that of the job"
    return "left out", "all sets share train.batch"


def _cannot(reason: str, *off: Any) -> Rule:
    return unless((None, False, "", 0, 0.0, *off), reason)


_OF_SET: dict[str, Rule] = {
    "folder_path": _into("folder"),
    "caption_ext": _extension,
    "caption_type": _extension,
    "default_caption": _default_caption,
    "trigger_word": trigger,
    "resolution": _resolution,
    "caption_dropout_rate": _dropout,
    "num_repeats": _into("repeats"),
    "loss_multiplier": _into("loss_weight"),
    "is_reg": _regularisation,
    "flip_x": if_on(_flip),
    "mask_path": _mask,
    "mask_min_value": _mask_floor,
    "alpha_mask": if_on(_alpha_mask),
    "batch_size": _batch_size,
    "type": unless((None, "image", "sd"), "only sets of pictures are learned from", "as here"),
    "dataset_path": _cannot("a manifest of theirs; write data.sets: manifest"),
    "buckets": unless((True,), "pictures are always brought to buckets by their aspect", "as here"),
    "network_weight": unless((None, 1, 1.0), "the adapter counts 1 for every set", "as here"),
    "num_frames": unless((None, 1), "no video is learned from"),
}
RULES: dict[str, Rule] = {f"datasets[].{key}": rule for key, rule in _OF_SET.items()}
