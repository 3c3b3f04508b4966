"""Training on pictures with everything on: resolutions, flips, masks, repeats, weights, regularisation; exact throughout."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from run_support import (
    checkpoint_bytes,
    site_of,
    train_here,
    write_pictures,
    write_recipe,
)
from tiny import write_tiny

from outsize.app.encode import build_corpus
from outsize.app.losses import Losses
from outsize.base.journal import read_journal
from outsize.data.batches import Corpus

CELL = 4  # pixels of a side that make one cell of the tiny codec's latent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("flux2", "tiny", tmp_path_factory.mktemp("model") / "flux2")


def everything(folder: Path, model: Path, **changes: Any) -> Path:
    """A recipe over three sets: masked and flipped, listed by a manifest, and regularisation."""
    if not (folder / "others").exists():
        write_pictures(folder / "pictures", 5)
        write_pictures(folder / "listed", 3)
        write_pictures(folder / "others", 4, size=(64, 48))
        (folder / "masks").mkdir()
        for number in (0, 2, 3):
            shape = (48, 96) if number == 2 else (48, 48)
            mask = np.zeros(shape, dtype=np.uint8)
            mask[:, : 20 + 8 * number] = 255
            Image.fromarray(mask).save(folder / "masks" / f"{number:02d}.png")
        (folder / "pictures" / "99.png").write_bytes(b"")
        rows = [
            {"file_name": "00.png", "caption": "a first", "weight": 0.5},
            {"file_name": "01.png", "caption": "a second", "repeats": 2},
        ]
        (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = [
        {"folder": "pictures", "masks": "masks", "mask_floor": 0.1, "flip": 0.5, "trigger": "sks"},
        {"folder": "listed", "manifest": "list.jsonl", "repeats": 2},
        {
            "folder": "others", "is_regularisation": True, "share": 0.25, "loss_weight": 0.5,
            "flip": 1, "background": "black",
        },
    ]  # fmt: skip
    data = {
        "sets": sets, "resolution": [32, 48, 64], "broken": "leave_out", "caption_dropout": 0.3,
    }  # fmt: skip
    return write_recipe(folder, model=model, data=data, **changes)


def corpus_of(recipe: Path) -> Corpus:
    with site_of(recipe) as (site, _):
        return build_corpus(site)


def test_resume_equals_an_unbroken_run_with_everything_on(model: Path, tmp_path: Path) -> None:
    settings = {"steps": 6, "batch": 2, "accumulate": 2, "learning_rate": 1e-2}
    _, whole = train_here(everything(tmp_path, model, name="whole", train=settings))
    expected = checkpoint_bytes(whole)
    for k in (1, 4):
        name = f"part{k}"
        train_here(everything(tmp_path, model, name=name, train=settings | {"steps": k}))
        trained, run = train_here(everything(tmp_path, model, name=name, train=settings))
        assert trained.resumed_at == k
        assert checkpoint_bytes(run) == expected


def test_streamed_equals_resident_with_everything_on(model: Path, tmp_path: Path) -> None:
    found = []
    for kind in ("resident", "stream"):
        recipe = everything(
            tmp_path, model, name=kind, train={"steps": 5, "batch": 2},
            placement={"kind": kind, "slots": 2},
        )  # fmt: skip
        found.append(checkpoint_bytes(train_here(recipe)[1]))
    assert found[0] == found[1]


def test_what_is_trained_on_is_journalled(model: Path, tmp_path: Path) -> None:
    recipe = everything(tmp_path, model, train={"steps": 1})
    _, run = train_here(recipe)
    events = list(read_journal(run.journal))
    sets = [one for one in events if one["event"] == "pictures"]
    assert [(one["set"], one["pictures"], one["masks"], one["left_out"]) for one in sets] == [
        ("pictures", 5, 3, 1), ("listed", 2, 0, 0), ("others", 4, 0, 0),
    ]  # fmt: skip
    (left,) = (one for one in events if one["event"] == "left_out")
    assert left["picture"].endswith("99.png")
    assert left["reason"] == "the file is empty (0 bytes)"


def test_every_picture_is_seen_at_every_resolution_as_often_as_it_counts(
    model: Path, tmp_path: Path
) -> None:
    corpus = corpus_of(everything(tmp_path, model))
    manifest, samples = corpus.manifest, corpus._samples
    seen: Counter[tuple[str, str, int]] = Counter()
    forms: dict[int, Counter[bool]] = {0: Counter(), 1: Counter(), 2: Counter()}
    for step in range(2400):
        for item in corpus.schedule.micro_batch(step, 0).items:
            sample = samples[item.picture]
            picture = manifest.pictures[sample.picture]
            seen[manifest.set_of(picture).folder.name, picture.name, sample.resolution] += 1
            forms[picture.set_index][item.is_flipped] += 1
    subject = {key: count for key, count in seen.items() if key[0] == "pictures"}
    assert len(subject) == 5 * 3
    assert max(subject.values()) - min(subject.values()) <= 1, "all alike"
    listed = {name: seen["listed", name, 48] for name in ("00.png", "01.png")}
    assert listed["01.png"] == pytest.approx(2 * listed["00.png"], abs=3)
    total = sum(seen.values())
    share = sum(count for key, count in seen.items() if key[0] == "others") / total
    assert share == 0.25
    # What is left is divided by pictures times repeats: 5 against (1 + 2) x 2.
    assert sum(subject.values()) / total == pytest.approx(0.75 * 5 / 11, abs=0.002)
    assert forms[1][True] == 0
    assert forms[2][False] == 0
    half = forms[0][True] / sum(forms[0].values())
    # four standard deviations of a fair coin
    assert abs(half - 0.5) < 2 / sum(forms[0].values()) ** 0.5


def test_batches_hold_flipped_latents_weights_and_mirrored_masks(
    model: Path, tmp_path: Path
) -> None:
    corpus = corpus_of(everything(tmp_path, model, train={"batch": 2}))
    manifest, samples = corpus.manifest, corpus._samples
    kinds = set()
    for step in range(120):
        micro, batch = corpus.schedule.micro_batch(step, 0), corpus.batch(step, 0)
        height, width = micro.bucket.height // CELL, micro.bucket.width // CELL
        assert batch.latents_BCHW.shape[2:] == (height, width)
        for row, item in enumerate(micro.items):
            picture = manifest.pictures[samples[item.picture].picture]
            expected = {0: 1.0, 1: picture.weight, 2: 0.5}[picture.set_index]
            assert batch.loss_weight_B[row] == expected
            if batch.cell_weight_B1HW is None:
                assert picture.mask is None
                continue
            cells = batch.cell_weight_B1HW[row, 0]
            assert cells.shape == (height, width)
            if picture.mask is None:
                assert torch.equal(cells, torch.ones(height, width))
                continue
            assert cells.mean() == pytest.approx(1, abs=1e-6)
            left, right = cells[:, 0].mean(), cells[:, -1].mean()
            assert (left < right) == item.is_flipped
            assert left != right
            kinds.add(item.is_flipped)
    assert kinds == {True, False}


def test_a_flipped_latent_is_the_codecs_of_the_mirrored_picture(
    model: Path, tmp_path: Path
) -> None:
    """Not the mirrored latent: a codec does not see left as it sees right."""
    half = np.zeros((48, 48, 3), dtype=np.uint8)
    half[:, :20] = (250, 120, 30)
    for name, pixels in {"as_is": half, "mirrored": half[:, ::-1]}.items():
        (tmp_path / name).mkdir()
        Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / name / "a.png")
        (tmp_path / name / "a.txt").write_text("two halves")
    found = {}
    for name, flip in (("as_is", 1), ("mirrored", 0)):
        recipe = write_recipe(
            tmp_path, model=model, data={"sets": [{"folder": name, "flip": flip}], "resolution": 48}
        )
        found[name] = corpus_of(recipe).batch(0, 0).latents_BCHW
    assert torch.equal(found["as_is"], found["mirrored"])
    assert not torch.equal(found["as_is"], found["as_is"].flip(-1))


def test_the_background_and_the_mask_reach_the_loss(model: Path, tmp_path: Path) -> None:
    """Changing the prediction's error where the mask is black changes nothing; where it is white it does."""
    rgba = np.full((48, 48, 4), 255, dtype=np.uint8)
    rgba[:, 32:, 3] = 0
    rgba[..., :3] = np.random.default_rng(0).integers(0, 256, (48, 48, 3))
    (tmp_path / "cut").mkdir()
    Image.fromarray(rgba).save(tmp_path / "cut" / "a.png")
    (tmp_path / "cut" / "a.txt").write_text("cut out")
    latents, losses = [], []
    for background in ("white", "#204060"):
        sets = [{"folder": "cut", "alpha_as_mask": True, "background": background}]
        recipe = write_recipe(tmp_path, model=model, data={"sets": sets, "resolution": 48})
        with site_of(recipe) as (site, _):
            corpus = build_corpus(site)
            latents.append(corpus.batch(0, 0).latents_BCHW)
            flow = Losses(site.recipe, site.device, None, corpus)  # type: ignore[arg-type] # not run
            drawn = flow._draw(0, 0)
            error = torch.zeros_like(drawn.latents)
            target = drawn.noise - drawn.latents
            for place in (0, -1):
                error.zero_()[..., place] = 1
                made = target + error
                loss = flow._objective.loss(
                    lambda _n, _s, made=made: made, drawn.latents, drawn.sigma, drawn.noise,
                    drawn.loss_weight, torch.float32,
                )  # fmt: skip
                losses.append(loss.item())
    assert not torch.equal(latents[0], latents[1])
    # one of the 12 columns of cells, each weighing 3 / 2 since a third is black
    assert losses[0] == pytest.approx(1.5 / (48 // CELL))
    assert losses[1] == 0
