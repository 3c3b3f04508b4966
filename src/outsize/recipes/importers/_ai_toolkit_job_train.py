"""How an ai-toolkit job trains; read in toolkit/config_modules.py, optimizer.py and scheduler.py, SDTrainer.py of 27a03a91."""

from __future__ import annotations

import math
from typing import Any

from outsize.recipes.importers._rows import (
    Draft,
    Rule,
    Told,
    if_on,
    names,
    number,
    took,
    truth,
    unless,
)

DEFAULTS: dict[str, Any] = {
    "train.batch_size": 1,
    "train.steps": 1000,
    "train.lr": 1e-6,
    "train.optimizer": "adamw",
    "train.lr_scheduler": "constant",
    "train.max_grad_norm": 1.0,
    "train.timestep_type": "sigmoid",
    "train.content_or_style": "balanced",
    "train.cfg_scale": 1.0,
    "train.loss_type": "mse",
}
_EPSILON = 1e-6  # whatever the optimizer, unless its parameters say
_OTHER_LAWS = {"shift", "flux_shift", "lumina2_shift"}
_LEVELS = 1000


def _steps(draft: Draft, value: Any) -> Told:
    each = max(1, int(number(draft.get("train.gradient_accumulation_steps"), 1)))
    draft.set("train.steps", math.ceil(int(value) / each))
    if each == 1:
        return "taken", "train.steps"
    return "changed", f"train.steps counts updates: {value} passes of which {each} make one"


def _accumulation_steps(draft: Draft, value: Any) -> Told:
    if value in (None, 1):
        return "no effect", "one pass an update"
    if value == -1:
        return "left out", "a whole epoch an update; set train.accumulate"
    draft.set("train.accumulate", int(value))
    return "changed", (
        "train.accumulate: all passes are averaged; ai-toolkit clears the gradients before each, so that only the last of "
        "them counts"
    )


def _accumulation(draft: Draft, value: Any) -> Told:
    if value in (None, 1):
        return "no effect", "one pass an update"
    draft.set("train.accumulate", int(value))
    return "changed", (
        "train.accumulate: averaged, there summed; train.clip_norm is divided by it, so that the same updates come out"
    )


def _clip(draft: Draft, value: Any) -> Told:
    if not value:
        draft.set("train.clip_norm", None)
        return "taken", "train.clip_norm: null"
    each = max(1, int(number(draft.get("train.gradient_accumulation"), 1)))
    draft.set("train.clip_norm", float(value) / each)
    return (
        ("taken", "train.clip_norm")
        if each == 1
        else ("changed", "train.clip_norm, of an average rather than a sum")
    )


def _learning_rate(draft: Draft, value: Any) -> Told:
    rate = float(value)
    if str(draft.get("train.optimizer")).lower().startswith("prodigy") and rate < 0.1:
        draft.set("train.learning_rate", 1.0)
        return (
            "changed",
            "train.learning_rate: 1.0, as ai-toolkit does for this optimizer when it is below 0.1",
        )
    draft.set("train.learning_rate", rate)
    return "taken", "train.learning_rate"


def _optimizer(draft: Draft, value: Any) -> Told:
    draft.set("train.epsilon", _EPSILON)
    theirs = str(value).lower()
    row = next((one for one in names()["optimizer"] if one["theirs"] == theirs), None)
    chosen = row or names()["optimizer"][0]
    draft.set("train.optimizer", chosen["name"])
    if theirs.startswith(("adam8", "prodigy")) or theirs in {"adam", "adam8bit"}:
        draft.set("train.weight_decay", 0.0)
    if theirs == "adamw8":
        draft.set("train.weight_decay", 0.0)
    if row is None:
        return (
            "changed",
            f"train.optimizer: {chosen['name']}, as {value} is not among the optimizers here; look at learning_rate too",
        )
    if "why" in row:
        return "changed", f"train.optimizer: {chosen['name']}: {row['why']}"
    return "taken", f"train.optimizer, and its epsilon of {_EPSILON:g} there"


def _betas(draft: Draft, value: Any) -> Told:
    if isinstance(value, list) and len(value) == 2:
        draft.set("train.betas", [float(one) for one in value])
        return "taken", "train.betas"
    return "left out", "train.betas are two numbers"


def _schedule(draft: Draft, value: Any) -> Told:
    name = str(value).lower()
    if name == "constant":
        return "taken", "train.schedule"
    if name == "constant_with_warmup":
        given = int(number(draft.get("train.lr_scheduler_params.num_warmup_steps"), 1000))
        draft.set("train.warmup_steps", given)
        return "taken", f"train.warmup_steps: {given}"
    if name == "cosine":
        draft.set("train.schedule", "cosine")
        draft.set("train.schedule_floor", 0.0)
        return "taken", "train.schedule, down to nothing as there"
    if name == "linear":
        return (
            "changed",
            "constant: their linear schedule goes from a third to the whole in five steps",
        )
    return "changed", f"constant: there is no schedule {value} here"


def _timesteps(draft: Draft, value: Any) -> Told:
    name, style = str(value), str(draft.get("train.content_or_style"))
    if style in {"content", "style"} and name not in {"linear", "weighted"}:
        return (
            "changed",
            f"train.timesteps.law: {style}, over levels rather than over their table of {name}",
        )
    if name == "sigmoid":
        draft.set("train.timesteps.law", "logit_normal")
        return (
            "taken",
            "train.timesteps.law: logit_normal; there drawn from a table of a thousand such levels, made anew each step",
        )
    if name == "linear":
        draft.set("train.timesteps.law", "uniform")
        return "taken", "train.timesteps.law: uniform"
    if name == "weighted":
        draft.set("train.timesteps.law", "uniform")
        draft.set("train.loss.weighting", "ai_toolkit")
        return (
            "taken",
            "train.timesteps.law: uniform, with train.loss.weighting: ai_toolkit, its table of a thousand weights",
        )
    if name in _OTHER_LAWS:
        draft.set("train.timesteps.law", "shifted")
        return "changed", (
            "train.timesteps.law: shifted by resolution, of levels that are logit-normal before; there uniform before"
        )
    return "changed", f"train.timesteps.law is the family's own; there is no law {name} here"


def _style(draft: Draft, value: Any) -> Told:
    if value in (None, "balanced"):
        return "no effect", "no style or content is favoured"
    draft.set("train.timesteps.law", str(value))
    return "taken", f"train.timesteps.law: {value}"


def _bell(weighting: str) -> Rule:
    def rule(draft: Draft, _value: Any) -> Told:
        draft.set("train.timesteps.law", "uniform")
        draft.set("train.loss.weighting", weighting)
        return "taken", f"train.timesteps.law: uniform, with train.loss.weighting: {weighting}"

    return if_on(rule)


def _bound(draft: Draft, value: Any) -> Told:
    is_lowest_index = draft.where.endswith("min_denoising_steps")
    if value is None or int(value) == (0 if is_lowest_index else _LEVELS - 1):
        return "no effect", "all levels"
    level = 1 - int(value) / _LEVELS
    draft.set(f"train.timesteps.{'highest' if is_lowest_index else 'lowest'}", round(level, 6))
    is_level = draft.get("train.timestep_type") in ("linear", "weighted")
    return ("taken" if is_level else "changed"), (
        "train.timesteps: a bound of the level, where theirs is a place in the table of levels, the noisiest first"
    )


def _loss(draft: Draft, value: Any) -> Told:
    if value in (None, "mse"):
        return "taken", "train.loss.kind"
    if value == "mae":
        draft.set("train.loss.kind", "mae")
        return "taken", "train.loss.kind: mae"
    if value == "pseudo_huber":
        draft.set(
            "train.loss",
            {**draft.recipe.get("train", {}).get("loss", {}), "kind": "smooth_l1", "c": 0.01},
        )
        return (
            "changed",
            "train.loss.kind: smooth_l1 with c 0.01, twice their value, which only the clipping notices",
        )
    return "changed", f"mse: there is no loss {value} here"


def _guidance(draft: Draft, value: Any) -> Told:
    if not draft.get("has_guidance"):
        return "no effect", "the base takes no guidance"
    draft.set("train.guidance", float(value))
    return "taken", "train.guidance"


def _bypass(draft: Draft, _value: Any) -> Told:
    if not draft.get("has_guidance") or draft.get("model.arch") not in ("flux", None):
        return "no effect", "ai-toolkit passes over it for this base"
    return "left out", "the guidance embedding is kept, at train.guidance"


def _ema(draft: Draft, _value: Any) -> Told:
    draft.set("train.ema", float(number(draft.get("train.ema_config.ema_decay"), 0.999)))
    return "changed", (
        "train.ema: weights and their average are both saved (checkpoints.weights says which are used); there the average is "
        "saved as the adapter and begins anew with every resume"
    )


def _unload(draft: Draft, _value: Any) -> Told:
    if truth(draft.get("train.cache_text_embeddings", False)):
        return "no effect", "text encoders are always gone before training"
    return "changed", (
        "captions are learned here, and the text encoder is gone before training all the same; there this alone replaces every "
        "caption by a blank or by the trigger word"
    )


def _reg_weight(draft: Draft, value: Any) -> Told:
    if value in (None, 1):
        return "no effect", "one"
    changed = [
        one for one in draft.recipe.get("data", {}).get("sets", []) if one.get("is_regularisation")
    ]
    for one in changed:
        one["loss_weight"] = float(one.get("loss_weight", 1.0)) * float(value)
    return (
        ("taken", "data.sets: loss_weight of the regularisation sets")
        if changed
        else ("no effect", "no such sets")
    )


def _seed(draft: Draft, value: Any) -> Told:
    if value is None:
        return "no effect", "train.seed is 0, and every run the same"
    draft.set("train.seed", int(value))
    return "taken", "train.seed"


def _rate_of(draft: Draft, value: Any) -> Told:
    if value in (None, draft.get("train.lr")):
        return "no effect", "that of train.lr"
    draft.set("train.learning_rate", float(value))
    return "taken", "train.learning_rate, as it stands above train.lr"


RULES: dict[str, Rule] = {
    "train.batch_size": took("train.batch", kind=int),
    "train.steps": _steps,
    "train.lr": _learning_rate,
    "train.unet_lr": _rate_of,
    "train.optimizer": _optimizer,
    "train.optimizer_params.weight_decay": took("train.weight_decay", kind=float),
    "train.optimizer_params.betas": _betas,
    "train.optimizer_params.eps": took("train.epsilon", kind=float),
    "train.optimizer_params.d_coef": took("train.optimizer_options.d_coef", kind=float),
    "train.lr_scheduler": _schedule,
    "train.gradient_accumulation_steps": _accumulation_steps,
    "train.gradient_accumulation": _accumulation,
    "train.max_grad_norm": _clip,
    "train.noise_scheduler": unless(
        (None, "flowmatch"), "these bases are trained by rectified flow"
    ),
    "train.timestep_type": _timesteps,
    "train.content_or_style": _style,
    "train.linear_timesteps": _bell("bell"),
    "train.linear_timesteps2": _bell("half_bell"),
    "train.min_denoising_steps": _bound,
    "train.max_denoising_steps": _bound,
    "train.loss_type": _loss,
    "train.loss_target": unless((None, "noise"), "the velocity is learned", "as here"),
    "train.cfg_scale": _guidance,
    "train.bypass_guidance_embedding": if_on(_bypass),
    "train.ema_config.use_ema": if_on(_ema),
    "train.ema_config.param_multiplier": unless((None, 1, 1.0), "weights are not grown"),
    "train.unload_text_encoder": if_on(_unload),
    "train.reg_weight": _reg_weight,
    "train.train_unet": unless((None, True), "the adapter is always trained", "as here"),
    "training_seed": _seed,
}
