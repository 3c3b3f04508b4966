"""What other programs make of our files: the same output on the same weights, and no key that they pass over.

diffusers and PEFT are run. ComfyUI and kohya's tools are programs, not libraries: the maps that they read files by are
written out here, from names of original checkpoints that are spelt out apart from our layouts (tests/tiny.py). The networks
of sd-scripts (48d368f, Flux.1) and musubi-tuner (30c658c, Flux.2) were run once by hand and took what these maps take: all
linears of both kinds of block, no key unexpected, and of musubi-tuner none missing. ComfyUI's map was only read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TinyBase, make_tiny, tiny_inputs
from test_dialects import (
    BASES,
    adapter_for,
    assert_deltas,
    deltas,
    eighths,
    pair,
    pipeline_of,
    write_folder,
)
from tiny import bfl_names
from torch import Tensor

from outsize.adapters.adapter import Adapter, AdapterShape
from outsize.base.errors import AdapterError
from outsize.dialects.protocol import DIALECTS, AdapterWeights, LoraPair, TensorFile
from outsize.families.protocol import FAMILIES

# What diffusers' pipelines read at the tiny size: its converters for Flux.1 know the published one only.
READ_BY_DIFFUSERS = {"flux1": ("diffusers",), "flux2": ("diffusers", "diffusion_model", "kohya")}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyBase]:
    """Tiny bases, packed, so that what others are held to is what a run trains on."""
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_tiny(folder / name, name, ("nf4", {"group": 64})) for name in BASES}


def trained_weights(adapter: Adapter, alpha: float) -> AdapterWeights:
    """Values as training leaves them: fp32, of any size, no multiples of anything."""
    generator = torch.Generator().manual_seed(5)
    values = {
        name: 0.05 * torch.randn(one.shape, generator=generator)
        for name, one in adapter.parameters().items()
    }
    adapter.load_(values)
    pairs = {
        path: LoraPair(values[f"{path}.lora_A"], values[f"{path}.lora_B"]) for path in adapter.paths
    }
    return AdapterWeights(pairs, 4, alpha)


@torch.no_grad()
def predicted(base: TinyBase, module: Any) -> Tensor:
    found: Tensor = base.family.predict(base.variant, module, **tiny_inputs(base, seed=2))
    return found


@pytest.mark.parametrize("alpha", [8.0, 3.0])
@pytest.mark.parametrize("family", BASES)
def test_the_pipeline_of_diffusers_computes_what_we_compute(
    bases: dict[str, TinyBase], family: str, alpha: float, tmp_path: Path
) -> None:
    """Bit for bit where alpha / rank is a power of two; else to a few roundings of fp32.

    A fused pair is split by diffusers into parts that all have the whole A, so their sums are taken in another order.
    """
    base = bases[family]
    model = base.open("stream")
    shape = AdapterShape(4, alpha, ("attention", "mlp"))
    adapter = Adapter(model.module, base.family.table(base.variant), shape)
    adapter.materialise_(seed=1, device=torch.device("cpu"), dtype=torch.float32)
    weights = trained_weights(adapter, alpha)
    model.begin("forward")
    ours = predicted(base, model.module)
    with adapter.disabled():
        model.begin("forward")
        assert not torch.allclose(ours, predicted(base, model.module), rtol=1e-2)
    for dialect in READ_BY_DIFFUSERS[family]:
        folder = tmp_path / dialect
        folder.mkdir()
        layouts = base.family.layouts(base.variant)
        write_folder(folder, DIALECTS.load(dialect).write(weights, layouts, {}))
        twin = base.upstream()
        pipeline_of(family, twin).load_lora_weights(folder, local_files_only=True)
        theirs = predicted(base, twin)
        if alpha == 8.0 and dialect != "diffusion_model":
            assert torch.equal(theirs, ours), dialect
        else:
            most = 2e-6 * float(ours.abs().max())
            assert float((theirs - ours).abs().max()) <= most, dialect


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("alpha", [4.0, 3.0])
def test_the_converters_of_diffusers_read_what_kohya_writes(family: str, alpha: float) -> None:
    """At the published size, whose numbers of rows are written into them; the first blocks, products with vectors."""
    from diffusers import loaders

    plugin = FAMILIES.load(family)
    adapter = adapter_for(family, "dev", rank=2, alpha=alpha, blocks=1)
    (file,) = DIALECTS.load("kohya").write(adapter, plugin.layouts("dev"), {}).values()
    mixin = {"flux1": loaders.FluxLoraLoaderMixin, "flux2": loaders.Flux2LoraLoaderMixin}[family]
    state = mixin.lora_state_dict(dict(file.tensors))
    assert {key.removeprefix("transformer.").rsplit(".", 2)[0] for key in state} == set(
        adapter.pairs
    )
    for name, p in adapter.pairs.items():
        probe = eighths(p.A.shape[1], 3, 5).double()
        A, B = (state[f"transformer.{name}.lora_{one}.weight"].double() for one in "AB")
        wanted = p.B.double() @ (p.A.double() @ probe) * adapter.scale
        assert torch.allclose(B @ (A @ probe), wanted, rtol=0, atol=0 if alpha == 4.0 else 1e-4)


# --- ComfyUI and kohya's tools -----------------------------------------------------------------------


def original_linears(family: str) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices inside the tiny variant's blocks, as the original checkpoint names them."""
    table = FAMILIES.load(family).table("tiny")
    named = bfl_names(family, {s.name: torch.zeros(s.shape) for s in table})
    return {
        name.removesuffix(".weight"): (one.shape[0], one.shape[1])
        for name, one in named.items()
        if name.startswith(("double_blocks", "single_blocks")) and one.ndim == 2
    }


def comfyui_map(family: str) -> dict[str, str]:
    """comfy/lora.py: what may stand before `.lora_up.weight` or `.lora_B.weight`, and the weight that it patches."""
    found = {}
    for name in original_linears(family):
        found[f"diffusion_model.{name}"] = name
        found[f"lora_unet_{name.replace('.', '_')}"] = name
    return found


def loaded_by_comfyui(tensors: Mapping[str, Tensor], known: Mapping[str, str]) -> dict[str, Tensor]:
    """The delta of each weight as comfy/weight_adapter/lora.py computes it; every key must be used."""
    used: set[str] = set()
    found = {}
    for stem, weight in known.items():
        up, down = f"{stem}.lora_up.weight", f"{stem}.lora_down.weight"
        if up not in tensors:
            up, down = f"{stem}.lora_B.weight", f"{stem}.lora_A.weight"
        if up not in tensors:
            continue
        used |= {up, down}
        scale = 1.0
        if f"{stem}.alpha" in tensors:
            used.add(f"{stem}.alpha")
            scale = tensors[f"{stem}.alpha"].item() / tensors[down].shape[0]
        found[weight] = scale * (tensors[up].double() @ tensors[down].double())
    assert used == set(tensors), sorted(set(tensors) - used)
    return found


def kohya_map(family: str) -> dict[str, str]:
    """networks/lora_flux.py, networks/lora.py: every linear of DoubleStreamBlock and SingleStreamBlock."""
    return {f"lora_unet_{name}".replace(".", "_"): name for name in original_linears(family)}


def loaded_by_kohya(tensors: Mapping[str, Tensor], known: Mapping[str, str]) -> dict[str, Tensor]:
    """lora_name is what stands before the first dot; a module without alpha is an error there."""
    stems = {key.split(".")[0] for key in tensors}
    assert stems <= set(known), sorted(stems - set(known))
    ends = {key.partition(".")[2] for key in tensors}
    assert ends == {"lora_down.weight", "lora_up.weight", "alpha"}
    found = {}
    for stem in stems:
        down, up = tensors[f"{stem}.lora_down.weight"], tensors[f"{stem}.lora_up.weight"]
        scale = float(tensors[f"{stem}.alpha"]) / down.shape[0]
        found[known[stem]] = scale * (up.double() @ down.double())
    return found


def wanted_deltas(family: str, adapter: AdapterWeights) -> dict[str, Tensor]:
    """Our deltas, renamed and fused as if they were weights of a checkpoint."""
    table = FAMILIES.load(family).table("tiny")
    found = {f"{name}.weight": delta for name, delta in deltas(adapter).items()}
    whole = {s.name: found.get(s.name, torch.zeros(s.shape, dtype=torch.float64)) for s in table}
    named = bfl_names(family, whole)
    return {name: named[f"{name}.weight"] for name in original_linears(family)}


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize(
    ("dialect", "known", "load"),
    [
        ("comfyui", comfyui_map, loaded_by_comfyui),
        ("diffusion_model", comfyui_map, loaded_by_comfyui),
        ("kohya", comfyui_map, loaded_by_comfyui),
        ("kohya", kohya_map, loaded_by_kohya),
    ],
)
def test_every_key_is_one_that_the_program_maps_and_every_delta_is_ours(
    family: str, dialect: str, known: Any, load: Any
) -> None:
    """All linears of all blocks, of which some have no adapter: a fused matrix has zero rows for them."""
    full = adapter_for(family, "tiny", alpha=2.0)
    some = {
        name: one for name, one in full.pairs.items() if not name.endswith(("to_k", "add_v_proj"))
    }
    for pairs in (full.pairs, some):
        adapter = AdapterWeights(pairs, 4, 2.0)
        layouts = FAMILIES.load(family).layouts("tiny")
        (file,) = DIALECTS.load(dialect).write(adapter, layouts, {}).values()
        got = load(file.tensors, known(family))
        wanted = wanted_deltas(family, adapter)
        assert {name for name, one in wanted.items() if bool(one.any())} == set(got)
        assert_deltas(got, {name: wanted[name] for name in got})


@pytest.mark.parametrize("family", BASES)
def test_comfyui_maps_the_keys_of_diffusers_as_well(family: str) -> None:
    """comfy/utils.py, flux_to_diffusers: `transformer.<our module>` is a row window of the original weight."""
    adapter = adapter_for(family, "tiny", alpha=2.0)
    (file,) = DIALECTS.load("diffusers").write(adapter, (), {}).values()
    table = FAMILIES.load(family).table("tiny")
    known = {f"transformer.{s.module}": s.module for s in table.linears()}
    assert_deltas(loaded_by_comfyui(file.tensors, known), deltas(adapter))


def test_a_comfyui_file_is_refused_by_diffusers_rather_than_read_without_its_alpha() -> None:
    """Why the two have different dialects: a scale that is passed over would be a picture that is merely wrong."""
    from diffusers.loaders import Flux2LoraLoaderMixin

    adapter = adapter_for("flux2", "tiny", alpha=2.0)
    layouts = FAMILIES.load("flux2").layouts("tiny")
    (file,) = DIALECTS.load("comfyui").write(adapter, layouts, {}).values()
    with pytest.raises(ValueError, match="should be empty"):
        Flux2LoraLoaderMixin.lora_state_dict(dict(file.tensors))


def test_kohyas_header_says_what_the_file_is() -> None:
    for family, module in (("flux1", "networks.lora_flux"), ("flux2", "networks.lora_flux_2")):
        adapter = adapter_for(family, "tiny", alpha=2.0)
        layouts = FAMILIES.load(family).layouts("tiny")
        (file,) = DIALECTS.load("kohya").write(adapter, layouts, {"outsize.base": "x"}).values()
        assert file.metadata == {
            "outsize.base": "x",
            "ss_network_dim": "4",
            "ss_network_alpha": "2",
            "ss_network_module": module,
        }


def test_a_kohya_key_that_the_layout_cannot_make_is_named() -> None:
    """Of SDXL here; of a text encoder it would be `lora_te1_`, which is no key of this kind at all."""
    layouts = FAMILIES.load("flux2").layouts("tiny")
    p = pair(4, 4, 2)
    stem = "lora_unet_input_blocks_4_1_proj_in"
    tensors = {f"{stem}.lora_down.weight": p.A, f"{stem}.lora_up.weight": p.B}
    with pytest.raises(AdapterError, match=f"{stem}: layout 'bfl' knows no such module"):
        DIALECTS.load("kohya").read({"x.safetensors": TensorFile(tensors, {})}, layouts)


@pytest.fixture(autouse=True)
def _quiet_clients() -> Iterator[None]:
    """Diffusers logs advice on every load."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)
