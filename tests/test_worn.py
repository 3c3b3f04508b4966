"""Adapters from files in place of a run's own: sampled, compared, several at once, and as the beginning of a training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import tiny_inputs
from run_support import adapter_of, site_of, train_here, write_recipe
from test_dialects import adapter_for, deltas
from text_run_support import write_text_recipe
from tiny import write_tiny
from torch import Tensor

from outsize.app import render
from outsize.app.adapter_files import Worn, read_adapter, read_worn
from outsize.app.attached import adapted, put_on_
from outsize.app.export import export_run
from outsize.app.parts import BASE
from outsize.base.errors import AdapterError
from outsize.base.journal import read_journal
from outsize.cli.main import main
from outsize.dialects.protocol import AdapterWeights
from outsize.export.export import export_adapter
from outsize.families.protocol import FAMILIES
from outsize.recipes.load import load_recipe
from outsize.runs.folder import RunFolder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny trained run, its adapter as files of three clients beside it."""
    folder = tmp_path_factory.mktemp("worn")
    recipe = write_recipe(folder, adapter={"rank": 4, "alpha": 8.0})
    _, run = train_here(recipe)
    for dialect in ("kohya", "diffusers"):
        export_run(load_recipe(recipe), run, dialect, folder / f"{dialect}.safetensors")
    export_run(load_recipe(recipe), run, "peft", folder / "peft")
    return folder


def recipe_in(trained: Path, folder: Path, **changes: Any) -> Path:
    """Another run of the same base, pictures and cache."""
    shutil.copytree(trained / "pictures", folder / "pictures", dirs_exist_ok=True)
    cache = {"cache": str(trained / "cache")}
    return write_recipe(folder, model=trained / "model", **(cache | changes))


def pictures_of(recipe: Path, worn: AdapterWeights | None) -> list[np.ndarray]:
    with site_of(recipe) as (site, run):
        site.worn = worn
        shots = [render.Shot("a red picture", 0), render.Shot("a blue picture", 3)]
        made = render.render(site, run, shots, render.settings_of(site), with_adapter=True)
        return [np.asarray(one) for one in made]


def predicted(recipe: Path, worn: AdapterWeights | None, *, is_bare: bool = False) -> Tensor:
    """One prediction, streamed, with what is worn or with the base alone."""
    with site_of(recipe) as (site, run):
        site.worn = worn
        part: Any = site.parts[BASE]
        with adapted(site) as (model, adapter, _):
            if worn is not None:
                put_on_(site, run, adapter)
            model.begin("forward")
            with torch.no_grad():
                found: Tensor = part.family.predict(
                    part.variant, model.module, **tiny_inputs(part, seed=1)
                )
            assert is_bare == (worn is None)
            return found


def test_an_exported_adapter_draws_what_its_run_draws(trained: Path, tmp_path: Path) -> None:
    """Bit for bit from files that keep both factors and alpha; from one with alpha in B too, as 2 is a power of two."""
    own = pictures_of(trained / "recipe.yaml", None)
    other = recipe_in(trained, tmp_path, adapter={"rank": 2})
    for name in ("kohya.safetensors", "diffusers.safetensors", "peft"):
        drawn = pictures_of(other, read_adapter(trained / name, "flux2", "tiny").weights)
        assert all(np.array_equal(a, b) for a, b in zip(drawn, own, strict=True)), name


def test_several_adapters_add_up_as_their_deltas_do(trained: Path, tmp_path: Path) -> None:
    """Against the base with the float64 sum of all deltas in its weights: what `outsize merge` makes in fp32."""
    from outsize.app.merge import Order, merge

    model = write_tiny("flux2", "tiny", tmp_path / "model", dtype=torch.float32)
    exact = {"base": {"format": {"name": "plain", "dtype": "fp32"}}}
    recipe = write_recipe(tmp_path, model=model, placement={"kind": "stream"}, **exact)
    second = tmp_path / "second.safetensors"
    full = adapter_for("flux2", "tiny", rank=2, alpha=0.05)
    some = {name: one for name, one in full.pairs.items() if "single" in name}
    layouts = FAMILIES.load("flux2").layouts("tiny")
    export_adapter(
        AdapterWeights(some, 2, 0.05), "comfyui", layouts, second, {"base": "flux2.tiny"}
    )
    several = [Worn(trained / "kohya.safetensors", 0.7), Worn(second, -1.3)]
    worn = read_worn(several, "flux2", "tiny")
    order = Order(tmp_path / "merged", None, 1 << 40, torch.device("cpu"), offline=True, told={})
    merge(load_recipe(recipe), worn, order)
    ours = predicted(recipe, worn)
    parts = {"text_encoder": {"source": "./model"}, "vae": {"source": "./model"}}
    base = {**exact["base"], "components": parts}
    merged = write_recipe(tmp_path, model=tmp_path / "merged", base=base)
    wanted = predicted(merged, None, is_bare=True)
    scale = float(wanted.abs().max())
    assert float((ours - wanted).abs().max()) < 2e-5 * scale
    plain = predicted(write_recipe(tmp_path, model=model, **exact), None, is_bare=True)
    assert float((plain - wanted).abs().max()) > 1e-2 * scale


def test_sample_and_compare_wear_files_without_any_training(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_in(trained, tmp_path)
    run = RunFolder(load_recipe(recipe).run_folder())
    file = trained / "kohya.safetensors"
    wear = ["--adapter", f"{file}:0.8", "--adapter", str(trained / "peft")]
    assert main(["sample", str(recipe), "-p", "a red picture", *wear, "--offline"]) == 0
    assert main(["compare", str(recipe), *wear, "--offline"]) == 0
    assert "Base against adapter" in capsys.readouterr().out
    (event, _) = [one for one in read_journal(run.journal) if one["event"] == "worn"]
    assert [one["weight"] for one in event["adapters"]] == [0.8, 1.0]
    assert event["adapters"][0]["sha256"] == read_adapter(file, "flux2", "tiny").digest
    assert str(trained) not in run.journal.read_text().split('"worn"')[1].split("\n")[0]
    made = json.loads((run.path / "compare" / "001" / "compare.json").read_text())
    assert made["pictures"][0]["rms"] > 0
    for arguments, code, words in (
        (["sample", str(recipe), "-p", "x", "--base", *wear], 2, "leaves every adapter out"),
        (["compare", str(recipe), "--adapter", "none.safetensors"], 2, "no such adapter"),
        (["compare", str(recipe)], 2, "train first"),
    ):
        assert main(arguments) == code
        assert words in capsys.readouterr().err


def test_a_language_adapter_is_worn_from_a_peft_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_text_recipe(tmp_path, train={"steps": 4}, compare={"temperature": 0})
    train_here(recipe)
    assert main(["export", str(recipe), "--out", str(tmp_path / "peft")]) == 0
    other = write_text_recipe(
        tmp_path, name="other", model=tmp_path / "model", compare={"temperature": 0}
    )
    said = []
    for arguments in (
        [str(tmp_path / "runs" / "run")],
        [str(other), "--adapter", str(tmp_path / "peft")],
    ):
        capsys.readouterr()
        assert main(["sample", *arguments, "-p", "a red cat", "--offline"]) == 0
        said.append(capsys.readouterr().out.splitlines()[0])
    assert said[0] == said[1]


# --- beginning from a file ---------------------------------------------------------------------------


def begun(recipe: Path) -> tuple[dict[str, Tensor], dict[str, float], list[dict[str, Any]]]:
    """Values and scales with which a training begins, and the journal's lines of it."""
    from outsize.app.starting import begin_from_file_

    with site_of(recipe) as (site, run):
        with adapted(site, None) as (_, adapter, initial):
            begin_from_file_(site, run, adapter, initial)
            for name, parameter in adapter.parameters().items():
                assert torch.equal(parameter.float(), initial[name]), name
            scales = {path: adapter.scale_of(path) for path in adapter.paths}
        events = [one for one in read_journal(run.journal) if one["event"] == "started_from"]
    return initial, scales, events


@pytest.mark.parametrize(
    "adapter",
    [{"rank": 4, "alpha": 8.0}, {"rank": 4, "alpha": 3.0}, {"rank": 6, "scaling": "sqrt_rank"}],
)
def test_a_training_begins_with_the_very_delta_of_the_file(
    adapter: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    """Whatever the recipe's own scale and rank: further rows of A are there to be learned with, further columns of B zero."""
    file = trained / "kohya.safetensors"
    choice = {**adapter, "start": str(file)}
    values, scales, (event,) = begun(recipe_in(trained, tmp_path, adapter=choice))
    wanted = deltas(read_adapter(file, "flux2", "tiny").weights)
    assert set(scales) == set(wanted)
    for path, delta in wanted.items():
        A, B = values[f"{path}.lora_A"], values[f"{path}.lora_B"]
        got = B.double() @ A.double() * scales[path]
        assert A.shape[0] == adapter["rank"]
        assert torch.allclose(got, delta, rtol=0, atol=2e-7 * float(delta.abs().max()))
        assert bool(A.any(dim=1).all())
    assert event["grown"] == (len(wanted) if adapter["rank"] == 6 else 0)
    assert event["zero"] == []


def test_a_training_goes_on_from_the_file_and_resumes_without_it(
    trained: Path, tmp_path: Path
) -> None:
    """The first steps are not those of a fresh adapter; once there is a checkpoint, the file is history."""
    file = tmp_path / "start.safetensors"
    shutil.copy(trained / "kohya.safetensors", file)
    start = {"rank": 4, "alpha": 8.0, "start": "start.safetensors"}
    recipe = recipe_in(trained, tmp_path, adapter=start, train={"steps": 2, "learning_rate": 1e-4})
    _, run = train_here(recipe)
    two = adapter_of(run, 2)
    ended = adapter_of(RunFolder(trained / "runs" / "run"))
    moved = [float((two[key] - ended[key]).norm() / ended[key].norm()) for key in two]
    assert max(moved) < 0.02, "two small steps from where the other run ended"
    file.unlink()
    recipe = recipe_in(trained, tmp_path, adapter=start, train={"steps": 4, "learning_rate": 1e-4})
    outcome, _ = train_here(recipe)
    assert outcome.resumed_at == 2
    digest = load_recipe(recipe).numbers_digest()
    fresh = recipe_in(
        trained, tmp_path, adapter={"rank": 4, "alpha": 8.0}, train={"learning_rate": 1e-4}
    )
    assert load_recipe(fresh).numbers_digest() != digest


def test_a_part_that_is_zero_in_a_fused_matrix_begins_from_zero(
    trained: Path, tmp_path: Path
) -> None:
    layouts = FAMILIES.load("flux2").layouts("tiny")
    full = adapter_for("flux2", "tiny")
    pairs = {name: pair for name, pair in full.pairs.items() if not name.endswith("attn.to_k")}
    file = tmp_path / "x.safetensors"
    export_adapter(AdapterWeights(pairs, 4, 8.0), "kohya", layouts, file, {"base": "flux2.tiny"})
    values, _, (event,) = begun(
        recipe_in(trained, tmp_path, adapter={"rank": 4, "start": str(file)})
    )
    zero = [name for name in full.pairs if name.endswith("attn.to_k")]
    assert event["zero"] == sorted(zero)
    for name in zero:
        assert not bool(values[f"{name}.lora_B"].any())
        assert bool(values[f"{name}.lora_A"].any())


def test_a_file_that_does_not_fit_is_refused_with_every_module(
    trained: Path, tmp_path: Path
) -> None:
    layouts = FAMILIES.load("flux2").layouts("tiny")
    full = adapter_for("flux2", "tiny", rank=8)
    some = {name: one for name, one in full.pairs.items() if not name.endswith("ff.linear_in")}
    file = tmp_path / "some.safetensors"
    export_adapter(AdapterWeights(some, 8, 8.0), "kohya", layouts, file, {"base": "flux2.tiny"})
    choice = {"rank": 4, "roles": ["mlp"], "start": str(file)}
    with pytest.raises(AdapterError) as caught:
        begun(recipe_in(trained, tmp_path, adapter=choice))
    message = str(caught.value)
    table = FAMILIES.load("flux2").table("tiny")
    mlp = {spec.module for spec in table.linears(["mlp"])}
    for name in full.pairs:
        if name in mlp and name not in some:
            assert f"{name} is trained, and not in the file" in message
        elif name not in mlp:
            assert f"{name} is in the file, and not trained" in message
        else:
            assert f"{name} has rank 8 in the file, 4 in the recipe" in message
    other = tmp_path / "other.safetensors"
    flux1 = FAMILIES.load("flux1").layouts("tiny")
    export_adapter(adapter_for("flux1", "tiny"), "kohya", flux1, other, {"base": "flux1.tiny"})
    with pytest.raises(AdapterError, match=r"it is an adapter of flux1\.tiny"):
        begun(recipe_in(trained, tmp_path, adapter={"start": str(other)}))
    with pytest.raises(AdapterError, match="no such adapter"):
        begun(recipe_in(trained, tmp_path, adapter={"start": "nowhere.safetensors"}))
    dora = {"rank": 4, "kind": "dora", "start": str(trained / "kohya.safetensors")}
    with pytest.raises(AdapterError, match="for kind: lora"):
        begun(recipe_in(trained, tmp_path, adapter=dora))
