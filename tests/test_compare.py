"""Base against adapter: honest pictures, the same in every placement, and those that diffusers' pipelines make."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import TinyBase
from PIL import Image
from run_support import adapter_of, site_of, train_here, write_recipe
from safetensors.torch import save_file
from tiny import scheduler_config, write_tiny
from torch import Tensor

from outsize.app import render
from outsize.app.attached import adapted
from outsize.app.compare import Comparison, compare
from outsize.app.export import export_run
from outsize.app.site import Site
from outsize.base.errors import RecipeError
from outsize.base.files import file_digest, write_json_atomically
from outsize.base.journal import read_journal
from outsize.base.progress import Silent
from outsize.recipes.load import load_recipe, recipe_from_json
from outsize.runs.checkpoint import all_checkpoints
from outsize.runs.folder import RunFolder
from outsize.sample.flow import noise_of

CHOICE: dict[str, Any] = {
    "prompts": ["a red picture", "a green picture"],
    "controls": ["a blue picture"],
    "seeds": [0, 7],
    "steps": 2,
    "width": 64,
    "height": 32,
}
NUM_SUBJECT, NUM_CONTROL = 4, 2  # prompts and controls, times seeds


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe of a trained tiny run."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(
        folder, model=write_tiny("flux2", "tiny", folder / "model"), compare=CHOICE
    )
    train_here(recipe)
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The trained run with a life of its own; model and cache are shared."""
    for name in ("runs", "pictures"):
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path


def _recipe(trained: Path, folder: Path, **changes: Any) -> Path:
    return write_recipe(
        folder,
        model=trained / "model",
        **{"compare": CHOICE, "cache": str(trained / "cache")} | changes,
    )


def _compared(recipe: Path) -> tuple[Comparison, RunFolder]:
    with site_of(recipe) as (site, run):
        return compare(site, run), run


def _files(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted(folder.iterdir())}


def test_the_grid_is_there_labelled_and_of_the_right_size(trained: Path, copied: Path) -> None:
    made, run = _compared(_recipe(trained, copied))
    assert made.grid == run.path / "compare" / "001" / "grid.png"
    with Image.open(made.grid) as opened:
        grid = np.asarray(opened.convert("RGB"))
    # four rows (base and adapter, of prompts and of controls) of cells 96 wide and, at 2:1, 48 high
    assert grid.shape[1] >= 150 + NUM_SUBJECT * 96
    assert grid.shape[0] >= 4 * 48
    assert grid.shape[1] < 150 + NUM_SUBJECT * 120
    titles, captions = grid[100:, 12:150], grid[42:70, 162:]
    for label in (grid[:40], titles, captions):
        assert label.min() < 120, "text is dark"
        assert label.max() == 255, "paper is white"
    pictures = sorted(one.name for one in made.folder.glob("*.png") if one.name != "grid.png")
    assert len(pictures) == 2 * (NUM_SUBJECT + NUM_CONTROL)
    for name in pictures:
        with Image.open(made.folder / name) as picture:
            assert picture.size == (64, 32)


def test_what_was_asked_and_measured_is_written_beside_the_grid(
    trained: Path, copied: Path
) -> None:
    """Controls by themselves: that they did not move is a claim of its own."""
    made, run = _compared(_recipe(trained, copied))
    report = json.loads((made.folder / "compare.json").read_text(encoding="utf-8"))
    rows = report["pictures"]
    assert [(row["prompt"], row["seed"]) for row in rows] == [
        (prompt, seed)
        for prompt in (*CHOICE["prompts"], *CHOICE["controls"])
        for seed in CHOICE["seeds"]
    ]
    measured = [_rms(made.folder, number) for number in range(len(rows))]
    assert [row["rms"] for row in rows] == pytest.approx(measured, abs=1e-4)
    assert made.subject.rms == pytest.approx(np.mean(measured[:NUM_SUBJECT]))
    assert made.control is not None
    assert made.control.rms == pytest.approx(np.mean(measured[NUM_SUBJECT:]))
    assert made.subject.rms > 0
    (event,) = [one for one in read_journal(run.journal) if one["event"] == "compared"]
    assert event["subject"]["rms"] == pytest.approx(made.subject.rms, abs=1e-4)
    assert event["control"]["rms"] == pytest.approx(made.control.rms, abs=1e-4)


def _rms(folder: Path, number: int) -> float:
    """From the files, in float64."""
    both = []
    for kind in ("base", "adapter"):
        with Image.open(folder / f"{number:03d}-{kind}.png") as picture:
            both.append(np.asarray(picture, dtype=np.float64))
    return float(np.sqrt(((both[0] - both[1]) ** 2).mean()))


def test_without_controls_none_are_reported_and_without_prompts_captions_are_taken(
    trained: Path, copied: Path
) -> None:
    choice = {"prompts": [], "controls": [], "seeds": [0], "steps": 1, "width": 32, "height": 32}
    made, _ = _compared(_recipe(trained, copied, compare=choice))
    assert made.control is None
    report = json.loads((made.folder / "compare.json").read_text(encoding="utf-8"))
    captions = {one.read_text(encoding="utf-8") for one in (copied / "pictures").glob("*.txt")}
    assert {row["prompt"] for row in report["pictures"]} == captions


def test_a_second_comparison_is_the_same_and_overwrites_nothing(
    trained: Path, copied: Path
) -> None:
    recipe = _recipe(trained, copied)
    first, _ = _compared(recipe)
    before = _files(first.folder)
    second, _ = _compared(recipe)
    assert (first.folder.name, second.folder.name) == ("001", "002")
    assert _files(first.folder) == before
    assert _files(second.folder) == before


def test_progress_of_sampling_begins_at_nothing(trained: Path, copied: Path) -> None:
    """A listener that first hears of a task when it is done cannot say how long it took."""
    heard: list[tuple[float, float]] = []

    class Listener(Silent):
        def advance(self, task: str, done: float, total: float, unit: str = "") -> None:
            if task == "sample":
                assert unit == "pictures"
                heard.append((done, total))

    with site_of(_recipe(trained, copied)) as (site, run):
        site.progress = Listener()
        compare(site, run)
    once = [(done, 6) for done in (0, 6)]
    assert heard == [*once, *once]


def test_an_adapter_with_zero_delta_changes_no_pixel(trained: Path, copied: Path) -> None:
    run = RunFolder(copied / "runs" / "run")
    _replace_adapter(
        run,
        {
            name: torch.zeros_like(one) if name.endswith("lora_B") else one
            for name, one in adapter_of(run).items()
        },
    )
    made, _ = _compared(_recipe(trained, copied))
    report = json.loads((made.folder / "compare.json").read_text(encoding="utf-8"))
    assert [(row["rms"], row["changed"]) for row in report["pictures"]] == [(0.0, 0.0)] * 6
    assert (made.subject.rms, made.subject.changed) == (0.0, 0.0)
    for number in range(NUM_SUBJECT + NUM_CONTROL):
        assert _rms(made.folder, number) == 0


def _replace_adapter(run: RunFolder, values: dict[str, Tensor]) -> None:
    """Write other values into the newest checkpoint, digests and all."""
    newest = all_checkpoints(run.checkpoints)[0]
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    save_file(values, newest / "adapter.safetensors")
    state["digests"]["adapter.safetensors"] = file_digest(newest / "adapter.safetensors")
    write_json_atomically(newest / "state.json", state)


def test_streamed_pictures_equal_resident_ones_bit_for_bit(trained: Path, copied: Path) -> None:
    found = []
    for placement in ({"kind": "resident"}, {"kind": "stream", "slots": 2}):
        made, _ = _compared(_recipe(trained, copied, placement=placement))
        found.append(_files(made.folder))
    assert found[0] == found[1]


def test_a_run_without_checkpoint_is_refused_before_any_model_is_opened(
    trained: Path, tmp_path: Path
) -> None:
    with site_of(_recipe(trained, tmp_path, name="fresh")) as (site, run):
        with pytest.raises(RecipeError, match=r"fresh has no checkpoint.*train first"):
            compare(site, run)
        assert site.stages.finished == []


def test_an_adapter_of_other_settings_is_not_shown_as_this_recipes(
    trained: Path, copied: Path
) -> None:
    """With another alpha the same file is another adapter; nothing in it would tell."""
    recipe = _recipe(trained, copied, adapter={"alpha": 64.0})
    with pytest.raises(RecipeError, match=r"trained with other settings.*alpha is 64.0, was 4.0"):
        _compared(recipe)


def test_the_run_folder_keeps_the_recipe_that_was_trained(trained: Path, copied: Path) -> None:
    """A refused start with other settings must not change what an export of the run folder reads."""
    run = RunFolder(copied / "runs" / "run")
    before = run.recipe.read_bytes()
    recipe = _recipe(trained, copied, adapter={"alpha": 64.0})
    with pytest.raises(RecipeError, match="the recipe"):
        train_here(recipe)
    with pytest.raises(RecipeError, match="trained with other settings"):
        export_run(load_recipe(recipe), run, "peft", copied / "adapter")
    assert run.recipe.read_bytes() == before
    kept = recipe_from_json(json.loads(before), origin="recipe.json")
    export_run(kept, run, "peft", copied / "adapter")
    config = json.loads((copied / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"]) == (4, 4)


# Sampling against diffusers: the same modules on the same decoded weights, the same embeddings, the same noise.

PROMPTS = ("a red picture", "a blue cat")
SEEDS = (11, 12)


def _twin(site: Site, slot: str) -> Any:
    """Upstream's module with the weights that the part's store decodes to."""
    part = site.parts[slot]
    return TinyBase(part.family, part.variant, part.packing, site.store(slot)).upstream()


def _pipeline(site: Site, family: str, variant: str) -> Any:
    """Diffusers' own pipeline around upstream's transformer and codec; embeddings are given to it."""
    import diffusers

    given: dict[str, Any] = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**scheduler_config(family, variant)),
        "vae": _twin(site, "vae"),
        "text_encoder": None,
        "tokenizer": None,
        "transformer": _twin(site, "base"),
    }
    if family == "flux1":
        made: Any = diffusers.FluxPipeline(**given, text_encoder_2=None, tokenizer_2=None)
    elif variant == "tiny-klein":
        made = diffusers.Flux2KleinPipeline(**given, is_distilled=False)
    else:
        made = diffusers.Flux2Pipeline(**given)
    made.set_progress_bar_config(disable=True)
    return made


def _tokens_of(latents: Tensor, family: str) -> Tensor:
    """As the pipelines hold them: (B, N, C)."""
    from diffusers import FluxPipeline

    if family == "flux2":
        return latents.flatten(2).transpose(1, 2)
    found: Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
    return found


@dataclass
class Sampled:
    """Latents (B, N, C) after each step, and pictures."""

    steps: list[Tensor]
    pictures: list[Image.Image]


def _by_diffusers(
    site: Site, family: str, variant: str, conditions: dict[str, dict[str, Tensor]], noise: Tensor
) -> Sampled:
    settings, steps = render.settings_of(site), []

    def keep(_pipe: Any, _i: int, _t: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
        steps.append(values["latents"].clone())
        return values

    several = [conditions[prompt] for prompt in PROMPTS]
    given: dict[str, Any] = {
        "prompt_embeds": torch.stack([one["text"] for one in several]),
        "latents": _tokens_of(noise, family) if family == "flux1" else noise,
    }
    if family == "flux1":
        given["pooled_prompt_embeds"] = torch.stack([one["pooled"] for one in several])
    if settings.is_true_cfg:
        given["negative_prompt_embeds"] = torch.stack([conditions[""]["text"]] * len(PROMPTS))
    with torch.no_grad():
        pictures = _pipeline(site, family, variant)(
            height=settings.height,
            width=settings.width,
            num_inference_steps=settings.num_steps,
            guidance_scale=settings.guidance,
            callback_on_step_end=keep,
            output_type="pil",
            **given,
        ).images
    return Sampled(steps, pictures)


@pytest.mark.parametrize(
    ("family", "variant"), [("flux1", "tiny"), ("flux2", "tiny"), ("flux2", "tiny-klein")]
)
def test_what_is_sampled_is_what_diffusers_pipeline_samples(
    family: str, variant: str, tmp_path: Path
) -> None:
    """Streamed and packed, by our schedule, guidance and codec: the very same latents, bit for bit in fp32.

    The pipeline divides each timestep, a noise level times 1000, by 1000 again; the model multiplies by 1000 once more.
    In fp32 that comes back to the timestep which we hand over, so that nothing has to be forgiven. klein is sampled as
    its base edition is, by true guidance: two predictions, with and without the prompt.
    """
    recipe = write_recipe(
        tmp_path, family, model=write_tiny(family, variant, tmp_path / "model"),
        base={"variant": variant}, placement={"kind": "stream", "slots": 2},
        compare={"steps": 4, "width": 48, "height": 32},
    )  # fmt: skip
    with site_of(recipe) as (site, _):
        settings = render.settings_of(site)
        shots = [render.Shot(*one) for one in zip(PROMPTS, SEEDS, strict=True)]
        conditions = render._conditions(site, PROMPTS, settings)
        with adapted(site) as (model, adapter, _), adapter.disabled():
            latents = render.sample_latents(site, model, shots, conditions, settings)
        ours = _tokens_of(torch.stack(latents), family)
        pictures = list(render.decode_latents(site, latents))
        noise = noise_of(SEEDS, tuple(latents[0].shape))
        theirs = _by_diffusers(site, family, variant, conditions, noise)
    assert settings.is_true_cfg == (variant == "tiny-klein")
    assert len(theirs.steps) == 4
    assert torch.equal(ours, theirs.steps[-1])
    assert not torch.allclose(ours, _tokens_of(noise, family), atol=0.1), "it moved"
    for mine, upstream in zip(pictures, theirs.pictures, strict=True):
        assert mine.size == upstream.size == (48, 32)
        assert np.array_equal(np.asarray(mine), np.asarray(upstream))
