"""The shipped teaching base: whole, free of cats, and drawn correctly by an independent pipeline (diffusers' own)."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from outsize import teaching
from outsize.teaching.score import Gallery, is_cat, load_gallery, recognised

TEXT_LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def gallery() -> Gallery:
    return load_gallery(teaching.GALLERY_PICTURES, teaching.GALLERY_NAMES)


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((teaching.BASE / "manifest.json").read_text())


def test_every_shipped_file_has_the_hash_of_the_manifest(manifest: dict) -> None:
    """A half-copied or edited weight file would draw worse pictures without any error."""
    root = teaching.BASE.parent
    wrong = [
        name
        for name, digest in manifest["files"].items()
        if hashlib.sha256((root / name).read_bytes()).hexdigest() != digest
    ]
    assert wrong == []


def test_the_model_stays_small_enough_for_a_wheel() -> None:
    """20 MB for the model and 15 MB for any file are what the package index and a clone can bear."""
    sizes = [p.stat().st_size for p in teaching.BASE.rglob("*") if p.is_file()]
    assert sum(sizes) <= 20_000_000
    assert max(sizes) <= 15_000_000


def test_no_cat_is_among_the_subjects_of_the_base(manifest: dict) -> None:
    """The whole exercise is to teach a subject that the base has never seen."""
    assert len(manifest["base_subjects"]) > 400
    assert not [n for n in manifest["base_subjects"] if "cat" in n.split("-")]


def test_controls_are_never_among_the_regularisation_pictures() -> None:
    """Otherwise the control score would show recall of training pictures, not that knowledge was kept."""
    controls = {p["name"] for p in json.loads(teaching.PROMPTS.read_text())["controls"]}
    others = {p.stem.rsplit("_", 2)[0] for p in teaching.OTHERS.glob("*.png")}
    assert len(others) == 112
    assert not controls & others


def test_held_out_cats_are_not_among_the_training_cats() -> None:
    """Held-out expressions are the test: neither base nor adapter may see them as cats."""
    held = {p.stem.rsplit("_", 2)[0] for p in teaching.HELD_OUT.glob("*.png")}
    train = {p.stem.rsplit("_", 2)[0] for p in teaching.CATS.glob("*.png")}
    assert len(list(teaching.CATS.glob("*.png"))) == 16
    assert len(held) == 4
    assert not held & train


def test_a_real_picture_is_recognised_even_noisy_and_shifted(gallery: Gallery) -> None:
    """The score must forgive what a good generation gets slightly wrong."""
    noise = np.random.default_rng(0)
    real = gallery.pictures("blue")
    right = 0
    for i in range(0, len(real), 23):
        picture = np.roll(real[i], (1, 1), (0, 1)) + noise.normal(0, 20, real[i].shape)
        match = gallery.nearest(picture.clip(0, 255).astype(np.uint8), "blue")
        right += recognised(match, gallery.names[i])
    # A few names have near-identical pictures (plain faces), hence not all of the 41.
    assert right >= 37


def test_the_score_tells_cats_from_other_subjects(gallery: Gallery) -> None:
    """A real cat is its own nearest picture; so is a real fox."""
    real = gallery.pictures("white")
    for name, wanted in (("crying-cat", True), ("cat-face", True), ("fox", False), ("bear", False)):
        assert is_cat(gallery.nearest(real[gallery.names.index(name)], "white")) is wanted


def test_diffusers_own_pipeline_draws_what_it_is_asked_for(gallery: Gallery) -> None:
    """Independent truth for the folder: layout, tokenizer, states and scheduler all have to be right."""
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    pipeline = diffusers.Flux2KleinPipeline.from_pretrained(
        teaching.BASE, torch_dtype=torch.float32, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    table = json.loads(teaching.PROMPTS.read_text())
    asked = [*table["controls"][:12:2], *table["cats"][:2]]
    drawn = pipeline(
        prompt=[p["prompt"] for p in asked],
        height=48,
        width=48,
        num_inference_steps=12,
        guidance_scale=1.0,
        max_sequence_length=20,
        text_encoder_out_layers=TEXT_LAYERS,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    pixels = (drawn * 255).round().astype(np.uint8)
    matches = [gallery.nearest(x, p["background"]) for x, p in zip(pixels, asked, strict=True)]
    right = [recognised(m, p["name"]) for m, p in zip(matches, asked, strict=True)]
    assert sum(right[:6]) >= 5
    assert not any(is_cat(m) for m in matches[6:])
