"""DoRA, rsLoRA and ranks by rule as other programs read them: what they compute is what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TinyBase, make_tiny, tiny_inputs
from peft import PeftModel
from test_dialects import BASES, pipeline_of, write_folder
from torch import Tensor, nn

from outsize.adapters.adapter import Adapter
from outsize.app.adapter_files import read_adapter
from outsize.app.attached import adapter_shape
from outsize.app.export import adapter_weights
from outsize.base.errors import AdapterError
from outsize.dialects.protocol import DIALECTS, AdapterWeights, LoraPair
from outsize.export.export import export_adapter
from outsize.recipes.load import recipe_from_json
from outsize.recipes.recipe import Recipe

RULES = [{"roles": ["mlp"], "rank": 2}, {"match": "*.1.*", "rank": 3, "alpha": 5.0}]
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"kind": "dora"},
    "dora with rsLoRA and rules": {"kind": "dora", "scaling": "sqrt_rank", "ranks": RULES},
    "rsLoRA": {"scaling": "sqrt_rank", "alpha": 7.0},
    "rsLoRA with rules": {"scaling": "sqrt_rank", "ranks": RULES},
    "rules": {"ranks": RULES},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyBase]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_tiny(folder / name, name, ("nf4", {"group": 64})) for name in BASES}


def recipe_of(family: str, adapter: dict[str, Any]) -> Recipe:
    return recipe_from_json(
        {
            "name": "x",
            "base": {"family": family, "variant": "tiny", "source": "nowhere"},
            "data": {"sets": [{"folder": "pictures"}]},
            "adapter": {"rank": 4, **adapter},
        },
        origin="recipe",
    )


def trained(base: TinyBase, recipe: Recipe) -> tuple[Tensor, AdapterWeights]:
    """What a model with a trained adapter predicts, and the adapter as it is given away."""
    model = base.open("stream")
    table = base.family.table(base.variant)
    adapter = Adapter(model.module, table, adapter_shape(recipe.adapter, table))
    initial = adapter.materialise_(
        seed=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
        row_squares=model.row_squares(adapter.paths) if adapter.needs_row_squares else None,
    )
    generator = torch.Generator().manual_seed(5)
    values = {}
    for name, one in initial.items():
        noise = torch.randn(one.shape, generator=generator)
        values[name] = one * (1 + 0.1 * noise) if name.endswith("magnitude") else 0.05 * noise
    adapter.load_(values)
    model.begin("forward")
    return predicted(base, model.module), adapter_weights(values, recipe)


@torch.no_grad()
def predicted(base: TinyBase, module: nn.Module) -> Tensor:
    found: Tensor = base.family.predict(base.variant, module, **tiny_inputs(base, seed=2))
    return found


def exported(weights: AdapterWeights, base: TinyBase, dialect: str, folder: Path) -> Path:
    target = folder / ("out" if DIALECTS.load(dialect).is_folder else "out.safetensors")
    layouts = base.family.layouts(base.variant)
    export_adapter(weights, dialect, layouts, target, {"base": "flux2.dev"})
    return target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", BASES)
def test_peft_and_diffusers_compute_what_was_trained(
    bases: dict[str, TinyBase], family: str, kind: str, tmp_path: Path
) -> None:
    """To a few roundings of fp32: scales are folded into B, lengths are summed in another order."""
    base = bases[family]
    ours, weights = trained(base, recipe_of(family, KINDS[kind]))
    most = 5e-6 * float(ours.abs().max())
    twin = base.upstream()
    assert float((predicted(base, twin) - ours).abs().max()) > 1e3 * most, "it does something"
    opened = PeftModel.from_pretrained(twin, str(exported(weights, base, "peft", tmp_path)))
    assert float((predicted(base, opened.base_model.model) - ours).abs().max()) <= most
    twin = base.upstream()
    folder = tmp_path / "diffusers"
    folder.mkdir()
    write_folder(folder, DIALECTS.load("diffusers").write(weights, base.family.layouts("tiny"), {}))
    pipeline_of(family, twin).load_lora_weights(folder, local_files_only=True)
    assert float((predicted(base, twin) - ours).abs().max()) <= most


@pytest.mark.parametrize("dialect", ["kohya", "comfyui", "diffusion_model"])
@pytest.mark.parametrize("kind", ["rsLoRA", "rsLoRA with rules", "rules"])
def test_other_programs_read_the_same_deltas(
    bases: dict[str, TinyBase], kind: str, dialect: str, tmp_path: Path
) -> None:
    """Alpha / rank x B A by module, as the recipe means it, from what the file says."""
    base = bases["flux2"]
    recipe = recipe_of("flux2", KINDS[kind])
    _, weights = trained(base, recipe)
    found = read_adapter(exported(weights, base, dialect, tmp_path), "flux2", "tiny").weights
    ranks = recipe.adapter.adapted(base.family.table("tiny"))
    assert found.pairs.keys() == ranks.keys()
    generator = torch.Generator().manual_seed(5)
    for module in ranks:
        down = 0.05 * torch.randn(weights.pairs[module].A.shape, generator=generator).double()
        up = 0.05 * torch.randn(weights.pairs[module].B.shape, generator=generator).double()
        wanted = recipe.adapter.scale_of(*ranks[module]) * (up @ down)
        pair = found.pairs[module]
        got = found.scale * (pair.B.double() @ pair.A.double())
        # one rounding of each element of B, of products up to 0.1
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("dialect", "why"),
    [
        ("kohya", "kohya's tools know none; export to peft or diffusers"),
        ("comfyui", "ComfyUI measures lengths in another way"),
        ("diffusion_model", "ComfyUI measures lengths in another way"),
    ],
)
def test_programs_that_cannot_hold_lengths_of_rows_are_named(
    bases: dict[str, TinyBase], dialect: str, why: str, tmp_path: Path
) -> None:
    base = bases["flux2"]
    _, weights = trained(base, recipe_of("flux2", KINDS["dora"]))
    with pytest.raises(AdapterError, match=rf"modules' rows \(adapter\.kind: dora\): {why}"):
        exported(weights, base, dialect, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_dora_file_is_not_taken_for_low_rank_pairs(
    bases: dict[str, TinyBase], tmp_path: Path
) -> None:
    """Added to a base as pairs alone it would be another adapter."""
    base = bases["flux2"]
    _, weights = trained(base, recipe_of("flux2", KINDS["dora"]))
    for dialect in ("peft", "diffusers"):
        folder = tmp_path / dialect
        folder.mkdir()
        with pytest.raises(
            AdapterError, match=r"also learned the lengths of .* can only be worn, merged"
        ):
            read_adapter(exported(weights, base, dialect, folder), "flux2", "tiny")


def test_a_configuration_and_a_file_that_disagree_on_dora_are_refused(
    bases: dict[str, TinyBase],
) -> None:
    base, peft = bases["flux2"], DIALECTS.load("peft")
    _, weights = trained(base, recipe_of("flux2", KINDS["dora"]))
    files = peft.write(weights, (), {})
    assert files["adapter_config.json"].value["use_dora"] is True
    files["adapter_config.json"].value["use_dora"] = False
    with pytest.raises(AdapterError, match=r"says use_dora: False, but .* has lengths of rows for"):
        peft.read(files, ())


def test_lengths_that_do_not_fit_or_are_no_lengths_are_named(tmp_path: Path) -> None:
    pair = LoraPair(torch.ones(2, 3), torch.ones(4, 2))
    for lengths in ({"a": torch.ones(3)}, {"b": torch.ones(4)}):
        with pytest.raises(AdapterError, match=r"lengths of rows \(DoRA\) do not fit a|b"):
            AdapterWeights({"a": pair}, 2, 2.0, lengths)
    bad = AdapterWeights({"a": pair}, 2, 2.0, {"a": torch.tensor([1.0, 2.0, 0.0, 1.0])})
    with pytest.raises(
        AdapterError, match="lengths of rows of 1 of 1 modules are 0, inf or nan: a"
    ):
        export_adapter(bad, "peft", (), tmp_path / "out", {"base": "flux2.dev"})
