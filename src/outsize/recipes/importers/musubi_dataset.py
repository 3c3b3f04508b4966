"""Dataset files of kohya-ss/musubi-tuner (TOML): [general] and [[datasets]] of pictures. Read at its commit 30c658c.

Of a training such a file says the pictures alone; the rest is the defaults of a recipe, or what a person fills in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outsize.recipes.importers._datasets import add_side, begun, resolved
from outsize.recipes.importers._rows import Draft, Rule, Told, judged, leaves, told, truth, unless
from outsize.recipes.importers.protocol import Asked, Imported, Row

PROGRAM = "musubi-tuner"
_OF_ALL = (
    "resolution", "enable_bucket", "bucket_no_upscale", "caption_extension", "batch_size", "num_repeats",
)  # fmt: skip
# What a set has where neither it nor [general] says.
_DEFAULTS: dict[str, Any] = {"resolution": [960, 544], "batch_size": 1, "enable_bucket": False}
_VIDEO = "no video is learned from"
_CONTROL = "pictures are learned from one by one, without others that guide them"


@dataclass(frozen=True, slots=True)
class MusubiDataset:
    """See protocol.py."""

    def recognises(self, value: Mapping[str, Any]) -> bool:
        """Sets that name folders of pictures or videos, without subsets."""
        sets = value.get("datasets")
        return (
            isinstance(sets, list)
            and bool(sets)
            and all(
                isinstance(one, Mapping)
                and "subsets" not in one
                and any(
                    f"{kind}_{place}" in one
                    for kind in ("image", "video")
                    for place in ("directory", "jsonl_file")
                )
                for one in sets
            )
        )

    def read(self, value: Mapping[str, Any], asked: Asked) -> Imported:
        """A recipe with its sets."""
        draft, general = begun(asked), value.get("general", {})
        draft.recipe["data"]["caption_dropout"] = 0.0
        rows: list[Row] = []
        for number, one in enumerate(value["datasets"]):
            inherited = {key: general[key] for key in _OF_ALL if key in general and key not in one}
            absent = {key: v for key, v in _DEFAULTS.items() if resolved(one, key, general) is None}
            draft.recipe["data"]["sets"].append({})
            draft.values["set"] = draft.recipe["data"]["sets"][-1]
            whole = {**one, **inherited}
            draft.values["is_video"] = "video_directory" in one or "video_jsonl_file" in one
            found = dict(leaves(whole, "", _WHOLE))
            of_set = judged(
                draft, found | {f"{key} (default)": v for key, v in absent.items()}, _RULES
            )
            rows += [
                Row(_path(row.where, number, inherited), row.value, row.verdict, row.how)
                for row in of_set
            ]
        rows += _others(value, rows)
        sets = draft.recipe["data"]["sets"]
        draft.recipe["data"]["sets"] = [one for one in sets if one]
        return Imported(PROGRAM, draft.recipe, tuple(rows))


def _path(where: str, number: int, inherited: Mapping[str, Any]) -> str:
    return f"general.{where}" if where in inherited else f"datasets[{number}].{where}"


def _others(value: Mapping[str, Any], rows: list[Row]) -> list[Row]:
    """Keys of [general] that no set took, and whatever else is at the top."""
    seen = {row.where for row in rows}
    left = [
        Row(
            f"general.{key}",
            one,
            "no effect" if key in _OF_ALL else "left out",
            "every set says its own" if key in _OF_ALL else "not known here",
        )
        for key, one in value.get("general", {}).items()
        if f"general.{key}" not in seen
    ]
    return left + [
        Row(key, one, "left out", "not known here")
        for key, one in value.items()
        if key not in {"general", "datasets"}
    ]


def _folder(draft: Draft, value: Any) -> Told:
    if draft.get("is_video"):
        return "left out", _VIDEO
    draft.get("set")["folder"] = str(value)
    return "taken", "data.sets: folder"


def _jsonl(draft: Draft, value: Any) -> Told:
    from pathlib import PurePath

    path = PurePath(str(value))
    draft.get("set").setdefault("folder", path.parent.as_posix())
    draft.get("set")["manifest"] = str(value)
    return "changed", (
        "data.sets: manifest; its column image_path must be called file_name here, and the files must lie below data.sets: "
        "folder"
    )


def _into(key: str) -> Rule:
    def rule(draft: Draft, value: Any) -> Told:
        if draft.get("is_video"):
            return "left out", _VIDEO
        draft.get("set")[key] = value
        return "taken", f"data.sets: {key}"

    return rule


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


_WHOLE = frozenset({"resolution", "control_resolution", "target_frames", "fp_1f_clean_indices"})
_RULES: dict[str, Rule] = {
    "image_directory": _folder,
    "image_jsonl_file": _jsonl,
    "video_directory": told("left out", _VIDEO),
    "video_jsonl_file": told("left out", _VIDEO),
    "caption_extension": _into("caption_extension"),
    "num_repeats": _into("repeats"),
    "resolution": add_side,
    "batch_size": _batch,
    "enable_bucket": _buckets,
    "bucket_no_upscale": unless((None, False), "small pictures are scaled up to their bucket"),
    "cache_directory": told("no effect", "caches go by content, and lie in the recipe's cache"),
    "multiple_target": unless((None, False), "one picture for a caption"),
    "control_directory": told("left out", _CONTROL),
    "control_resolution": told("left out", _CONTROL),
    "no_resize_control": told("left out", _CONTROL),
    **{
        f"fp_{key}": told("left out", "of another base")
        for key in ("latent_window_size", "1f_clean_indices", "1f_target_index", "1f_no_post")
    },
    **{
        key: told("left out", _VIDEO)
        for key in (
            "target_frames",
            "frame_extraction",
            "frame_stride",
            "frame_sample",
            "max_frames",
            "source_fps",
        )
    },
}

plugin = MusubiDataset()
