"""Checkpoints in 8-bit floats with scales: read as the product that they stand for, bit for bit, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantised_support import decoded_by_us
from scaled_support import (
    BFL,
    COMFYUI,
    COMFYUI_OLD,
    SPELLINGS,
    Kind,
    Spelling,
    mark,
    quantised,
    save,
)
from tiny import bfl_names, published_names, random_tensors
from torch import Tensor

from outsize.app import _taking
from outsize.app._merge_rows import OurRows
from outsize.app.prepare import How, prepare_in_cache
from outsize.app.wanted import Wanted, store_key, wanted
from outsize.base.errors import SourceError
from outsize.base.journal import Journal, read_journal
from outsize.families.protocol import FAMILIES
from outsize.formats._packing import Packing, assign
from outsize.formats.protocol import make_format
from outsize.weights import pieces
from outsize.weights.source import Source
from outsize.weights.store import Store

PREFIX = "model.diffusion_model."


def packing_of(family: str, name: str = "plain", rest: str = "fp32", **options: object) -> Packing:
    if name == "plain":
        options = {"dtype": "fp32", **options}
    table = FAMILIES.load(family).table("tiny")
    return assign(table, make_format(name, options), make_format("plain", {"dtype": rest}))


def want(source: Source, family: str, cache: Path, packing: Packing) -> Wanted:
    plugin: Any = FAMILIES.load(family)
    return wanted(
        name=family,
        table=plugin.table("tiny"),
        layouts=plugin.layouts("tiny"),
        source=source,
        packing=packing,
        cache_root=cache,
    )


def prepared(file: Path, family: str, cache: Path, packing: Packing) -> Store:
    with Source([file]) as source:
        return prepare_in_cache(want(source, family, cache, packing), How(2**30))


def packets(store: Store) -> list[bytes]:
    """Every block's bytes, without the headers, which tell the source apart."""
    return [store.path(file.block).read_bytes()[file.data_begin :] for file in store.files]


def base_tensors(family: str = "flux2") -> dict[str, Tensor]:
    plugin: Any = FAMILIES.load(family)
    return bfl_names(family, random_tensors(plugin.table("tiny"), 3, torch.bfloat16))


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("family", ["flux1", "flux2"])
@pytest.mark.parametrize("kind", ["tensor", "row", "group"])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda one: one.weight)
@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_a_scaled_file_is_read_as_the_products_that_it_stands_for(
    family: str, kind: Kind, spelling: Spelling, prefix: str, tmp_path: Path
) -> None:
    """Fused and swapped matrices included; the reference is fp64, rounded once to fp32."""
    file, exact = quantised(base_tensors(family), spelling, kind, prefix=prefix)
    packing = packing_of(family)
    ours = prepared(save(tmp_path / "a.safetensors", file), family, tmp_path / "a", packing)
    theirs = prepared(save(tmp_path / "b.safetensors", exact), family, tmp_path / "b", packing)
    assert packets(ours) == packets(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", ["e4m3", "e5m2"])
def test_scales_and_values_of_every_type_are_read(
    dtype: torch.dtype, values: Any, tmp_path: Path
) -> None:
    tensors = {name: 40 * one for name, one in base_tensors().items()}  # fp16 scales need it
    file, exact = quantised(tensors, COMFYUI_OLD, "row", values=values, scale_dtype=dtype)
    packing = packing_of("flux2")
    ours = prepared(save(tmp_path / "a.safetensors", file), "flux2", tmp_path / "a", packing)
    theirs = prepared(save(tmp_path / "b.safetensors", exact), "flux2", tmp_path / "b", packing)
    assert packets(ours) == packets(theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nf4", {}),
        ("nf4", {"scale_search": True, "rotation": "hadamard"}),
        ("int4", {}),
        ("int8", {"group": 64}),
        ("fp8", {"scales": "tensor"}),
        ("fp8", {"values": "e5m2"}),
        ("plain", {"dtype": "bf16"}),
    ],
)
@pytest.mark.parametrize("kind", ["tensor", "group"])
def test_what_is_read_goes_into_any_format(
    name: str, options: dict[str, object], kind: Kind, tmp_path: Path
) -> None:
    """The same bytes as of a file that holds the products."""
    file, exact = quantised(base_tensors(), COMFYUI, kind)
    packing = packing_of("flux2", name, "bf16", **options)
    ours = prepared(save(tmp_path / "a.safetensors", file), "flux2", tmp_path / "a", packing)
    theirs = prepared(save(tmp_path / "b.safetensors", exact), "flux2", tmp_path / "b", packing)
    assert packets(ours) == packets(theirs)


@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_e4m3_kept_in_fp8_is_not_rounded_again(kind: Kind, tmp_path: Path) -> None:
    """The codes are the file's own, fused ones cut by rows; they decode to exactly what the file stands for."""
    file, exact = quantised(base_tensors(), COMFYUI_OLD, kind)
    packing = packing_of("flux2", "fp8", "fp32")
    ours = prepared(save(tmp_path / "a.safetensors", file), "flux2", tmp_path / "a", packing)
    plain = packing_of("flux2")
    theirs = prepared(save(tmp_path / "b.safetensors", exact), "flux2", tmp_path / "b", plain)
    dtypes = dict.fromkeys(packing.shapes, torch.float32)
    found, wanted_ = decoded_by_us(ours, packing, dtypes), decoded_by_us(theirs, plain, dtypes)
    packed = [name for name, fmt in packing.formats.items() if fmt is packing.packed]
    equal = [name for name in packed if torch.equal(found[name], wanted_[name])]
    # every fourth matrix of the file is bf16 and has to be rounded
    assert 0.6 * len(packed) < len(equal) < len(packed)


def test_a_plain_cast_kept_in_fp8_is_not_rounded_again(tmp_path: Path) -> None:
    """`flux1-dev-fp8.safetensors` and its like: every tensor cast, nothing scaled."""
    tensors = {
        name: one.to(torch.float8_e4m3fn) if one.is_floating_point() else one
        for name, one in base_tensors().items()
    }
    exact = {name: one.float() for name, one in tensors.items()}
    packing, plain = packing_of("flux2", "fp8"), packing_of("flux2")
    ours = prepared(save(tmp_path / "a.safetensors", tensors), "flux2", tmp_path / "a", packing)
    theirs = prepared(save(tmp_path / "b.safetensors", exact), "flux2", tmp_path / "b", plain)
    dtypes = dict.fromkeys(packing.shapes, torch.float32)
    found, wanted_ = decoded_by_us(ours, packing, dtypes), decoded_by_us(theirs, plain, dtypes)
    assert all(torch.equal(found[name], one) for name, one in wanted_.items())


def test_the_cut_of_rows_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales follow their rows through windows and chunks of any height."""
    file, _ = quantised(base_tensors(), COMFYUI_OLD, "group")
    path = save(tmp_path / "a.safetensors", file)
    packing = packing_of("flux2", "nf4", "bf16")
    whole = packets(prepared(path, "flux2", tmp_path / "a", packing))
    monkeypatch.setattr(_taking, "_RESCALED", 300)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    assert packets(prepared(path, "flux2", tmp_path / "b", packing)) == whole


def test_another_scale_is_another_model(tmp_path: Path) -> None:
    """A store of the same codes with other scales must not be found for these."""
    file, _ = quantised(base_tensors(), COMFYUI_OLD)
    name = next(one for one in file if one.endswith(".scale_weight"))
    keys = []
    for number in range(2):
        path = save(tmp_path / f"{number}.safetensors", file)
        with Source([path]) as source:
            keys.append(store_key(want(source, "flux2", tmp_path / "c", packing_of("flux2"))))
        file = {**file, name: file[name] * 2}
    assert keys[0] != keys[1]


def test_the_same_bytes_in_another_type_are_another_model(tmp_path: Path) -> None:
    """fp16 and bf16 scales of the same bits mean other numbers."""
    file, _ = quantised(base_tensors(), COMFYUI_OLD, "row", scale_dtype=torch.bfloat16)
    other = {
        name: one.view(torch.float16) if name.endswith("scale_weight") else one
        for name, one in file.items()
    }
    keys = []
    for number, tensors in enumerate((file, other)):
        with Source([save(tmp_path / f"{number}.safetensors", tensors)]) as source:
            keys.append(store_key(want(source, "flux2", tmp_path / "c", packing_of("flux2"))))
    assert keys[0] != keys[1]


def test_a_stated_kind_is_read_where_every_matrix_has_its_scale(tmp_path: Path) -> None:
    """A config.json that says fp8 is no reason to refuse what is understood; a cast beside it would be."""
    file, _ = quantised(base_tensors(), BFL)
    stated = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    (tmp_path / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    with Source([save(tmp_path / "a.safetensors", file)]) as source:
        assert want(source, "flux2", tmp_path / "c", packing_of("flux2")).mapped.scaled
    norm = of(file, "key_norm.scale")
    cast = {**file, norm: file[norm].to(torch.float8_e4m3fn)}
    with (
        Source([save(tmp_path / "b.safetensors", cast)]) as source,
        pytest.raises(SourceError, match="is quantised as FP8, which is not read"),
    ):
        want(source, "flux2", tmp_path / "c", packing_of("flux2"))


def test_the_journal_says_what_was_read_by_scales(tmp_path: Path) -> None:
    file, _ = quantised(base_tensors(), COMFYUI)
    log = tmp_path / "journal.jsonl"
    with Source([save(tmp_path / "a.safetensors", file)]) as source:
        one = want(source, "flux2", tmp_path / "c", packing_of("flux2"))
        journal = Journal(log)
        prepare_in_cache(one, How(2**30, journal=journal))
        journal.close()
    (done,) = [row for row in read_journal(log) if row["event"] == "prepare_done"]
    assert (
        done["adopted"]
        == f"{len(one.mapped.scaled)} matrices read from 8-bit floats by their scales"
    )
    assert len(one.mapped.scaled) > 10
    assert not any("scale_weight" in name for name in one.mapped.extra)


# ---------------------------------------------------------------- what is refused


def of(file: Mapping[str, Tensor], end: str) -> str:
    """The first name with an end."""
    return next(name for name in file if name.endswith(end))


def without(file: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: one for key, one in file.items() if key != name}


WEIGHT = "double_blocks.0.img_attn.proj.weight"
MODULE = "double_blocks.0.img_attn.proj"

FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "a second scale": (
        lambda f: {**f, f"{MODULE}.scale_weight": torch.tensor(1.0)},
        f"{WEIGHT} has scales twice: {MODULE}.scale_weight, {MODULE}.weight_scale",
    ),
    "an unknown name": (
        lambda f: {**f, f"{MODULE}.weight_factor": torch.tensor(1.0)},
        f"{WEIGHT} has {MODULE}.weight_factor beside it, and what that does to it is not known",
    ),
    "below the weight": (
        lambda f: {**f, f"{WEIGHT}.zero_point": torch.tensor(1.0)},
        f"{WEIGHT} has {WEIGHT}.zero_point beside it",
    ),
    "no scale": (
        lambda f: without(f, f"{MODULE}.weight_scale"),
        f"{WEIGHT} is F8_E4M3 without a scale, where ",
    ),
    "a misshapen scale": (
        lambda f: {**f, f"{MODULE}.weight_scale": torch.ones(2, 2)},
        f"{WEIGHT} has shape [64, 64] and scales of shape [2, 2] in {MODULE}.weight_scale: neither one, nor",
    ),
    "groups that do not divide a row": (
        lambda f: {**f, f"{MODULE}.weight_scale": torch.ones(64, 7)},
        "scales of shape [64, 7]",
    ),
    "no scales at all": (
        lambda f: {**f, f"{MODULE}.weight_scale": torch.ones(0)},
        "scales of shape [0]",
    ),
    "a scale in 8 bits": (
        lambda f: {**f, f"{MODULE}.weight_scale": torch.ones(64, 2).to(torch.float8_e4m3fn)},
        f"is scaled by {MODULE}.weight_scale, which is F8_E4M3, expected one of F32, BF16, F16",
    ),
    "a weight that is no longer in 8 bits": (
        lambda f: {**f, WEIGHT: f[WEIGHT].to(torch.bfloat16)},
        f"{WEIGHT} is BF16, yet {MODULE}.weight_scale lies beside it",
    ),
    "another kind in its mark": (
        lambda f: {**f, f"{MODULE}.comfy_quant": mark(format="nvfp4")},
        f"{WEIGHT} is F8_E4M3, but nvfp4 in comfy_quant",
    ),
    "turned": (
        lambda f: {**f, f"{MODULE}.comfy_quant": mark(format="float8_e4m3fn", convrot=True)},
        "says convrot: True in comfy_quant, and what that does to it is not known",
    ),
    "a mark that is no JSON": (
        lambda f: {**f, f"{MODULE}.comfy_quant": torch.tensor([1, 2], dtype=torch.uint8)},
        f"{WEIGHT} has a comfy_quant that cannot be read",
    ),
    "a mark of megabytes": (
        lambda f: {**f, f"{MODULE}.comfy_quant": torch.zeros(20_000, dtype=torch.uint8)},
        f"{WEIGHT} has a comfy_quant that cannot be read",
    ),
    "integers": (
        lambda f: {**f, WEIGHT: torch.ones(64, 64, dtype=torch.int8)},
        f"{WEIGHT} is stored as I8: these weights are already quantised",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_understood_is_named(fault: str, tmp_path: Path) -> None:
    """A scale that is left out is a model a thousand times too large, and nothing would say so."""
    change, words = FAULTS[fault]
    file, _ = quantised(base_tensors(), COMFYUI)
    file |= {
        f"{MODULE}.weight_scale": torch.tensor(0.01),
        WEIGHT: file[WEIGHT].to(torch.float8_e4m3fn),
    }
    path = save(tmp_path / "a.safetensors", change(file))
    with Source([path]) as source, pytest.raises(SourceError) as caught:
        want(source, "flux2", tmp_path / "c", packing_of("flux2"))
    assert words in str(caught.value), str(caught.value)


def test_all_that_is_not_understood_is_named_at_once_with_the_remedy(tmp_path: Path) -> None:
    file, _ = quantised(base_tensors(), COMFYUI_OLD)
    names = [name for name in file if name.endswith(".scale_weight")]
    file |= {name.replace("scale_weight", "offset"): torch.zeros(()) for name in names}
    path = save(tmp_path / "a.safetensors", file)
    with Source([path]) as source, pytest.raises(SourceError) as caught:
        want(source, "flux2", tmp_path / "c", packing_of("flux2"))
    message = str(caught.value)
    assert "8-bit floats with scales that are not understood" in message
    assert f"in 8 bits ({len(names)}):" in message
    assert "take the model's bf16 files" in message


@pytest.mark.parametrize("layer", [MODULE, PREFIX + MODULE])
def test_what_a_header_says_of_modules_is_heeded(layer: str, tmp_path: Path) -> None:
    """ComfyUI keeps its marks there too, with the model's prefix or without."""
    file, _ = quantised(base_tensors(), COMFYUI_OLD, prefix=PREFIX)
    file |= {
        f"{PREFIX}{MODULE}.scale_weight": torch.tensor(0.01),
        PREFIX + WEIGHT: file[PREFIX + WEIGHT].to(torch.float8_e4m3fn),
    }
    for words, fault in (
        ({"format": "float8_e4m3fn"}, None),
        ({"format": "float8_e4m3fn", "convrot": True}, "says convrot: True in _quantization_meta"),
    ):
        stated = json.dumps({"format_version": "1.0", "layers": {layer: words}})
        path = save(tmp_path / "a.safetensors", file, _quantization_metadata=stated)
        with Source([path]) as source:
            if fault is None:
                want(source, "flux2", tmp_path / "c", packing_of("flux2"))
                continue
            with pytest.raises(SourceError, match=fault):
                want(source, "flux2", tmp_path / "c", packing_of("flux2"))
    path = save(tmp_path / "a.safetensors", file, _quantization_metadata="[")
    with Source([path]) as source, pytest.raises(SourceError, match="which cannot be read"):
        want(source, "flux2", tmp_path / "c", packing_of("flux2"))


def test_nothing_is_merged_into_a_file_whose_numbers_are_products(tmp_path: Path) -> None:
    """Taken by our names, codes would be written without their scales, whether or not a delta is added to them."""
    file, _ = quantised(base_tensors(), COMFYUI_OLD)
    plugin: Any = FAMILIES.load("flux2")
    layout = next(one for one in plugin.layouts("tiny") if one.rules)
    with Source([save(tmp_path / "a.safetensors", file)]) as source:
        mapped = source.locate(plugin.layouts("tiny"), plugin.table("tiny"))
        nothing: Any = SimpleNamespace(modules=())
        with pytest.raises(SourceError, match=r"neither in 16 nor 32 bits[^!]* is F8_E4M3"):
            OurRows(mapped, packing_of("flux2"), nothing, layout=layout, prefix="", extra=())


# ---------------------------------------------------------------- whole checkpoints


def test_every_model_is_found_in_a_whole_checkpoint(tmp_path: Path) -> None:
    """One file with all four below ComfyUI's paths; the base is cast, a text encoder scaled: neither disturbs the other."""
    whole = {
        PREFIX + name: one.to(torch.float8_e4m3fn) for name, one in base_tensors("flux1").items()
    }
    exact = {name: one.float() for name, one in whole.items()}
    below = {
        "clip_text": "text_encoders.clip_l.transformer.",
        "t5_text": "text_encoders.t5xxl.transformer.",
        "autoencoder_kl": "vae.",
    }
    for number, (family, prefix) in enumerate(below.items()):
        plugin: Any = FAMILIES.load(family)
        tensors = random_tensors(plugin.table("tiny"), number, torch.bfloat16)
        named = (
            bfl_names(family, tensors)
            if family == "autoencoder_kl"
            else published_names(family, "tiny", tensors, number)
        )
        if family == "t5_text":
            scaled, products = quantised(named, COMFYUI_OLD, prefix=prefix)
        else:
            scaled = {prefix + name: one for name, one in named.items()}
            products = {name: one.float() for name, one in scaled.items()}
        whole |= scaled
        exact |= products
    files = [save(tmp_path / "a.safetensors", whole), save(tmp_path / "b.safetensors", exact)]
    for family in ("flux1", *below):
        packing = packing_of(family)
        one, other = (
            packets(prepared(file, family, tmp_path / file.stem, packing)) for file in files
        )
        assert one == other


def test_the_second_codec_is_found_as_comfyui_saves_it(tmp_path: Path) -> None:
    """`flux2-vae.safetensors` holds BFL's names; saved by ComfyUI, two convolutions lie outside."""
    plugin: Any = FAMILIES.load("autoencoder_kl_flux2")
    named = bfl_names("autoencoder_kl_flux2", random_tensors(plugin.table("tiny"), 1))
    outside = {
        name.replace("encoder.quant_conv", "quant_conv").replace(
            "decoder.post_quant_conv", "post_quant_conv"
        ): one
        for name, one in named.items()
    }
    assert outside.keys() != named.keys()
    packing = packing_of("autoencoder_kl_flux2")
    found = [
        packets(
            prepared(
                save(tmp_path / f"{number}.safetensors", one),
                "autoencoder_kl_flux2",
                tmp_path / str(number),
                packing,
            )
        )
        for number, one in enumerate((named, outside))
    ]
    assert found[0] == found[1]
