"""Dialects: fusing and splitting are exact on any layout, and the clients themselves read what we write.

Factors in these tests are small multiples of 1/8, so that every product and sum is exact in fp32 whatever the order of
addition: where deltas are the same, the difference is 0.0 and not "small".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from outsize.base.errors import AdapterError, RecipeError
from outsize.base.layout import Layout, Rule
from outsize.dialects._fuse import fuse, split
from outsize.dialects.protocol import (
    DIALECTS,
    AdapterWeights,
    JsonFile,
    LoraPair,
    TensorFile,
    dialect_of,
)
from outsize.families.protocol import FAMILIES

BASES = [name for name in FAMILIES.names() if hasattr(FAMILIES.load(name), "predict")]
TINY = [
    (name, variant)
    for name in BASES
    for variant in FAMILIES.load(name).variants
    if variant.startswith("tiny")
]
QKV = Layout(
    "original",
    (
        Rule("blocks.{i}.q.weight", "layers.{i}.qkv.weight", part=(0, 3)),
        Rule("blocks.{i}.k.weight", "layers.{i}.qkv.weight", part=(1, 3)),
        Rule("blocks.{i}.v.weight", "layers.{i}.qkv.weight", part=(2, 3)),
        Rule("blocks.{i}.out.weight", "layers.{i}.proj.weight"),
        Rule("last.weight", "final.weight", is_swapped=True),
    ),
)


def eighths(rows: int, columns: int, seed: int) -> Tensor:
    """A matrix of multiples of 1/8 between -1 and 1, none of them zero."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(1, 9, (rows, columns), generator=generator)
    sign = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    return (size * sign).float() / 8


def pair(num_in: int, num_out: int, rank: int, seed: int = 0) -> LoraPair:
    return LoraPair(eighths(rank, num_in, 2 * seed), eighths(num_out, rank, 2 * seed + 1))


def deltas(adapter: AdapterWeights) -> dict[str, Tensor]:
    return {name: p.B.double() @ p.A.double() * adapter.scale for name, p in adapter.pairs.items()}


def assert_same_pairs(got: Mapping[str, LoraPair], wanted: Mapping[str, LoraPair]) -> None:
    assert set(got) == set(wanted)
    for name, p in wanted.items():
        assert torch.equal(got[name].A, p.A), name
        assert torch.equal(got[name].B, p.B), name


# --- fuse and split, on random layouts -----------------------------------------------------------


@st.composite
def layouts_and_shapes(
    draw: st.DrawFn,
) -> tuple[Layout, dict[str, tuple[int, int, str, list[int]]]]:
    """A layout, and of each of our modules: inputs, outputs, their module, the rows it holds there in our order."""
    rules: list[Rule] = []
    shapes: dict[str, tuple[int, int, str, list[int]]] = {}
    for target in range(draw(st.integers(1, 3))):
        theirs, num_in = f"their.{target}.fc", draw(st.integers(1, 5))
        kind = draw(st.sampled_from(["plain", "swapped", "slabs"]))
        if kind == "slabs":
            edges = sorted(draw(st.sets(st.integers(0, 7), min_size=2, max_size=5)) | {0})
            unit = draw(st.integers(1, 2))
            for start, stop in pairwise(edges):
                ours = f"our.{target}.part{start}"
                rules.append(
                    Rule(
                        f"{ours}.weight", f"{theirs}.weight", (start, edges[-1]), span=stop - start
                    )
                )
                rows = list(range(start * unit, stop * unit))
                shapes[ours] = (num_in, len(rows), theirs, rows)
        else:
            half = draw(st.integers(1, 3))
            rows = list(range(2 * half))
            if kind == "swapped":
                rows = rows[half:] + rows[:half]
            rules.append(
                Rule(f"our.{target}.weight", f"{theirs}.weight", is_swapped=kind == "swapped")
            )
            shapes[f"our.{target}"] = (num_in, 2 * half, theirs, rows)
    return Layout("random", tuple(draw(st.permutations(rules)))), shapes


@settings(max_examples=150, deadline=None)
@given(layouts_and_shapes(), st.integers(1, 4), st.data())
def test_fused_pairs_have_the_rows_of_ours_and_split_back_bit_for_bit(
    case: tuple[Layout, dict[str, tuple[int, int, str, list[int]]]], rank: int, data: st.DataObject
) -> None:
    layout, shapes = case
    chosen = data.draw(st.sets(st.sampled_from(sorted(shapes)), min_size=1))
    ours = {
        name: pair(shapes[name][0], shapes[name][1], rank, seed)
        for seed, name in enumerate(sorted(chosen))
    }
    num_rows: dict[str, int] = {}
    for _, num_out, theirs, _ in shapes.values():
        num_rows[theirs] = num_rows.get(theirs, 0) + num_out
    wanted = {
        shapes[name][2]: torch.zeros(num_rows[shapes[name][2]], shapes[name][0]).double()
        for name in chosen
    }
    for name in chosen:
        rows = torch.tensor(shapes[name][3])
        wanted[shapes[name][2]][rows] = ours[name].B.double() @ ours[name].A.double()

    fused = fuse(ours, layout)

    assert set(fused) == set(wanted)
    for theirs, delta in wanted.items():
        assert torch.equal(fused[theirs].B.double() @ fused[theirs].A.double(), delta)
    assert_same_pairs(split(fused, layout), ours)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 7), st.integers(1, 2), st.integers(0, 2**20), st.integers(0, 2))
def test_any_fused_pair_splits_into_exactly_its_rows_whatever_its_zeros(
    rank: int, unit: int, seed: int, sparsity: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randint(0, 2 + sparsity, (3 * unit, rank), generator=generator) == 0
    whole = LoraPair(eighths(rank, 4, seed), eighths(3 * unit, rank, seed + 1) * mask)
    parts = split({"layers.0.qkv": whole}, QKV)
    delta = whole.B.double() @ whole.A.double()
    for place, name in enumerate("qkv"):
        rows = delta[place * unit : (place + 1) * unit]
        part = parts.get(f"blocks.0.{name}")
        assert torch.equal(rows, part.B.double() @ part.A.double() if part else 0 * rows)


def test_a_part_without_an_adapter_gets_zero_rows_and_no_columns() -> None:
    fused = fuse({"blocks.0.q": pair(4, 2, 3), "blocks.0.v": pair(4, 2, 3, 1)}, QKV)["layers.0.qkv"]
    assert fused.B.shape == (6, 6)
    assert not fused.B[2:4].any()


def test_a_dense_fused_pair_of_another_trainer_gives_each_part_all_columns() -> None:
    whole = pair(4, 6, 5)
    parts = split({"layers.3.qkv": whole}, QKV)
    assert set(parts) == {"blocks.3.q", "blocks.3.k", "blocks.3.v"}
    assert all(torch.equal(part.A, whole.A) for part in parts.values())


def test_all_modules_that_a_layout_does_not_cover_are_named_at_once() -> None:
    with pytest.raises(AdapterError, match=r"(?s)2 faults.*strange\.1.*strange\.2") as caught:
        fuse(
            {"strange.1": pair(4, 2, 1), "blocks.0.q": pair(4, 2, 1), "strange.2": pair(4, 2, 1)},
            QKV,
        )
    assert "blocks.0.q" not in str(caught.value).replace("\n", " ")


def test_parts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(AdapterError, match="share one input"):
        fuse({"blocks.0.q": pair(4, 2, 1), "blocks.0.k": pair(5, 2, 1)}, QKV)
    with pytest.raises(AdapterError, match="do not make up one matrix"):
        fuse({"blocks.0.q": pair(4, 2, 1), "blocks.0.k": pair(4, 3, 1)}, QKV)
    with pytest.raises(AdapterError, match="7 rows do not divide"):
        split({"layers.0.qkv": pair(4, 7, 1)}, QKV)


# --- keys ----------------------------------------------------------------------------------------


def test_every_unknown_missing_and_misshapen_key_of_a_file_is_named_at_once() -> None:
    good = "diffusion_model.layers.0.proj"
    file = TensorFile(
        {
            f"{good}.lora_A.weight": torch.ones(1, 4),
            f"{good}.lora_B.weight": torch.ones(4, 1),
            "diffusion_model.layers.1.proj.lora_A.weight": torch.ones(1, 4),
            "diffusion_model.layers.2.proj.lora_A.weight": torch.ones(2, 4),
            "diffusion_model.layers.2.proj.lora_B.weight": torch.ones(4, 3),
            "diffusion_model.layers.3.proj.dora_scale": torch.ones(4),
            "text_model.proj.lora_A.weight": torch.ones(1, 4),
        },
        {},
    )
    with pytest.raises(AdapterError, match="4 faults") as caught:
        DIALECTS.load("diffusion_model").read({"x.safetensors": file}, [QKV])
    message = str(caught.value)
    assert "layers.1.proj: factor B missing" in message
    assert "layers.2.proj: A (2, 4) and B (4, 3)" in message
    assert "layers.3.proj.dora_scale" in message
    assert "text_model.proj.lora_A.weight" in message
    assert "layers.0" not in message


def spelt_otherwise(pairs: Mapping[str, LoraPair], alphas: Mapping[str, float]) -> TensorFile:
    tensors = {}
    for module, p in pairs.items():
        tensors[f"diffusion_model.{module}.lora_down.weight"] = p.A
        tensors[f"diffusion_model.{module}.lora_up.weight"] = p.B
        if module in alphas:
            tensors[f"diffusion_model.{module}.alpha"] = torch.tensor(alphas[module])
    return TensorFile(tensors, {})


def test_a_file_with_the_other_spelling_and_its_own_alphas_is_read_with_them() -> None:
    """As kohya's tools and others write it: alpha beside each module, scale alpha / rank."""
    p = pair(4, 4, 4)
    file = spelt_otherwise({"layers.0.proj": p}, {"layers.0.proj": 2.0})
    adapter = DIALECTS.load("diffusion_model").read({"x.safetensors": file}, [QKV])
    assert (adapter.rank, adapter.alpha) == (4, 2.0)
    assert torch.equal(adapter.pairs["blocks.0.out"].B, p.B)


def test_scales_that_differ_between_modules_are_multiplied_into_b() -> None:
    """A missing alpha is a scale of 1."""
    ours = {f"layers.{i}.proj": pair(4, 4, 4, i) for i in range(3)}
    file = spelt_otherwise(ours, {"layers.0.proj": 2.0, "layers.1.proj": 8.0})
    adapter = DIALECTS.load("diffusion_model").read({"x.safetensors": file}, [QKV])
    assert adapter.scale == 1.0
    for i, factor in enumerate((0.5, 2.0, 1.0)):
        assert torch.equal(adapter.pairs[f"blocks.{i}.out"].B, ours[f"layers.{i}.proj"].B * factor)


def test_an_alpha_of_a_fused_module_counts_by_the_rank_of_the_whole() -> None:
    """Rank 6 of a dense qkv, alpha 3: every part is scaled by a half, and so is a plain module of rank 4, alpha 2."""
    whole = pair(4, 6, 6)
    file = spelt_otherwise(
        {"layers.0.qkv": whole, "layers.0.proj": pair(4, 4, 4, 1)},
        {"layers.0.qkv": 3.0, "layers.0.proj": 2.0},
    )
    adapter = DIALECTS.load("diffusion_model").read({"x.safetensors": file}, [QKV])
    assert adapter.scale == 0.5
    rows = whole.B.double() @ whole.A.double() / 2
    assert torch.equal(deltas(adapter)["blocks.0.k"], rows[2:4])


def test_a_dialect_is_told_by_the_keys_of_a_file() -> None:
    for family, variant in TINY:
        layouts = FAMILIES.load(family).layouts(variant)
        for name in DIALECTS.names():
            files = DIALECTS.load(name).write(adapter_for(family, variant), layouts, {})
            keys = [k for f in files.values() if isinstance(f, TensorFile) for k in f.tensors]
            told = dialect_of(keys)
            again = DIALECTS.load(told).read(files, layouts)
            assert set(again.pairs) == set(adapter_for(family, variant).pairs), (name, told)
    with pytest.raises(AdapterError, match=r"knows the keys of this file, as in a\.lokr_w1"):
        dialect_of(["a.lokr_w1", "a.lokr_w2"])


def test_a_module_of_theirs_that_the_layout_does_not_know_is_named() -> None:
    file = TensorFile(
        {
            "diffusion_model.other.lora_A.weight": torch.ones(1, 4),
            "diffusion_model.other.lora_B.weight": torch.ones(4, 1),
        },
        {},
    )
    with pytest.raises(AdapterError, match="other: layout 'original' knows no such module"):
        DIALECTS.load("diffusion_model").read({"x.safetensors": file}, [QKV])


def test_a_family_without_an_original_layout_is_told_so() -> None:
    adapter = AdapterWeights({"q": pair(4, 4, 1)}, 1, 1.0)
    with pytest.raises(AdapterError, match="no layout of an original checkpoint"):
        DIALECTS.load("diffusion_model").write(adapter, [Layout("diffusers")], {})


def test_an_adapter_without_modules_or_without_effect_is_refused() -> None:
    with pytest.raises(AdapterError, match="holds no module"):
        AdapterWeights({}, 4, 4.0)
    for alpha in (0.0, float("nan")):
        with pytest.raises(AdapterError, match="does nothing"):
            AdapterWeights({"q": pair(4, 4, 1)}, 1, alpha)


def test_an_unknown_dialect_is_told_the_nearest_one() -> None:
    with pytest.raises(RecipeError, match="did you mean 'diffusers'"):
        DIALECTS.load("diffuser")


def test_peft_settings_that_pairs_cannot_hold_are_refused() -> None:
    dialect = DIALECTS.load("peft")
    files = dialect.write(AdapterWeights({"q": pair(4, 4, 2)}, 2, 2.0), [], {})
    for change, complaint in (
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "LOKR"}, "not describe a LoRA"),
        ({"r": "2"}, "must be numbers"),
    ):
        config = JsonFile(files["adapter_config.json"].value | change)
        with pytest.raises(AdapterError, match=complaint):
            dialect.read({**files, "adapter_config.json": config}, [])
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors and"):
        dialect.read({"adapter_config.json": files["adapter_config.json"]}, [])


# --- every base family, variant and dialect --------------------------------------------------------


def adapter_for(
    family: str, variant: str, *, rank: int = 4, alpha: float = 8.0, blocks: int = 99
) -> AdapterWeights:
    """A pair for every linear inside the first blocks of each kind."""
    table = FAMILIES.load(family).table(variant)
    specs = [s for s in table.linears() if int(s.name.split(".")[1]) < blocks]
    return AdapterWeights(
        {s.module: pair(s.shape[1], s.shape[0], rank, seed) for seed, s in enumerate(specs)},
        rank,
        alpha,
    )


@pytest.mark.parametrize("dialect", DIALECTS.names())
@pytest.mark.parametrize(("family", "variant"), TINY)
def test_every_base_family_reads_back_in_every_dialect_with_the_same_deltas(
    family: str, variant: str, dialect: str
) -> None:
    adapter = adapter_for(family, variant)
    layouts = FAMILIES.load(family).layouts(variant)
    plugin = DIALECTS.load(dialect)
    files = plugin.write(adapter, layouts, {"outsize.rank": "4"})
    assert plugin.is_folder or len(files) == 1
    again = plugin.read(files, layouts)
    wanted, got = deltas(adapter), deltas(again)
    assert set(got) == set(wanted)
    assert max(float((got[name] - wanted[name]).abs().max()) for name in wanted) == 0.0
    assert again.rank == 4


def test_every_base_family_has_a_tiny_variant_to_be_tested_with() -> None:
    assert {family for family, _ in TINY} == set(BASES)
    assert BASES


# --- the clients themselves ------------------------------------------------------------------------


def real_model(family: str, variant: str) -> nn.Module:
    """Upstream's module with real, seeded weights."""
    meta: Any = FAMILIES.load(family).build(variant)
    torch.manual_seed(0)
    model: nn.Module = type(meta)(**{k: v for k, v in meta.config.items() if not k.startswith("_")})
    return model.eval()


def loaded_deltas(model: nn.Module) -> dict[str, Tensor]:
    """What PEFT's layers inside a model add to each weight."""
    from peft.tuners.lora import LoraLayer

    return {
        name.removeprefix("base_model.model."): module.get_delta_weight(next(iter(module.lora_A)))
        .detach()
        .double()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def assert_deltas(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], most: float = 0.0
) -> None:
    assert set(got) == set(wanted)
    assert max(float((got[name] - wanted[name]).abs().max()) for name in wanted) <= most


def write_folder(folder: Path, files: Mapping[str, TensorFile | JsonFile]) -> None:
    for name, file in files.items():
        if isinstance(file, TensorFile):
            save_file(dict(file.tensors), folder / name, dict(file.metadata))
        else:
            (folder / name).write_text(json.dumps(file.value))


@pytest.mark.parametrize(("family", "variant"), TINY)
def test_peft_loads_the_folder_and_wraps_exactly_our_modules(
    family: str, variant: str, tmp_path: Path
) -> None:
    """With mixed ranks, an alpha of its own kind, and an output equal to B @ A added by hand."""
    from peft import LoraConfig, PeftModel
    from peft.utils import load_peft_weights

    model = real_model(family, variant)
    full = adapter_for(family, variant, alpha=2.0)
    names = sorted(full.pairs)[::3]
    pairs = {name: full.pairs[name] for name in names}
    wide = model.get_submodule(names[0]).weight
    pairs[names[0]] = pair(wide.shape[1], wide.shape[0], 8, 77)
    adapter = AdapterWeights(pairs, 4, 2.0)
    write_folder(tmp_path, DIALECTS.load("peft").write(adapter, [], {"outsize.source": "org/base"}))

    config = LoraConfig.from_pretrained(str(tmp_path))
    assert (config.r, config.lora_alpha, config.task_type) == (4, 2, None)
    assert config.base_model_name_or_path == "org/base"
    assert len(load_peft_weights(str(tmp_path), device="cpu")) == 2 * len(pairs)

    by_hand = real_model(family, variant)
    for name, delta in deltas(adapter).items():
        by_hand.get_submodule(name).weight.data += delta.float()
    loaded = PeftModel.from_pretrained(model, str(tmp_path))
    assert_deltas(loaded_deltas(loaded), deltas(adapter))
    inputs = forward_inputs(model.config)  # type: ignore[arg-type]  # diffusers' models have one
    with torch.no_grad():
        got, wanted = loaded(**inputs)[0], by_hand(**inputs)[0]
        base = real_model(family, variant)(**inputs)[0]
    # fp32: W x + B (A x) against (W + B A) x, a few hundred additions each
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert not torch.allclose(base, wanted, rtol=1e-2)


def forward_inputs(config: Mapping[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    axes = len(config["axes_dims_rope"])
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(1, 4, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(
            1, 3, config["joint_attention_dim"], generator=generator
        ),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(4, axes),
        "txt_ids": torch.zeros(3, axes),
        "guidance": torch.tensor([3.0]) if config["guidance_embeds"] else None,
        "return_dict": False,
    }
    if "pooled_projection_dim" in config:
        inputs["pooled_projections"] = torch.randn(
            1, config["pooled_projection_dim"], generator=generator
        )
    return inputs


def pipeline_of(family: str, transformer: nn.Module) -> Any:
    """Diffusers' pipeline class of a family, with nothing but a transformer in it."""
    import diffusers

    make: Any = {"flux1": diffusers.FluxPipeline, "flux2": diffusers.Flux2Pipeline}[family]
    names = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    accepted = set(make.__init__.__code__.co_varnames)
    return make(transformer=transformer, **{name: None for name in names if name in accepted})


@pytest.mark.parametrize(("family", "variant"), TINY)
def test_the_pipeline_of_diffusers_loads_the_diffusers_file(
    family: str, variant: str, tmp_path: Path
) -> None:
    adapter = adapter_for(family, variant, alpha=2.0)
    write_folder(tmp_path, DIALECTS.load("diffusers").write(adapter, [], {}))
    model = real_model(family, variant)
    pipeline_of(family, model).load_lora_weights(tmp_path, local_files_only=True)
    assert_deltas(loaded_deltas(model), deltas(adapter))


@pytest.mark.parametrize("alpha", [2.0, 4.0, 3.0])
def test_the_flux2_pipeline_of_diffusers_loads_the_diffusion_model_file(
    alpha: float, tmp_path: Path
) -> None:
    """Alpha / rank of 1/2 and 1 is exact; 3/4 of a multiple of 1/8 is, too, in fp32."""
    adapter = adapter_for("flux2", "tiny", alpha=alpha)
    layouts = FAMILIES.load("flux2").layouts("tiny")
    write_folder(tmp_path, DIALECTS.load("diffusion_model").write(adapter, layouts, {}))
    model = real_model("flux2", "tiny")
    pipeline_of("flux2", model).load_lora_weights(tmp_path, local_files_only=True)
    assert_deltas(loaded_deltas(model), deltas(adapter))


def test_a_scale_that_is_no_power_of_two_changes_a_bf16_delta_by_no_more_than_one_rounding() -> (
    None
):
    from diffusers.loaders import Flux2LoraLoaderMixin

    full = adapter_for("flux2", "tiny", alpha=1.7)
    adapter = AdapterWeights(
        {name: LoraPair(p.A.bfloat16(), p.B.bfloat16()) for name, p in full.pairs.items()}, 4, 1.7
    )
    layouts = FAMILIES.load("flux2").layouts("tiny")
    (file,) = DIALECTS.load("diffusion_model").write(adapter, layouts, {}).values()
    state = Flux2LoraLoaderMixin.lora_state_dict(dict(file.tensors))
    got = state_deltas(state)
    # 4 products of |A| <= 1 with |B| <= 1.7 / 4, each B off by at most half a unit of 2**-8 relative
    assert_deltas(got, deltas(adapter), most=4 * (1.7 / 4) * 2**-9)


def state_deltas(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    suffix = ".lora_A.weight"
    return {
        key.removeprefix("transformer.").removesuffix(suffix): state[
            key.replace("lora_A", "lora_B")
        ].double()
        @ tensor.double()
        for key, tensor in state.items()
        if key.endswith(suffix)
    }


@pytest.mark.parametrize("family", BASES)
def test_the_converter_of_diffusers_gives_the_same_deltas_at_published_sizes(family: str) -> None:
    """At the size that is published, since diffusers' converter for Flux.1 knows only that one; first blocks only."""
    from diffusers import loaders

    plugin = FAMILIES.load(family)
    variant = next(name for name in plugin.variants if name in {"dev", "klein-4b"})
    adapter = adapter_for(family, variant, rank=2, alpha=4.0, blocks=1)
    (file,) = DIALECTS.load("diffusion_model").write(adapter, plugin.layouts(variant), {}).values()
    mixin = {"flux1": loaders.FluxLoraLoaderMixin, "flux2": loaders.Flux2LoraLoaderMixin}[family]
    state = mixin.lora_state_dict(dict(file.tensors))
    # Deltas of this size take gigabytes, so what they do to random vectors is compared; eighths keep it exact.
    suffix = ".lora_A.weight"
    keys = {
        key.removeprefix("transformer.").removesuffix(suffix): key for key in state if suffix in key
    }
    assert set(keys) == set(adapter.pairs)
    for name, p in adapter.pairs.items():
        probe = eighths(p.A.shape[1], 3, 5).double()
        A, B = state[keys[name]].double(), state[keys[name].replace("lora_A", "lora_B")].double()
        assert torch.equal(
            B @ (A @ probe), p.B.double() @ (p.A.double() @ probe) * adapter.scale
        ), name


def test_diffusers_still_ignores_flux1_files_with_the_usual_spelling() -> None:
    """Why Flux.1's layout has lora_names: when this fails, the exception can go."""
    from diffusers.loaders import FluxLoraLoaderMixin

    key = "diffusion_model.double_blocks.0.img_attn.proj"
    state = FluxLoraLoaderMixin.lora_state_dict(
        {f"{key}.lora_A.weight": torch.ones(1, 4), f"{key}.lora_B.weight": torch.ones(4, 1)}
    )
    assert not [name for name in state if name.startswith("transformer.")]


@pytest.mark.parametrize("family", BASES)
def test_weights_under_original_names_move_as_ours_do(family: str) -> None:
    """What ComfyUI does: it adds each B @ A to the weight of that name in the original checkpoint.

    The truth is diffusers' converter of whole checkpoints: our deltas, added up under their names and converted as if
    they were weights, are our deltas again; the swapped last modulation, outside all blocks, included. Published
    numbers of rows, since the converter has some of them written into it, but four columns; the first blocks.
    """
    from diffusers.loaders import single_file_utils

    plugin = FAMILIES.load(family)
    table = [s for s in plugin.table("dev") if s.block is None or s.name.split(".")[1] == "0"]
    specs = [s for s in table if s.is_linear and s.name.split(".")[1] in {"0", "linear"}]
    assert any(s.module == "norm_out.linear" for s in specs)
    adapter = AdapterWeights(
        {s.module: pair(4, s.shape[0], 2, n) for n, s in enumerate(specs)}, 2, 2.0
    )
    layout = next(layout for layout in plugin.layouts("dev") if layout.rules)
    (file,) = DIALECTS.load("diffusion_model").write(adapter, [layout], {}).values()
    a_name, b_name = layout.lora_names
    checkpoint: dict[str, Tensor] = {}
    for s in table:
        slabs = layout.slabs(s.name)
        share = sum(Fraction(*slab.stop) - Fraction(*slab.start) for slab in slabs)
        checkpoint[slabs[0].tensor] = torch.zeros(int(s.shape[0] / share))
    for key, tensor in file.tensors.items():
        if f".{a_name}." in key:
            name = key.removeprefix("diffusion_model.").replace(f".{a_name}.", ".")
            checkpoint[name] = file.tensors[key.replace(a_name, b_name)] @ tensor
    convert = {
        "flux1": single_file_utils.convert_flux_transformer_checkpoint_to_diffusers,
        "flux2": single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
    }[family]
    converted = convert(checkpoint)
    got = {s.module: converted[s.name].double() for s in specs}
    assert_deltas(got, deltas(adapter))


@pytest.fixture(autouse=True)
def _quiet_clients() -> None:
    """Diffusers logs advice on every load."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
