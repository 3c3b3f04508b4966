"""Previews while training: they are there, labelled, of the step they name, and no bit of training knows of them."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from run_support import adapter_of, checkpoint_bytes, site_of, train_here, write_recipe
from text_run_support import write_language, write_text_recipe
from tiny import write_tiny

from outsize.app import models as app_models
from outsize.app import previews as app_previews
from outsize.app.render import Shot, render, settings_of
from outsize.app.train import train
from outsize.base.errors import RecipeError
from outsize.base.journal import read_journal
from outsize.devices._profile import read_machine, stated
from outsize.devices.cpu import Cpu
from outsize.layers.compiled import BlockCompiler
from outsize.plan.names import check_names
from outsize.plan.plan import Plan
from outsize.plan.planner import make_plan
from outsize.recipes.load import load_recipe
from outsize.recipes.recipe import Recipe
from outsize.runs.folder import RunFolder

PREVIEWS: dict[str, Any] = {
    "every": 2,
    "prompts": ["a red picture", "a green picture"],
    "seeds": [0, 7],
    "steps": 2,
    "width": 32,
    "height": 32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("models") / "flux2")


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language(tmp_path_factory.mktemp("models") / "llama")


def _previews(run: RunFolder) -> dict[int, dict[str, Any]]:
    return {
        int(one.name): json.loads((one / "preview.json").read_text(encoding="utf-8"))
        for one in sorted(run.previews.iterdir())
    }


@pytest.mark.parametrize("kind", ["resident", "stream"])
@pytest.mark.parametrize("decode", ["now", "end"])
def test_a_run_with_previews_ends_with_the_same_bytes(
    model: Path, tmp_path: Path, kind: str, decode: str
) -> None:
    """Accumulation, dropout of captions and optimiser state included; the blocks' ring is used by both."""
    found = []
    for name, previews in (("without", {}), ("with", PREVIEWS | {"decode": decode})):
        recipe = write_recipe(
            tmp_path, model=model, name=name, previews=previews, train={"steps": 5, "accumulate": 2},
            placement={"kind": kind, "slots": 2}, checkpoints={"every": 1},
        )  # fmt: skip
        trained, run = train_here(recipe)
        assert trained.outcome == "completed"
        found.append(checkpoint_bytes(run))
    assert found[0] == found[1]
    assert list(_previews(run)) == [0, 2, 4, 5]


@pytest.mark.parametrize("kind", ["resident", "stream"])
@pytest.mark.slow
def test_previews_of_a_compiled_base_change_no_bit_and_compile_nothing(
    model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a size that is never trained on, for which a compiler would make graphs of its own."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    compilers: list[BlockCompiler] = []

    def make(*args: Any, **options: Any) -> BlockCompiler:
        compilers.append(BlockCompiler(*args, compile_graph=lambda graph, _: graph, **options))
        monkeypatch.setattr(compilers[-1], "close", lambda: None)
        return compilers[-1]

    monkeypatch.setattr(app_models, "BlockCompiler", make)
    found = []
    for name, previews in (("without", {}), ("with", PREVIEWS)):
        recipe = write_recipe(
            tmp_path, model=model, name=name, previews=previews, train={"steps": 3},
            placement={"kind": kind, "slots": 2, "recompute": True},
        )  # fmt: skip
        with site_of(recipe) as (site, run):
            site.plan = replace(site.plan, compute=replace(site.plan.compute, compiles=True))
            train(site, run, lambda _report: None)
        found.append(checkpoint_bytes(run))
    assert found[0] == found[1]
    without, with_previews = (one.num_graphs for one in compilers)
    assert without == with_previews > 0
    assert len(_previews(run)) == 3


@pytest.mark.parametrize(("kind", "ema"), [("resident", None), ("stream", None), ("resident", 0.5)])
def test_previews_show_what_the_adapter_of_their_step_makes(
    model: Path, tmp_path: Path, kind: str, ema: float | None
) -> None:
    """Each equals, pixel for pixel, what `outsize sample` makes of that step's checkpoint; step 0 is the base."""
    recipe = write_recipe(
        tmp_path, model=model, previews=PREVIEWS, placement={"kind": kind, "slots": 2},
        train={"steps": 4, "ema": ema},
    )  # fmt: skip
    _, run = train_here(recipe)
    found = _previews(run)
    shots = [Shot(prompt, seed) for seed in PREVIEWS["seeds"] for prompt in PREVIEWS["prompts"]]
    for step in (0, 2, 4):
        rows = found[step]["pictures"]
        assert [(row["prompt"], row["seed"]) for row in rows] == [
            (one.prompt, one.seed) for one in shots
        ]
        shown = [_pixels(run.previews / f"{step:08d}" / row["file"]) for row in rows]
        for later in list(run.checkpoints.iterdir()):
            if int(later.name) > max(step, 2):
                later.rename(tmp_path / f"moved-{later.name}")
        with site_of(recipe) as (site, _):
            settings = settings_of(site, site.recipe.previews.over(site.recipe.compare))
            truth = render(site, run, shots, settings, with_adapter=step > 0)
        for moved in tmp_path.glob("moved-*"):
            moved.rename(run.checkpoints / moved.name.removeprefix("moved-"))
        for one, other in zip(shown, truth, strict=True):
            assert np.array_equal(one, np.asarray(other))
    assert not np.array_equal(
        _pixels(run.previews / "00000000" / "000.png"),
        _pixels(run.previews / "00000004" / "000.png"),
    )


def _pixels(path: Path) -> Any:
    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB"))


def test_the_grid_is_labelled_and_holds_a_row_for_each_seed(model: Path, tmp_path: Path) -> None:
    _, run = train_here(write_recipe(tmp_path, model=model, previews=PREVIEWS, train={"steps": 2}))
    grid = _pixels(run.previews / "00000002" / "grid.png")
    assert grid.shape[0] >= 2 * 96
    assert grid.shape[1] >= 150 + 2 * 96
    assert grid[:40].min() < 120, "the heading is dark"
    folder = run.previews / "00000002"
    assert not list(folder.glob("*.safetensors")), "latents go when pictures are there"


def test_texts_of_previews_are_embedded_before_the_base_is_loaded(
    model: Path, tmp_path: Path
) -> None:
    """And no encoder is opened beside it; the codec is, or waits, as planned."""
    for decode in ("now", "end"):
        recipe = write_recipe(
            tmp_path, model=model, name=decode, previews=PREVIEWS | {"decode": decode},
            train={"steps": 2}, cache=f"cache-{decode}",
        )  # fmt: skip
        with site_of(recipe) as (site, run):
            train(site, run, lambda _report: None)
            assert site.plan.decodes_previews == (decode == "now")
            names = [one.name for one in site.stages.finished]
        base = names.index("load base")
        assert all(names.index(f"load {slot}") < base for slot in ("text_encoder",))
        assert names[base + 1 :].count("load text_encoder") == 0
        last_train = names.index("train")
        decoding = [i for i, name in enumerate(names) if name == "decode previews"]
        assert decoding, names
        assert all((i < last_train) == (decode == "now") for i in decoding)


def test_a_killed_or_stopped_run_loses_no_preview(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a kill left out between checkpoint and preview is made up for, and latents wait on disk."""
    settings = PREVIEWS | {"decode": "end"}
    recipe = write_recipe(tmp_path, model=model, previews=settings, train={"steps": 6})
    save = app_previews.PicturePreviews._save

    def killed(self: Any, folder: Path, step: int, latents: Any) -> None:
        if step == 4:
            raise KeyboardInterrupt
        save(self, folder, step, latents)

    monkeypatch.setattr(app_previews.PicturePreviews, "_save", killed)
    with pytest.raises(KeyboardInterrupt):
        train_here(recipe)
    run = RunFolder(tmp_path / "runs" / "run")
    assert list(_previews(run)) == [0, 2]
    assert (run.previews / "00000002" / "latents.safetensors").exists()
    monkeypatch.undo()
    trained, run = train_here(recipe)
    assert trained.resumed_at == 4
    assert list(_previews(run)) == [0, 2, 4, 6]
    assert not list(run.previews.rglob("*.safetensors"))
    assert len(list(run.previews.glob("*/grid.png"))) == 4
    whole = write_recipe(tmp_path, model=model, name="whole", train={"steps": 6})
    _, unbroken = train_here(whole)
    assert checkpoint_bytes(run) == checkpoint_bytes(unbroken)
    recipe = write_recipe(tmp_path, model=model, previews=settings, train={"steps": 6})
    trained, run = train_here(recipe)  # nothing is left to do, and nothing is made again
    made = [one["step"] for one in read_journal(run.journal) if one["event"] == "preview"]
    assert made == [0, 2, 4, 6]


def test_what_a_kill_left_of_a_preview_is_cleared_away(model: Path, tmp_path: Path) -> None:
    """A folder under a temporary name holds latents whose preview.json was never written."""
    recipe = write_recipe(tmp_path, model=model, previews=PREVIEWS | {"decode": "end"})
    left = tmp_path / "runs" / "run" / "previews" / ".tmp-00000002-0123456789ab"
    left.mkdir(parents=True)
    (left / "latents.safetensors").write_bytes(b"")
    _, run = train_here(recipe)
    assert list(_previews(run)) == [0, 2, 4, 6]
    assert not left.exists()


def test_the_device_is_told_again_how_exactly_to_compute(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening the codec asks for exact kernels, on cards for the whole process."""
    said: list[bool] = []
    monkeypatch.setattr(Cpu, "compute_exactly", lambda _self, *, is_wanted: said.append(is_wanted))
    seen: list[bool] = []
    recipe = write_recipe(
        tmp_path, model=model, previews=PREVIEWS | {"decode": "now"}, train={"steps": 4}
    )
    with site_of(recipe) as (site, run):
        site.plan = replace(site.plan, compute=replace(site.plan.compute, is_exact=False))
        train(site, run, lambda _report: seen.append(said[-1]))
    assert seen == [False] * 4
    assert True in said


def test_without_prompts_captions_are_taken_and_the_start_may_be_left_out(
    model: Path, tmp_path: Path
) -> None:
    previews = {"every": 4, "at_start": False, "steps": 1}
    _, run = train_here(
        write_recipe(
            tmp_path, model=model, previews=previews, compare={"prompts": []}, train={"steps": 3}
        )
    )
    (found,) = _previews(run).values()
    assert found["step"] == 3
    prompts = [row["prompt"] for row in found["pictures"]]
    assert prompts == [f"a {one} picture" for one in ("red", "green", "blue", "black")]
    assert found["settings"]["num_steps"] == 1
    assert found["settings"]["width"] == 64


def test_texts_are_previewed_and_change_no_bit(language: Path, tmp_path: Path) -> None:
    found = []
    for name, previews in (("without", {}), ("with", {"every": 2, "prompts": ["a red cat"]})):
        recipe = write_text_recipe(
            tmp_path, model=language, name=name, previews=previews, train={"steps": 4}
        )
        _, run = train_here(recipe)
        found.append(checkpoint_bytes(run))
    assert found[0] == found[1]
    made = _previews(run)
    assert list(made) == [0, 2, 4]
    (text,) = made[4]["texts"]
    assert text["prompt"] == "a red cat"
    assert text["text"] != made[0]["texts"][0]["text"]
    assert adapter_of(run)


# --- the plan ------------------------------------------------------------------------------------


def _planned(recipe: Recipe, vram_bytes: int) -> Plan:
    base = read_machine(recipe.cache_folder())
    machine = stated(vram_bytes=vram_bytes, ram_bytes=64 << 30, gpu=None, base=base)
    return make_plan(recipe, machine)


def _large(model: Path, folder: Path, decode: str, kind: str = "resident") -> Recipe:
    """Previews whose decoding takes more than anything else."""
    previews = PREVIEWS | {"width": 3072, "height": 3072, "decode": decode}
    return load_recipe(
        write_recipe(folder, model=model, previews=previews, placement={"kind": kind})
    )


def _sizes(plan: Plan) -> dict[str, int]:
    return {phase.name: phase.device_bytes for phase in plan.phases}


def test_decoding_is_planned_beside_the_base_only_where_it_fits(
    model: Path, tmp_path: Path
) -> None:
    """The answer changes where what decoding takes, and a margin, is there; the placement does not."""
    auto = _large(model, tmp_path, "auto")
    roomy = _planned(auto, 64 << 30)
    assert roomy.decodes_previews
    beside = _sizes(roomy)["decode previews"]
    after = _planned(_large(model, tmp_path, "end"), 64 << 30)
    assert not after.decodes_previews
    assert _sizes(after)["decode previews"] < beside
    assert any("as the recipe says" in note for note in after.notes)
    tight = _planned(auto, int(beside * 1.01))  # it fits, but nothing would be spare
    assert tight.fits
    assert not tight.decodes_previews
    (note,) = [one for one in tight.notes if "latents" in one]
    assert "beside the base the image codec would want" in note
    assert _planned(auto, int(beside / 0.94)).decodes_previews


def test_what_insists_on_decoding_now_and_cannot_is_refused_with_that_remedy(
    model: Path, tmp_path: Path
) -> None:
    now = _large(model, tmp_path, "now")
    sizes = _sizes(_planned(now, 64 << 30))
    beside = sizes.pop("decode previews")
    assert beside > max(sizes["train step"], sizes["preview"])
    plan = _planned(now, beside - 1)
    assert not plan.fits
    assert plan.refusal is not None
    assert plan.refusal.startswith("decode previews needs ")
    assert "`previews: {decode: auto}`" in plan.refusal


def test_a_preview_takes_what_sampling_takes_and_what_training_keeps(
    model: Path, tmp_path: Path
) -> None:
    """The same size as in compare: the optimiser's state, the masters and a waiting batch are beside it."""
    previews = {"every": 2}
    plan = _planned(load_recipe(write_recipe(tmp_path, model=model, previews=previews)), 8 << 30)
    phases = {phase.name: phase for phase in plan.phases}
    extra = phases["preview"].device_bytes - phases["sample"].device_bytes
    of_step = {one.owner: one.num_bytes for one in phases["train step"].items}
    kept = of_step["optimizer state"] + of_step["adapter"]
    sampling = {one.owner: one.num_bytes for one in phases["sample"].items}
    batch = {one.owner: one.num_bytes for one in phases["preview"].items}["batch"]
    assert 0 < batch < of_step["batch"]
    assert extra == kept - sampling["adapter"] + batch


def test_a_run_without_previews_is_planned_as_before(model: Path, tmp_path: Path) -> None:
    plan = _planned(load_recipe(write_recipe(tmp_path, model=model)), 8 << 30)
    names = [phase.name for phase in plan.phases]
    assert not [name for name in names if "preview" in name]


def test_previews_are_no_part_of_what_decides_numbers(model: Path, tmp_path: Path) -> None:
    plain = load_recipe(write_recipe(tmp_path, model=model))
    shown = load_recipe(write_recipe(tmp_path, model=model, previews=PREVIEWS))
    assert plain.numbers_digest() == shown.numbers_digest()
    assert plain.digest() != shown.digest()


def test_text_has_no_pixels(language: Path, tmp_path: Path) -> None:
    recipe = write_text_recipe(tmp_path, model=language, previews={"every": 2, "width": 64})
    with pytest.raises(RecipeError, match=r"previews\.width: has no meaning"):
        check_names(load_recipe(recipe), origin=str(recipe))


def test_noise_of_previews_is_their_own(model: Path, tmp_path: Path) -> None:
    """The process's generator is where it was."""
    recipe = write_recipe(tmp_path, model=model, previews=PREVIEWS, train={"steps": 2})
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    train_here(recipe)
    before = functools.partial(torch.rand, 3)
    assert torch.equal(before(), expected)
