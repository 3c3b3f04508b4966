"""Jobs of ostris/ai-toolkit (YAML or JSON): a LoRA of a base that there is here. Read at its commit 27a03a91.

Its configuration is a set of look-ups with defaults, spread over the program, so a misspelt key is passed over there and a
default may be far from what people think: both are told. What it does with some values is not what they say, and the recipe
follows what it does where that can be had (alpha), and what was meant where it cannot (accumulation, captions).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from outsize.base.errors import RecipeError
from outsize.recipes.importers import (
    _ai_toolkit_job_data as data,
)
from outsize.recipes.importers import (
    _ai_toolkit_job_model as model,
)
from outsize.recipes.importers import (
    _ai_toolkit_job_network as network,
)
from outsize.recipes.importers import (
    _ai_toolkit_job_train as train,
)
from outsize.recipes.importers._rows import (
    DEFAULT,
    Draft,
    Rule,
    Told,
    judged,
    leaves,
    names,
    table,
    told,
    unless,
)
from outsize.recipes.importers.protocol import Asked, Imported, Row

PROGRAM = "ai-toolkit"
_JOBS = {"sd_trainer", "ui_trainer", "diffusion_trainer"}
_OLD_FLAGS = {
    "is_flux": "flux",
    "is_v3": "sd3",
    "is_xl": "sdxl",
    "is_v2": "sd2",
    "is_lumina2": "lumina2",
}
_OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", [], {})  # what switches things off
_OF_BASE = ("roles", "has_guidance", "slots", "is_qtype_for_text")  # that rules look up
_ANY_BASE = {"roles": ["attention", "mlp"], "has_guidance": False, "slots": []}
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def _runs(draft: Draft, value: Any) -> Told:
    draft.set("runs", str(value))
    return "taken", "runs: folder of run folders"


_TOP: dict[str, Rule] = {
    "type": told("taken", "a training of an adapter"),
    "training_folder": _runs,
    "trigger_word": data.trigger,
    "device": told("no effect", "the best card is taken, or the one of --device"),
    "log_dir": told("no effect", "every run has a journal"),
    "performance_log_every": told("no effect", "every run has a journal"),
    "sqlite_db_path": told("no effect", "of their program"),
    "logging.log_every": told("no effect", "every run has a journal"),
    "logging.verbose": told("no effect", "of their program"),
    "logging.use_ui_logger": told("no effect", "of their program"),
    "logging.project_name": told("no effect", "of their program"),
    "logging.run_name": told("no effect", "of their program"),
    "logging.use_wandb": unless((None, False), "nothing is sent anywhere"),
}


@dataclass(frozen=True, slots=True)
class AiToolkitJob:
    """See protocol.py."""

    def recognises(self, value: Mapping[str, Any]) -> bool:
        """A job with processes."""
        config = value.get("config")
        return "job" in value and isinstance(config, Mapping) and "process" in config

    def read(self, value: Mapping[str, Any], asked: Asked) -> Imported:
        """The recipe of its first process."""
        process, name = _process(value)
        found = dict(leaves(process, "", model.WHOLE))
        draft = Draft(values={**found, "source": asked.source})
        base = _base(found, asked)
        draft.values |= {key: base.get(key) for key in _OF_BASE}
        draft.recipe = {
            "name": _folder_name(name or asked.name),
            "base": {"family": base["family"], "variant": base["variant"]},
        }
        if asked.source is not None:
            draft.set("base.source", asked.source)
        defaults = _defaults(found)
        for where, one in defaults.items():
            draft.values.setdefault(where.removesuffix(DEFAULT), one)
        rows = _in_order(draft, found | defaults)
        return Imported(PROGRAM, draft.recipe, (*_outer(value), *rows))


def _in_order(draft: Draft, found: Mapping[str, Any]) -> list[Row]:
    """Sets first, since other keys speak of them; rows in the file's own order all the same."""
    rules = _worded() | _TOP | network.RULES | train.RULES | data.RULES | model.RULES
    of_sets = {where: one for where, one in found.items() if where.startswith("datasets")}
    of_laws = ["train.timestep_type", f"train.timestep_type{DEFAULT}"]
    first = {where: found[where] for where in of_laws if where in found}
    rest = {w: one for w, one in found.items() if w not in of_sets and w not in first}
    told_by = {
        row.where: row for part in (of_sets, first, rest) for row in judged(draft, part, rules)
    }
    return [told_by[where] for where in found]


@cache
def _worded() -> dict[str, Rule]:
    """Keys that need no rule but words."""
    words = table("_ai_toolkit_job_keys.toml")
    return {
        **{key: told("no effect", why) for key, why in words["no_effect"].items()},
        **{key: unless(_OFF, reason) for key, reason in words["left_out"].items()},
        **{key: unless((None, 1, 1.0), reason, "as here") for key, reason in words["one"].items()},
    }


def _process(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The one process of a job, [name] replaced, and its name.

    Raises: RecipeError when there is none that trains.
    """
    config = value["config"]
    processes = config["process"]
    first = processes[0] if isinstance(processes, list) and processes else None
    if not isinstance(first, Mapping):
        raise RecipeError("config.process lists no process, so there is nothing to import")
    if first.get("type", "sd_trainer") not in _JOBS:
        raise RecipeError(
            f"config.process[0].type is {first.get('type')!r}, which trains no adapter; imported are {', '.join(sorted(_JOBS))}"
        )
    name = str(config.get("name") or "")
    replaced = _replaced(first, name)
    assert isinstance(replaced, Mapping), "a mapping stays one"
    return replaced, name


def _replaced(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value.replace("[name]", name)
    if isinstance(value, Mapping):
        return {str(key): _replaced(one, name) for key, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, name) for one in value]
    return value


def _outer(value: Mapping[str, Any]) -> list[Row]:
    """What stands outside the process."""
    rows = [Row("job", value["job"], "taken", "a training of an adapter")]
    config = value["config"]
    rows += [
        Row("config.name", config[key], "taken", "name")
        if key == "name"
        else Row(f"config.{key}", config[key], "left out", "not known here")
        for key in config
        if key != "process"
    ]
    rows += [
        Row(f"config.process[{number}]", "...", "left out", "one recipe is one training")
        for number in range(1, len(config["process"]))
    ]
    for key in value:
        if key not in {"job", "config"}:
            how = "no effect" if key == "meta" else "left out"
            why = (
                "the recipe's digest tells a file from others"
                if key == "meta"
                else "not known here"
            )
            rows.append(Row(key, value[key], how, why))  # type: ignore[arg-type]  # one of two verdicts
    return rows


def _base(found: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """The row of the base in _names.toml.

    Raises: RecipeError when the architecture is none of them and nobody says which.
    """
    arch = str(found.get("model.arch") or "").partition(":")[0]
    arch = arch or next(
        (name for flag, name in _OLD_FLAGS.items() if found.get(f"model.{flag}")), ""
    )
    path = str(found.get("model.name_or_path") or "").lower()
    rows = names()["base"]
    if asked.base is not None:
        family, _, variant = asked.base.partition(".")
        fits = [row for row in rows if row["family"] == family]
        same = [row for row in fits if row["variant"] == variant]
        like = (same or fits or [_ANY_BASE])[0]
        return {**like, "family": family, "variant": variant}
    fits = [
        row for row in rows if row["arch"] == arch and all(word in path for word in row["words"])
    ]
    if not fits:
        known = ", ".join(sorted({row["arch"] for row in rows}))
        raise RecipeError(
            f"model.arch {arch or 'none'!r} is no base that there is here ({known}); if it is another name for one, say "
            "--base FAMILY.VARIANT"
        )
    return max(fits, key=lambda row: len(row["words"]))


def _defaults(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the file leaves out and ai-toolkit fills in otherwise than we would."""
    defaults = {**network.DEFAULTS, **train.DEFAULTS, **model.DEFAULTS}
    if "network.rank" not in found:
        defaults["network.linear"] = 4
    if any(key.startswith("sample.") for key in found):
        defaults |= model.SAMPLE_DEFAULTS
    sets = dict.fromkeys(key.partition(".")[0] for key in found if key.startswith("datasets["))
    for one in sets:
        defaults |= {f"{one}.{key}": value for key, value in data.DEFAULTS.items()}
    return {f"{key}{DEFAULT}": value for key, value in defaults.items() if key not in found}


def _folder_name(text: str) -> str:
    return _NOT_IN_NAMES.sub("-", text).strip(".-")[:100] or "imported"


plugin = AiToolkitJob()
