"""The network of an ai-toolkit job, and what is saved of it; read in toolkit/config_modules.py, lora_special.py of 27a03a91."""

from __future__ import annotations

from typing import Any

from outsize.recipes.importers._rows import Draft, Rule, Told, took, truth

DEFAULTS: dict[str, Any] = {
    "network.type": "lora",
    "network.transformer_only": True,
    "save.save_every": 1000,
    "save.max_step_saves_to_keep": 5,
}


def _kind(_draft: Draft, value: Any) -> Told:
    if str(value).lower() == "lora":
        return "taken", "a low-rank adapter"
    return "left out", f"{value} is another kind of adapter; a low-rank one is trained"


def _rank(draft: Draft, value: Any) -> Told:
    rank = int(value)
    draft.set("adapter.rank", min(rank, 2048))
    return ("taken", "adapter.rank") if rank <= 2048 else ("changed", "adapter.rank, at most 2048")


def _alpha(draft: Draft, value: Any) -> Told:
    rank = draft.get("network.linear", draft.get("network.rank", 4))
    if value == rank:
        return "taken", "adapter.alpha is the rank when it is left out"
    return "changed", (
        f"ai-toolkit trains these bases with alpha = rank ({rank}) whatever the file says, and so does this recipe, which "
        f"leaves alpha out; a scale of {value} / {rank} would be another training"
    )


def _everywhere(draft: Draft, value: Any) -> Told:
    roles = draft.get("roles")
    draft.set("adapter.roles", roles)
    if truth(value):
        return (
            "taken",
            f"adapter.roles: {', '.join(roles)}, all linears inside the blocks, as there",
        )
    return "changed", "only linears inside the blocks get an adapter"


def _start(draft: Draft, value: Any) -> Told:
    if not value:
        return "no effect", "none"
    draft.set("adapter.start", str(value))
    return (
        "taken",
        "adapter.start; it must fit in every key, while there what does not is passed over",
    )


def _save_dtype(_draft: Draft, _value: Any) -> Told:
    return (
        "changed",
        "weights are saved in fp32, as they are trained; `outsize export` writes what other programs read",
    )


RULES: dict[str, Rule] = {
    "network.type": _kind,
    "network.linear": _rank,
    "network.rank": _rank,
    "network.linear_alpha": _alpha,
    "network.transformer_only": _everywhere,
    "network.pretrained_lora_path": _start,
    "save.dtype": _save_dtype,
    "save.save_every": took("checkpoints.every", kind=int),
    "save.max_step_saves_to_keep": took("checkpoints.keep", kind=int),
}
