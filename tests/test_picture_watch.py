"""Held-out pictures: always the same, never trained on, measured with the same noise, and without a trace in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from run_support import checkpoint_bytes, site_of, train_here, write_pictures, write_recipe
from tiny import write_tiny

from outsize.app.attached import adapted, load_adapter_
from outsize.app.encode import build_corpus
from outsize.app.losses import Losses
from outsize.app.picture_watch import LEVELS, PictureWatch
from outsize.app.pictures import scan_recipe
from outsize.base.errors import RecipeError
from outsize.base.journal import read_journal
from outsize.data.held_out import held_out_pictures, level_seed
from outsize.recipes.load import load_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("model"))


def recipe_in(folder: Path, model: Path, num_pictures: int = 8, **changes: Any) -> Path:
    if not (folder / "pictures").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_pictures(folder / "pictures", num_pictures)
        for number in range(num_pictures):  # each of a shade of its own: none is another's copy
            path = folder / "pictures" / f"{number:02d}.png"
            with Image.open(path) as before:
                size = before.size
            Image.new("RGB", size, (20 * number, 10, 200 - 20 * number)).save(path)
    data = {"held_out": 0.25, "sets": [{"folder": "pictures"}], **changes.pop("data", {})}
    return write_recipe(folder, model=model, data=data, **changes)


def held_names(recipe: Path) -> set[str]:
    loaded = load_recipe(recipe)
    manifest = scan_recipe(loaded)
    return {
        manifest.pictures[index].digest
        for index in held_out_pictures(manifest, loaded.pictures.held_out)
    }


def test_what_is_held_out_follows_from_content_alone(model: Path, tmp_path: Path) -> None:
    """Neither seed nor names nor a copy in another folder changes it, and a copy is held out as well."""
    one = recipe_in(tmp_path / "one", model)
    before = held_names(one)
    assert len(before) == 2
    other = recipe_in(tmp_path / "other", model, train={"seed": 99})
    pictures = tmp_path / "other" / "pictures"
    for path in sorted(pictures.glob("*.png")):
        number = int(path.stem)
        path.rename(pictures / f"z{9 - number}.png")
        (pictures / f"{number:02d}.txt").rename(pictures / f"z{9 - number}.txt")
    assert held_names(other) == before
    copy = pictures / "a_copy.png"
    copy.write_bytes((pictures / "z9.png").read_bytes())
    copy.with_suffix(".txt").write_text("a copy", encoding="utf-8")
    loaded = load_recipe(other)
    manifest = scan_recipe(loaded)
    chosen = held_out_pictures(manifest, 0.99)
    by_digest = [manifest.pictures[i].digest for i in chosen]
    assert all(
        index in chosen for index, one in enumerate(manifest.pictures) if one.digest in by_digest
    )
    assert len(chosen) < len(manifest.pictures), "something is left to train on"


def test_held_out_pictures_are_never_drawn(model: Path, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, model, train={"batch": 2})
    with site_of(recipe) as (site, _):
        corpus = build_corpus(site)
        held = held_out_pictures(corpus.manifest, 0.25)
        names = {str(corpus.manifest.pictures[index].origin) for index in held}
        drawn = {name for step in range(40) for name in corpus.pictures_of(step)}
        assert len(names) == corpus.num_held_out == 2
        assert not names & drawn
        everything = {str(one.origin) for one in corpus.manifest.pictures}
        assert drawn == everything - names


def test_sets_that_are_held_out_are_measured_and_regularisation_gives_none(
    model: Path, tmp_path: Path
) -> None:
    write_pictures(tmp_path / "others", 2, size=(32, 32))
    write_pictures(tmp_path / "judges", 3, size=(64, 64))
    recipe = recipe_in(
        tmp_path,
        model,
        data={
            "held_out": 0.0,
            "sets": [
                {"folder": "pictures"},
                {"folder": "others", "is_regularisation": True},
                {"folder": "judges", "is_held_out": True},
            ],
        },
    )
    manifest = scan_recipe(load_recipe(recipe))
    chosen = held_out_pictures(manifest, 0.0)
    assert {manifest.pictures[index].set_index for index in chosen} == {2}
    assert len(chosen) == 3
    with_share = held_out_pictures(manifest, 0.5)
    assert {manifest.pictures[index].set_index for index in with_share} == {0, 2}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([{"folder": "a", "is_held_out": True}], "all sets are held out, so there is nothing to train on"),
        ([{"folder": "a"}, {"folder": "b", "is_held_out": True, "share": 0.5}], "so it has no share"),
        ([{"folder": "a"}, {"folder": "b", "is_held_out": True, "is_regularisation": True}], "not both"),
    ],
)  # fmt: skip
def test_sets_that_cannot_be_held_out_are_refused(
    sets: Any, message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe_in(tmp_path, model, data={"sets": sets}))


def test_the_figures_are_those_of_a_plain_reference(model: Path, tmp_path: Path) -> None:
    """Mean over pictures and levels of the squared error, with noise from the picture's content, computed by hand."""
    recipe = recipe_in(tmp_path, model, train={"steps": 4}, evaluate={"every": 2})
    trained, run = train_here(recipe)
    told = [one for one in read_journal(run.journal) if one["event"] == "evaluated"]
    assert [(one["what"], one["step"]) for one in told] == [
        ("base", 0),
        ("adapter", 2),
        ("adapter", 4),
    ]
    assert trained.evaluated is not None
    assert trained.evaluated.heads[:2] == ("model", "loss")
    with site_of(recipe) as (site, _):
        corpus = build_corpus(site)
        with adapted(site) as (frozen, adapter, _):
            load_adapter_(site.recipe, run, adapter)
            losses = Losses(site.recipe, site.device, frozen, corpus)
            family, variant = losses._family, losses._variant
            for what, figures in (("adapter", told[2]), ("base", told[0])):
                total = 0.0
                for number, level in enumerate(LEVELS):
                    for place in range(corpus.num_held_out):
                        batch = corpus.held_out(place, number)
                        latent = batch.latents_BCHW.float()
                        (seed,) = batch.seeds
                        generator = torch.Generator().manual_seed(seed)
                        noise = torch.randn(latent.shape, generator=generator)
                        noisy = (1 - level) * latent + level * noise
                        frozen.begin("forward")
                        inputs = (noisy, torch.tensor([level]), batch.conditions)
                        with torch.no_grad():
                            guidance = family.training_guidance(variant)
                            if what == "base":
                                with adapter.disabled():
                                    got = family.predict(variant, frozen.module, *inputs, guidance)
                            else:
                                got = family.predict(variant, frozen.module, *inputs, guidance)
                        total += float((got - (noise - latent)).square().mean())
                mean = total / len(LEVELS) / corpus.num_held_out
                assert figures["loss"] == pytest.approx(mean, rel=1e-6), what


def test_measuring_changes_no_bit_of_the_training_and_a_resumed_run_measures_the_same(
    model: Path, tmp_path: Path
) -> None:
    """With an average kept, whose weights are put in and out for every measurement."""
    train = {"steps": 4, "ema": 0.8, "accumulate": 2}
    found = []
    for name, evaluate in (("often", {"every": 1}), ("never", {"every": 100})):
        recipe = recipe_in(tmp_path, model, name=name, train=train, evaluate=evaluate)
        _, run = train_here(recipe)
        found.append(checkpoint_bytes(run))
        if name == "often":
            told = [one for one in read_journal(run.journal) if one["event"] == "evaluated"]
    assert found[0] == found[1]
    half = recipe_in(tmp_path, model, name="half", train={**train, "steps": 2})
    train_here(half)
    rest = recipe_in(tmp_path, model, name="half", train=train, evaluate={"every": 1})
    _, run = train_here(rest)
    again = [one for one in read_journal(run.journal) if one["event"] == "evaluated"]
    key = lambda one: (one["what"], one["step"], one["loss"])  # noqa: E731
    assert {key(one) for one in told if one["step"] in (3, 4)} <= {key(one) for one in again}


def test_rows_bound_the_passes_and_choose_the_same_pictures(model: Path, tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, model, data={"held_out": 0.5}, evaluate={"rows": 3 * len(LEVELS)})
    with site_of(recipe) as (site, _):
        corpus = build_corpus(site)
        assert corpus.num_held_out == 4
        with adapted(site) as (frozen, adapter, _):
            watch = PictureWatch(site, frozen, adapter, corpus)
            watch.begin(0)
            watch.end(0)
        table = watch.table()
        assert table is not None
        assert table.title == "Held-out pictures: 3"
        base, fresh = table.rows
        assert base[1:] == fresh[1:], "an adapter that has learned nothing is the base"


def test_noise_differs_by_picture_and_level_alone() -> None:
    seeds = {level_seed(digest, level) for digest in ("a", "b") for level in range(5)}
    assert len(seeds) == 10
    assert all(0 <= seed < 2**63 for seed in seeds)
