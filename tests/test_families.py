"""The base families against diffusers: shapes, file layouts, forward, schedule.

Upstream is the truth everywhere: its classes on the meta device for shapes, its converters for files, its module and
its pipelines' helpers for numbers.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import bfl_names, random_tensors, scheduler_config, write_tiny
from torch import Tensor, nn

from outsize.base.errors import RecipeError
from outsize.base.layout import Layout
from outsize.base.table import TensorSpec
from outsize.families.protocol import FAMILIES
from outsize.weights.header import TensorInfo
from outsize.weights.mapping import map_source

BASES = [(name, variant) for name in ("flux1", "flux2") for variant in FAMILIES.load(name).variants]
ALL = [(name, variant) for name in FAMILIES.names() for variant in FAMILIES.load(name).variants]
# linears that a family keeps as they are: nothing packs them and no adapter attaches
LEFT_PLAIN = {"qwen3_5": ("in_proj_a", "in_proj_b")}
TINY = [(name, variant) for name, variant in BASES if variant.startswith(("tiny", "teaching"))]


@cache
def built(family: str, variant: str) -> Any:
    """Our module on meta; only looked at, never filled."""
    return FAMILIES.load(family).build(variant)


def filled(family: str, variant: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Our module with seeded weights."""
    plugin: Any = FAMILIES.load(family)
    model = plugin.build(variant)
    model.load_state_dict(random_tensors(plugin.table(variant), seed, dtype), assign=True)
    plugin.materialise_buffers(model, torch.device("cpu"))
    return model.requires_grad_(False)


def found_in(family: str, variant: str, file: Mapping[str, Tensor]) -> tuple[Layout, str]:
    """The layout and the prefix under which preparing finds a variant's tensors in a file."""
    plugin: Any = FAMILIES.load(family)
    nowhere = Path("model.safetensors")
    tensors = {
        name: TensorInfo(nowhere, "BF16", tuple(one.shape), 0, 0) for name, one in file.items()
    }
    reader: Any = SimpleNamespace(files=(nowhere,), tensors=tensors)
    mapped = map_source(reader, plugin.layouts(variant), plugin.table(variant))
    layout = next(one for one in plugin.layouts(variant) if one.name == mapped.layout)
    return layout, mapped.prefix


def read_by_layout(
    layout: Layout, specs: list[TensorSpec], tensors: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Tensor]:
    """Our tensors out of a file, by the layout's rules alone."""
    found = {}
    for spec in specs:
        rows = []
        for slab in layout.slabs(spec.name):
            theirs = tensors[prefix + slab.tensor]
            start, stop = slab.rows(theirs.shape[0]) if spec.shape else (None, None)
            rows.append(theirs[start:stop] if spec.shape else theirs)
        joined = torch.cat(rows) if spec.shape else rows[0]
        ones = layout.rule_of(spec.name)[0].ones
        assert joined.shape == (*spec.shape, *(1 for _ in range(ones))), spec.name
        found[spec.name] = joined.reshape(spec.shape)
    return found


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Same names, same bytes."""
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different[:5]


@pytest.mark.parametrize(("family", "variant"), ALL)
def test_a_table_lists_upstreams_tensors_in_upstreams_order(family: str, variant: str) -> None:
    """Real sizes too: on the meta device they weigh nothing."""
    plugin: Any = FAMILIES.load(family)
    model = built(family, variant)
    theirs = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    assert [(spec.name, spec.shape) for spec in plugin.table(variant)] == theirs
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("family", "variant"), ALL)
def test_linears_blocks_and_buffers_are_those_of_the_module(family: str, variant: str) -> None:
    plugin: Any = FAMILIES.load(family)
    table, model = plugin.table(variant), built(family, variant)
    linears = {
        f"{name}.weight" for name, one in model.named_modules() if isinstance(one, nn.Linear)
    }
    thin = {name for name in linears if name.split(".")[-2] in LEFT_PLAIN.get(family, ())}
    assert {spec.name for spec in table if spec.is_linear} == linears - thin
    paths = plugin.block_paths(variant)
    assert table.num_blocks == len(paths)
    for block, path in enumerate(paths):
        inside = {f"{path}.{name}" for name in model.get_submodule(path).state_dict()}
        assert {spec.name for spec in table.of_block(block)} == inside
    persistent = model.state_dict().keys()
    buffers = {name for name, _ in model.named_buffers()} & persistent
    assert {spec.name for spec in table if spec.role == "buffer"} == buffers


def test_sizes_are_those_that_were_published() -> None:
    """Parameters in billions, from the models' cards."""
    counts = {
        pair: FAMILIES.load(pair[0]).table(pair[1]).num_parameters / 1e9
        for pair in (
            ("flux2", "dev"),
            ("flux2", "klein-9b"),
            ("flux2", "klein-4b"),
            ("flux1", "dev"),
        )
    }
    assert [round(count, 2) for count in counts.values()] == [32.22, 9.08, 3.88, 11.90]


def test_upstreams_default_configurations_are_ours() -> None:
    """A wrong number that leaves all shapes alone (rope axes, theta, an epsilon) would be seen here only."""
    import diffusers

    with torch.device("meta"):
        flux2 = diffusers.Flux2Transformer2DModel(num_layers=1, num_single_layers=1).config
        flux1 = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1).config
        codec = diffusers.AutoencoderKLFlux2().config
    pairs = (
        (flux2, FAMILIES.load("flux2").config("dev"), {"num_layers", "num_single_layers"}),
        (flux1, FAMILIES.load("flux1").config("schnell"), {"num_layers", "num_single_layers"}),
        (codec, FAMILIES.load("autoencoder_kl_flux2").config("flux2"), set()),
    )
    for theirs, ours, other in pairs:
        for key in ours.keys() - other:
            value = theirs[key]
            assert ours[key] == (list(value) if isinstance(value, tuple) else value), key


def test_the_packaged_teaching_base_has_the_configuration_of_our_rows() -> None:
    import outsize

    folder = Path(outsize.__file__).parent / "teaching" / "base"
    if not (folder / "transformer" / "config.json").is_file():
        pytest.skip("the teaching base is not in this checkout")
    rows = {
        "transformer/config.json": FAMILIES.load("flux2").config("teaching"),
        "vae/config.json": FAMILIES.load("autoencoder_kl_flux2").config("teaching"),
        "text_encoder/config.json": FAMILIES.load("qwen3_text").config("teaching"),
        "scheduler/scheduler_config.json": scheduler_config("flux2", "teaching"),
    }
    for file, ours in rows.items():
        theirs = json.loads((folder / file).read_text(encoding="utf-8"))
        assert {key: theirs.get(key) for key in ours} == ours, file


@pytest.mark.parametrize(("family", "variant"), TINY)
def test_bfls_single_file_is_read_back_row_for_row(family: str, variant: str) -> None:
    """Against the inverse converter in tests/tiny.py, under both prefixes."""
    plugin: Any = FAMILIES.load(family)
    specs = list(plugin.table(variant))
    ours = random_tensors(specs, seed=3)
    layout = next(one for one in plugin.layouts(variant) if one.name == "bfl")
    theirs = bfl_names(family, ours)
    for prefix in ("", "model.diffusion_model."):
        named = {prefix + name: tensor for name, tensor in theirs.items()}
        assert found_in(family, variant, named) == (layout, prefix)
        assert_same(read_by_layout(layout, specs, named, prefix), ours)
    used = {slab.tensor for spec in specs for slab in layout.slabs(spec.name)}
    assert used == set(theirs), "a tensor of the file is read by nobody"


@pytest.mark.parametrize("variant", ["tiny", "tiny-klein"])
def test_diffusers_reads_our_flux2_single_file_as_we_do(variant: str, tmp_path: Path) -> None:
    from diffusers import Flux2Transformer2DModel

    plugin: Any = FAMILIES.load("flux2")
    ours = random_tensors(plugin.table(variant), seed=4)
    save_file(bfl_names("flux2", ours), tmp_path / "one.safetensors")
    config = {"_class_name": "Flux2Transformer2DModel"} | plugin.config(variant)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = Flux2Transformer2DModel.from_single_file(
        str(tmp_path / "one.safetensors"), config=str(tmp_path)
    )
    assert_same(model.state_dict(), ours)


def test_diffusers_reads_a_flux1_single_file_as_we_do() -> None:
    """Its converter knows the real width only, so the matrices keep their rows and lose all columns but one."""
    from diffusers.loaders.single_file_utils import (
        convert_flux_transformer_checkpoint_to_diffusers,
    )

    plugin: Any = FAMILIES.load("flux1")
    last = {"transformer_blocks.0", "single_transformer_blocks.0"}
    specs = [
        TensorSpec(spec.name, (spec.shape[0], *(1 for _ in spec.shape[1:])), spec.role)
        for spec in plugin.table("dev")
        if spec.block is None or ".".join(spec.name.split(".")[:2]) in last
    ]
    ours = random_tensors(specs, seed=5)
    layout = next(one for one in plugin.layouts("dev") if one.name == "bfl")
    theirs = bfl_names("flux1", ours)
    assert_same(read_by_layout(layout, specs, theirs), ours)
    assert_same(convert_flux_transformer_checkpoint_to_diffusers(dict(theirs)), ours)


@pytest.mark.parametrize(("family", "variant"), BASES)
def test_bfls_names_cover_every_linear_of_every_block(family: str, variant: str) -> None:
    """Adapters are exported by the same rules: a fused matrix must be whole, each slab once."""
    plugin: Any = FAMILIES.load(family)
    layout = next(one for one in plugin.layouts(variant) if one.name == "bfl")
    covered: dict[str, list[tuple[float, float]]] = {}
    for spec in plugin.table(variant).linears():
        for slab in layout.slabs(spec.name):
            ends = (slab.start[0] / slab.start[1], slab.stop[0] / slab.stop[1])
            covered.setdefault(slab.tensor, []).append(ends)
    for tensor, pieces in covered.items():
        pieces.sort()
        assert (pieces[0][0], pieces[-1][1]) == (0, 1), tensor
        assert all(a[1] == b[0] for a, b in pairwise(pieces)), tensor


def make_batch(family: str, variant: str, num: int = 2) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A noisy latent that is higher than wide, noise levels no bf16 can hold, conditions."""
    plugin: Any = FAMILIES.load(family)
    generator = torch.Generator().manual_seed(9)
    channels = plugin.config(variant)["in_channels"]
    shape = (channels // 4, 12, 8) if family == "flux1" else (channels, 6, 4)
    noisy = torch.randn(num, *shape, generator=generator)
    sigma = torch.tensor([0.30103, 0.98765])[:num]
    conditions = {
        name: torch.randn(num, *one, generator=generator)
        for name, one in plugin.condition_shapes(variant).items()
    }
    return noisy, sigma, conditions


def upstream_velocity(  # noqa: PLR0917 - in the order of predict
    family: str,
    model: Any,
    noisy: Tensor,
    sigma: Tensor,
    conditions: Mapping[str, Tensor],
    guidance: float | None,
) -> Tensor:
    """One prediction as the pipelines of diffusers make it, by their own helpers."""
    from diffusers import Flux2Pipeline, FluxPipeline

    num, channels, height, width = noisy.shape
    text = conditions["text"]
    given = None if guidance is None else torch.full([num], guidance)
    shared = {"encoder_hidden_states": text, "timestep": sigma, "guidance": given}
    if family == "flux2":
        ids = Flux2Pipeline._prepare_latent_ids(noisy)
        tokens = model(
            hidden_states=Flux2Pipeline._pack_latents(noisy),
            img_ids=ids,
            txt_ids=Flux2Pipeline._prepare_text_ids(text),
            return_dict=False,
            **shared,
        )[0]
        return Flux2Pipeline._unpack_latents_with_ids(tokens, ids)
    ids = FluxPipeline._prepare_latent_image_ids(num, height // 2, width // 2, "cpu", text.dtype)
    tokens = model(
        hidden_states=FluxPipeline._pack_latents(noisy, num, channels, height, width),
        pooled_projections=conditions["pooled"],
        img_ids=ids,
        txt_ids=torch.zeros(text.shape[1], 3),
        return_dict=False,
        **shared,
    )[0]
    return FluxPipeline._unpack_latents(tokens, 8 * height, 8 * width, 8)


@pytest.mark.parametrize(("family", "variant"), TINY)
def test_a_prediction_in_fp32_equals_upstreams_bit_for_bit(family: str, variant: str) -> None:
    plugin: Any = FAMILIES.load(family)
    model = filled(family, variant)
    noisy, sigma, conditions = make_batch(family, variant)
    guidance = 3.5 if plugin.training_guidance(variant) is not None else None
    with torch.no_grad():
        ours = plugin.predict(variant, model, noisy, sigma, conditions, guidance)
        theirs = upstream_velocity(family, model, noisy, sigma, conditions, guidance)
    assert ours.shape == noisy.shape
    assert torch.isfinite(ours).all()
    assert ours.std() > 0.01, "a model without effect would pass every comparison"
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("family", "variant"), TINY)
def test_timesteps_reach_a_bf16_model_without_rounding(family: str, variant: str) -> None:
    """Two noise levels that are one number in bf16 must give different predictions."""
    plugin: Any = FAMILIES.load(family)
    model = filled(family, variant, dtype=torch.bfloat16)
    noisy, _, conditions = make_batch(family, variant, num=1)
    guidance = plugin.training_guidance(variant)
    seen: list[Tensor] = []
    embedder = "time_text_embed" if family == "flux1" else "time_guidance_embed"
    time_proj = model.get_submodule(f"{embedder}.time_proj")
    time_proj.register_forward_hook(lambda _module, args, _out: seen.append(args[0]))
    for level in (0.98765, 0.98811):
        sigma = torch.tensor([level])
        out = plugin.predict(variant, model, noisy.bfloat16(), sigma, conditions, guidance)
        assert out.dtype == torch.bfloat16
    assert torch.tensor(0.98765).bfloat16() == torch.tensor(0.98811).bfloat16()
    times = seen[:: 1 if guidance is None else 2]
    assert [one.dtype for one in times] == [torch.float32] * 2
    assert [one.item() for one in times] == [
        (torch.tensor([level]) * 1000).item() for level in (0.98765, 0.98811)
    ]
    assert not time_proj._forward_pre_hooks, "predict leaves the module as it was"


def test_a_wrong_guidance_is_refused_by_name() -> None:
    plugin: Any = FAMILIES.load("flux2")
    noisy, sigma, conditions = make_batch("flux2", "tiny")
    with pytest.raises(RecipeError, match="tiny is guidance-distilled"):
        plugin.predict("tiny", nn.Module(), noisy, sigma, conditions, None)
    with pytest.raises(RecipeError, match="tiny-klein takes no guidance"):
        plugin.predict("tiny-klein", nn.Module(), noisy, sigma, conditions, 4.0)


def upstream_sigmas(family: str, config: dict[str, Any], steps: int, tokens: int) -> list[float]:
    """What the pipeline's scheduler gives."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    if family == "flux2":
        mu = compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    else:
        mu = calculate_shift(tokens, 256, 4096, 0.5, 1.15)
    scheduler.set_timesteps(steps, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return [float(sigma) for sigma in scheduler.sigmas]


@pytest.mark.parametrize(("family", "variant"), BASES)
@pytest.mark.parametrize(("steps", "tokens"), [(4, 36), (28, 4096), (50, 9216)])
def test_the_schedule_equals_upstreams_scheduler(
    family: str, variant: str, steps: int, tokens: int
) -> None:
    plugin: Any = FAMILIES.load(family)
    ours = plugin.sigmas(variant, steps, tokens)
    assert ours == upstream_sigmas(family, scheduler_config(family, variant), steps, tokens)
    assert ours[0] == 1
    assert ours[-1] == 0
    assert ours == sorted(ours, reverse=True)


def test_the_training_shift_is_the_sampling_schedules() -> None:
    """At the middle of an undistilled schedule, sigma' = e^mu / (e^mu + 1/sigma - 1)."""
    for family, variant in BASES:
        plugin: Any = FAMILIES.load(family)
        exp_mu = math.exp(plugin.shift_mu(variant, 4096))
        middle = plugin.sigmas(variant, 50, 4096)[25]
        assert middle == pytest.approx(exp_mu / (exp_mu + 1 / 0.5 - 1), rel=1e-6)
    assert FAMILIES.load("flux1").shift_mu("dev", 4096) == pytest.approx(1.15)
    assert FAMILIES.load("flux1").shift_mu("schnell", 4096) == 0


@pytest.mark.parametrize(("family", "variant"), BASES)
def test_a_base_agrees_with_its_conditioners(family: str, variant: str) -> None:
    base: Any = FAMILIES.load(family)
    shapes = {}
    for component in base.components(variant):
        part: Any = FAMILIES.load(component.family)
        config = part.config(component.variant)
        if component.family == "clip_text":
            shapes["pooled"] = (config["hidden_size"],)
        elif component.kind == "text":
            from importlib import import_module

            row = import_module(f"outsize.families.{component.family}").VARIANTS[component.variant]
            parts = len(row.read) if hasattr(row, "read") else 1
            shapes["text"] = (row.max_length, parts * row.width)
        else:
            side = 8 * part.pixel_multiple(component.variant)
            latent = part.latent_shape(component.variant, side, 2 * side)
            assert base.num_tokens(variant, latent) == 8 * 16
            tokens_of = 4 if family == "flux1" else 1
            assert tokens_of * latent[0] == base.config(variant)["in_channels"]
    assert shapes == base.condition_shapes(variant)
    assert set(base.sampling_defaults(variant)) == {"num_steps", "guidance", "is_true_cfg"}
    true_cfg = base.sampling_defaults(variant)["is_true_cfg"]
    assert not (true_cfg and base.training_guidance(variant) is not None)


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"flux2 has no variant 'medium'.*klein-4b"):
        FAMILIES.load("flux2").table("medium")


def test_families_are_imported_and_tabled_without_torch() -> None:
    """`plan` answers at once."""
    code = (
        "import sys\n"
        "from outsize.families.protocol import FAMILIES\n"
        "for name in FAMILIES.names():\n"
        "    family = FAMILIES.load(name)\n"
        "    for variant in family.variants:\n"
        "        family.table(variant), family.layouts(variant), family.block_paths(variant)\n"
        "assert not {'torch', 'numpy', 'diffusers', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("layout", ["diffusers", "bfl"])
def test_write_tiny_writes_files_whose_names_our_layouts_know(layout: Any, tmp_path: Path) -> None:
    for family in ("flux1", "flux2"):
        base: Any = FAMILIES.load(family)
        folder = write_tiny(family, "tiny", tmp_path / family, layout=layout)
        file = (
            next((folder / "transformer").glob("*.safetensors"), None) if layout != "bfl" else None
        )
        tensors = load_file(file or folder / f"{family}-tiny.safetensors")
        known = next(one for one in base.layouts("tiny") if one.name == layout)
        ours = read_by_layout(known, list(base.table("tiny")), tensors)
        assert_same(ours, random_tensors(base.table("tiny"), 0, torch.bfloat16))
        assert json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
