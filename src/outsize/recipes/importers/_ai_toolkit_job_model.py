"""The model of an ai-toolkit job, how it is held, and what is sampled; read in toolkit/config_modules.py of 27a03a91."""

from __future__ import annotations

import re
from typing import Any

from outsize.recipes.importers._rows import (
    Draft,
    Rule,
    Told,
    if_on,
    names,
    number,
    told,
    took,
    truth,
    unless,
)

DEFAULTS: dict[str, Any] = {"model.quantize": False}
SAMPLE_DEFAULTS: dict[str, Any] = {
    "sample.width": 512,
    "sample.height": 512,
    "sample.guidance_scale": 7,
    "sample.sample_steps": 20,
    "sample.seed": 0,
}
_FLAG = re.compile(r"\s--?(?P<flag>[a-z]+)\s+(?P<value>\S+)")


def _source(draft: Draft, value: Any) -> Told:
    if draft.get("source") is not None:
        return "changed", "base.source, as --source says"
    draft.set("base.source", str(value))
    return "taken", "base.source"


def _arch(draft: Draft, _value: Any) -> Told:
    base = draft.recipe["base"]
    return "taken", f"base.family: {base['family']}, base.variant: {base['variant']}"


def _format_of(qtype: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = names()["format"]
    for row in rows:
        if re.fullmatch(row["qtype"], qtype):
            return row
    return {"name": rows[2]["name"], "is_same": False, "why": "not known here"}


def _quantize(draft: Draft, value: Any) -> Told:
    if not truth(value):
        draft.set("base.format", names()["choice"]["unpacked"])
        return "taken", "base.format: plain; nf4 takes a quarter of the memory"
    qtype = str(draft.get("model.qtype", "qfloat8")).partition("|")[0]
    row = _format_of(qtype)
    draft.set("base.format", row["name"])
    if row["is_same"]:
        return "changed", f"base.format: {row['name']}: {qtype} by other bytes"
    return "changed", f"base.format: {row['name']}: {qtype} is {row['why']}"


def _qtype(draft: Draft, value: Any) -> Told:
    if not truth(draft.get("model.quantize", False)):
        return "no effect", "nothing is quantised"
    name = draft.recipe["base"].get("format", names()["choice"]["unpacked"])
    adapter = " The adapter behind | is left out." if "|" in str(value) else ""
    swapped = (
        " ai-toolkit takes float8 in its place with layer_offloading."
        if value == "qfloat8" and truth(draft.get("model.layer_offloading", False))
        else ""
    )
    return "changed", f"base.format: {name}, see model.quantize.{adapter}{swapped}"


def _quantize_te(draft: Draft, value: Any) -> Told:
    base = draft.recipe["base"]
    if truth(value):
        is_swapped = draft.get("is_qtype_for_text")
        there = (
            " (ai-toolkit quantises this base's text encoder in model.qtype)" if is_swapped else ""
        )
        return "changed", f"text encoders are held in base.format{there}"
    if base.get("format", names()["choice"]["unpacked"]) == names()["choice"]["unpacked"]:
        return "no effect", "text encoders are held as the base is"
    return "changed", (
        "text encoders are held in base.format; base.components.SLOT.format: plain keeps one as it is"
    )


def _qtype_te(draft: Draft, _value: Any) -> Told:
    if not truth(draft.get("model.quantize_te", draft.get("model.quantize", False))):
        return "no effect", "text encoders are not quantised"
    return (
        "changed",
        "text encoders are held in base.format; base.components.SLOT.format holds one otherwise",
    )


def _offload(draft: Draft, _value: Any) -> Told:
    share = draft.get("model.layer_offloading_transformer_percent", 1.0)
    if number(share, 1.0) >= 1:
        draft.set("placement.kind", names()["choice"]["streamed"])
        return (
            "changed",
            "placement.kind: stream, block by block in the order of their use, rather than matrix by matrix",
        )
    return "changed", "placement.kind: auto, see layer_offloading_transformer_percent"


def _share(draft: Draft, value: Any) -> Told:
    if not truth(draft.get("model.layer_offloading", draft.get("model.auto_memory", False))):
        return "no effect", "nothing is offloaded"
    if float(value) >= 1:
        return "taken", "placement.kind: stream, nothing of the blocks stays on the card"
    return "changed", (
        f"there a coin is tossed for every matrix, with {float(value):g} for going to host memory, bytes not counted; here the "
        "plan keeps as many blocks on the card as fit, spread evenly (placement.resident_bytes says another number)"
    )


def _part(slots: tuple[str, ...]) -> Rule:
    def rule(draft: Draft, value: Any) -> Told:
        if value in (None, "", draft.get("model.name_or_path")):
            return "no effect", "from the base's source"
        found = [one for one in slots if one in draft.get("slots")]
        if not found:
            return "left out", "the base has no such part"
        for slot in found:
            draft.set(f"base.components.{slot}", {"source": str(value)})
        return "taken", ", ".join(f"base.components.{slot}.source" for slot in found)

    return rule


def _compile(draft: Draft, _value: Any) -> Told:
    draft.set("train.compile", True)
    return "changed", "train.compile: the blocks, kept between runs"


def _prompts(draft: Draft, value: Any) -> Told:
    if isinstance(value, str):
        raise TypeError("a list of texts")
    return _take_prompts(draft, [str(one) for one in value or ()])


def _samples(draft: Draft, value: Any) -> Told:
    if value and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        raise TypeError("a list of samples, each with a prompt")
    odd = sorted({key for one in value or () for key in one if key != "prompt"})
    verdict, how = _take_prompts(draft, [str(one.get("prompt", "")) for one in value or ()])
    if odd:
        return "changed", f"{how}; {', '.join(odd)} of single samples are left out"
    return verdict, how


def _take_prompts(draft: Draft, texts: list[str]) -> Told:
    word = draft.get("trigger_word") or ""
    flags = sorted({match["flag"] for one in texts for match in _FLAG.finditer(one)})
    plain = [_FLAG.sub("", one).replace("[trigger]", word).strip() for one in texts]
    kept = [one for one in dict.fromkeys(plain) if one]
    if not kept:
        return "no effect", "none"
    draft.set("compare.prompts", kept)
    notes = [f"flags are left out ({', '.join(flags)})"] if flags else []
    notes += ["[trigger] is replaced"] if any("[trigger]" in one for one in texts) else []
    notes += ["equal or empty ones are left out"] if len(kept) < len(texts) else []
    if notes:
        return "changed", f"compare.prompts: {'; '.join(notes)}"
    return "taken", "compare.prompts"


def _every(draft: Draft, value: Any) -> Told:
    if truth(draft.get("train.disable_sampling", False)) or not value:
        return "no effect", "no previews are made while training"
    draft.set("previews.every", int(value))
    return "taken", "previews.every"


def _not_at_start(draft: Draft, _value: Any) -> Told:
    draft.set("previews.at_start", False)
    return "taken", "previews.at_start: false"


def _sample_seed(draft: Draft, value: Any) -> Told:
    if value is None or int(value) < 0:
        return "changed", "compare.seeds: 0, as nothing is drawn at random"
    draft.set("compare.seeds", [int(value)])
    return "taken", "compare.seeds"


def _guidance(draft: Draft, value: Any) -> Told:
    draft.set("compare.guidance", float(value))
    return "taken", "compare.guidance"


def _negative(_draft: Draft, value: Any) -> Told:
    if not value:
        return "no effect", "empty"
    return "left out", "there is no negative prompt; true guidance is away from a blank one"


_KINDS = (
    "v2",
    "xl",
    "pixart",
    "pixart_sigma",
    "auraflow",
    "v3",
    "lumina2",
    "ssd",
    "vega",
    "v_pred",
)
_RULES: dict[str, Rule] = {
    "model.name_or_path": _source,
    "model.arch": _arch,
    "model.is_flux": if_on(_arch),
    "model.quantize": _quantize,
    "model.qtype": _qtype,
    "model.quantize_te": _quantize_te,
    "model.qtype_te": _qtype_te,
    "model.layer_offloading": if_on(_offload),
    "model.auto_memory": if_on(_offload),
    "model.layer_offloading_transformer_percent": _share,
    "model.vae_path": _part(("vae",)),
    "model.te_name_or_path": _part(("text_encoder", "text_encoder_2")),
    "model.extras_name_or_path": _part(("text_encoder", "text_encoder_2", "vae")),
    "model.compile": if_on(_compile),
    "model.model_kwargs": unless((None, {}), "of their program"),
    "model.model_paths": unless((None, {}), "base.components name the parts"),
    "sample.prompts": _prompts,
    "sample.samples": _samples,
    "sample.seed": _sample_seed,
    "sample.walk_seed": if_on(
        told(
            "changed",
            "every prompt has the same seeds (compare.seeds); there each has the next one",
        )
    ),
    "sample.sample_every": _every,
    "train.skip_first_sample": if_on(_not_at_start),
    "train.disable_sampling": if_on(told("taken", "no previews are made while training")),
    "sample.guidance_scale": _guidance,
    "sample.sample_steps": took("compare.steps", kind=int),
    "sample.width": took("compare.width", kind=int),
    "sample.height": took("compare.height", kind=int),
    "sample.neg": _negative,
}
WHOLE = frozenset({"sample.prompts", "sample.samples", "model.model_kwargs", "model.model_paths"})
RULES: dict[str, Rule] = {
    **{f"model.is_{kind}": told("no effect", "of another base") for kind in _KINDS},
    **_RULES,
}
