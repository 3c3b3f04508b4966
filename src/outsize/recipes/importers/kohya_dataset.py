"""Dataset files of kohya-ss/sd-scripts (TOML or JSON): [general], [[datasets]] with [[datasets.subsets]]. Read at 48d368f.

Of a training such a file says the pictures alone; the rest is the defaults of a recipe, or what a person fills in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outsize.recipes.importers._datasets import add_side, begun, resolved
from outsize.recipes.importers._rows import Draft, Rule, Told, if_on, judged, told, truth, unless
from outsize.recipes.importers.protocol import Asked, Imported, Row

PROGRAM = "sd-scripts"
_DEFAULTS: dict[str, Any] = {"caption_extension": ".caption", "caption_dropout_rate": 0.0}
_DATASET_DEFAULTS: dict[str, Any] = {"batch_size": 1, "enable_bucket": False}
_WORDS = "captions are not changed word by word"


@dataclass(frozen=True, slots=True)
class KohyaDataset:
    """See protocol.py."""

    def recognises(self, value: Mapping[str, Any]) -> bool:
        """Datasets with subsets."""
        sets = value.get("datasets")
        return isinstance(sets, list) and any(
            isinstance(one, Mapping) and isinstance(one.get("subsets"), list) for one in sets
        )

    def read(self, value: Mapping[str, Any], asked: Asked) -> Imported:
        """A recipe with all subsets as its sets."""
        draft, general = begun(asked), value.get("general", {})
        rows: list[Row] = []
        taken: set[str] = set()
        for d, dataset in enumerate(value["datasets"]):
            above = {f"datasets[{d}].": dataset, "general.": general}
            absent = {
                k: v for k, v in _DATASET_DEFAULTS.items() if resolved(dataset, k, general) is None
            }
            found = _gathered(f"datasets[{d}].", dataset, {"general.": general}, set(_OF_DATASET))
            rows += _rows(draft, found, absent, f"datasets[{d}].")
            taken |= {where for where, _ in found.values()}
            for s, subset in enumerate(dataset.get("subsets", ())):
                at = f"datasets[{d}].subsets[{s}]."
                draft.recipe["data"]["sets"].append({})
                draft.values["set"] = draft.recipe["data"]["sets"][-1]
                found = _gathered(at, subset, above, set(_OF_SUBSET))
                absent = {
                    k: v
                    for k, v in _DEFAULTS.items()
                    if resolved(subset, k, dataset, general) is None
                }
                rows += _rows(draft, found, absent, at)
                taken |= {where for where, _ in found.values()}
        rows += _unread(value, taken)
        once = {row.where: row for row in rows}
        return Imported(PROGRAM, draft.recipe, tuple(once.values()))


def _gathered(
    at: str, own: Mapping[str, Any], above: Mapping[str, Mapping[str, Any]], known: set[str]
) -> dict[str, tuple[str, Any]]:
    """Key -> (where it stands, value): the section's own keys, and those it takes from above."""
    found = {key: (at + key, one) for key, one in own.items() if key != "subsets"}
    for place, section in above.items():
        for key, one in section.items():
            if key in known and key not in found and one is not None:
                found[key] = (place + key, one)
    return found


def _rows(
    draft: Draft, found: Mapping[str, tuple[str, Any]], absent: Mapping[str, Any], at: str
) -> list[Row]:
    rules = _OF_DATASET | _OF_SUBSET
    told_of = {key: one for key, (_, one) in found.items()}
    judged_rows = judged(
        draft, told_of | {f"{key} (default)": v for key, v in absent.items()}, rules
    )
    places = {key: where for key, (where, _) in found.items()}
    return [
        Row(places.get(row.where, at + row.where), row.value, row.verdict, row.how)
        for row in judged_rows
        if row.where in places or row.where.endswith("(default)")
    ]


def _unread(value: Mapping[str, Any], taken: set[str]) -> list[Row]:
    """Keys above that no section took, and whatever else is at the top."""
    rows = [
        Row(f"general.{key}", one, "left out", "not known here")
        for key, one in value.get("general", {}).items()
        if f"general.{key}" not in taken and key not in _OF_DATASET | _OF_SUBSET
    ]
    rows += [
        Row(f"general.{key}", one, "no effect", "every set says its own")
        for key, one in value.get("general", {}).items()
        if f"general.{key}" not in taken and key in _OF_DATASET | _OF_SUBSET
    ]
    return rows + [
        Row(key, one, "left out", "not known here")
        for key, one in value.items()
        if key not in {"general", "datasets"}
    ]


def _into(key: str) -> Rule:
    def rule(draft: Draft, value: Any) -> Told:
        draft.get("set")[key] = value
        return "taken", f"data.sets: {key}"

    return rule


def _extension(draft: Draft, value: Any) -> Told:
    draft.get("set")["caption_extension"] = str(value)
    return "taken", "data.sets: caption_extension"


def _class_tokens(draft: Draft, value: Any) -> Told:
    if not value:
        return "no effect", "empty"
    draft.get("set")["default_caption"] = str(value)
    return "taken", "data.sets: default_caption, where a picture has no caption file"


def _prefix(draft: Draft, value: Any) -> Told:
    if not value:
        return "no effect", "empty"
    draft.get("set")["trigger"] = str(value).strip().rstrip(",") or str(value)
    return "changed", "data.sets: trigger, put before every caption as a word of its own"


def _regularisation(draft: Draft, _value: Any) -> Told:
    draft.get("set")["is_regularisation"] = True
    return "changed", (
        "data.sets: is_regularisation, in the share that its pictures are of all; there they are repeated until they are as "
        "many as the others, and count by --prior_loss_weight: set share and loss_weight"
    )


def _flip(draft: Draft, _value: Any) -> Told:
    draft.get("set")["flip"] = 0.5
    return "taken", "data.sets: flip 0.5"


def _alpha(draft: Draft, _value: Any) -> Told:
    draft.get("set")["alpha_as_mask"] = True
    draft.get("set")["mask_normalised"] = False
    return "taken", "data.sets: alpha_as_mask, not normalised, as with --masked_loss"


def _dropout(draft: Draft, value: Any) -> Told:
    data = draft.recipe["data"]
    share, before = float(value or 0), data.get("caption_dropout")
    data["caption_dropout"] = share if before is None else max(before, share)
    if before not in {None, share}:
        return "changed", "data.caption_dropout, which is that of all sets: the largest"
    return "taken", "data.caption_dropout"


def _batch(draft: Draft, value: Any) -> Told:
    before = draft.recipe.get("train", {}).get("batch")
    draft.set("train.batch", int(value))
    if before not in {None, value}:
        return "changed", "train.batch, which is that of all sets: the last one's"
    return "taken", "train.batch"


def _buckets(_draft: Draft, value: Any) -> Told:
    if truth(value):
        return "taken", "pictures are always brought to buckets by their aspect"
    return "changed", "pictures keep their aspect, in buckets; there all are cut to one"


def _metadata(draft: Draft, value: Any) -> Told:
    draft.get("set")["manifest"] = str(value)
    return "changed", (
        "data.sets: manifest, which is .jsonl or .csv with file_name and caption; their JSON of keys must be written so"
    )


_OFF = (None, False, 0, 0.0, "")
_OF_DATASET: dict[str, Rule] = {
    "resolution": add_side,
    "batch_size": _batch,
    "enable_bucket": _buckets,
    "bucket_no_upscale": unless(_OFF, "small pictures are scaled up to their bucket"),
    "bucket_reso_steps": told("no effect", "buckets are in steps of the base's own patches"),
    "min_bucket_reso": told("no effect", "buckets have about the area of the resolution"),
    "max_bucket_reso": told("no effect", "buckets have about the area of the resolution"),
    "network_multiplier": unless((None, 1, 1.0), "the adapter counts 1 for every set"),
    "validation_split": unless(_OFF, "held-out pictures are not measured this way"),
    "validation_seed": told("no effect", "held-out pictures are not measured this way"),
    "prior_loss_weight": unless(
        (None, 1, 1.0), "set data.sets: loss_weight of regularisation sets"
    ),
    "debug_dataset": told("no effect", "`outsize data check` shows what is learned from"),
}
_OF_SUBSET: dict[str, Rule] = {
    "image_dir": _into("folder"),
    "metadata_file": _metadata,
    "num_repeats": _into("repeats"),
    "caption_extension": _extension,
    "class_tokens": _class_tokens,
    "caption_prefix": _prefix,
    "caption_suffix": unless(_OFF, "nothing is put behind captions"),
    "is_reg": if_on(_regularisation),
    "flip_aug": if_on(_flip),
    "alpha_mask": if_on(_alpha),
    "caption_dropout_rate": _dropout,
    "caption_dropout_every_n_epochs": unless(
        _OFF, "captions are dropped by chance (data.caption_dropout)"
    ),
    "caption_tag_dropout_rate": unless(_OFF, _WORDS),
    "shuffle_caption": unless(_OFF, _WORDS),
    "caption_separator": told("no effect", _WORDS),
    "keep_tokens": unless(_OFF, _WORDS),
    "keep_tokens_separator": told("no effect", _WORDS),
    "secondary_separator": told("no effect", _WORDS),
    "enable_wildcard": unless(_OFF, _WORDS),
    "token_warmup_min": unless((None, 1), _WORDS),
    "token_warmup_step": unless(_OFF, _WORDS),
    "color_aug": unless(_OFF, "pictures are learned as they are"),
    "face_crop_aug_range": unless(_OFF, "pictures are learned as they are"),
    "random_crop": unless(_OFF, "crops are drawn where the bucket leaves room"),
    "resize_interpolation": told("no effect", "pictures are scaled by one filter"),
    "cache_info": told("no effect", "caches go by content"),
    "custom_attributes": told("no effect", "notes of a person"),
    "conditioning_data_dir": told(
        "left out", "pictures are learned from one by one, without others that guide them"
    ),
}

plugin = KohyaDataset()
