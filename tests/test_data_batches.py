"""The corpus: batches equal what the encoders give for the scheduled pictures and captions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data_support import (
    LATENT_INPUTS,
    TEXT_INPUTS,
    CountingEncoders,
    write_captioned,
)

from outsize.base.errors import RecipeError, StoreBroken
from outsize.data import media
from outsize.data.batches import Corpus
from outsize.data.cache import ContentCache
from outsize.data.encode import cache_latents, cache_texts, latent_key, text_key, training_texts
from outsize.data.found import PictureSet
from outsize.data.manifest import Manifest
from outsize.data.samples import Sample, make_schedule, samples_of
from outsize.data.scanning import scan
from outsize.data.schedule import MicroBatch

SIZES = [(40, 40), (60, 30)]
Parts = tuple[Manifest, tuple[Sample, ...], ContentCache]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    """(manifest, samples, cache) of a subject and a regularisation set, cached."""
    sets = [
        PictureSet(folder=write_captioned(tmp_path / "cats", 4, SIZES), trigger="ohwx"),
        PictureSet(
            folder=write_captioned(tmp_path / "others", 6, SIZES),
            share=0.25,
            loss_weight=0.5,
            is_regularisation=True,
        ),
    ]
    manifest = scan(sets)
    samples = samples_of(manifest, [32], 8)
    cache = ContentCache(tmp_path / "cache")
    encoders = CountingEncoders()
    cache_latents(manifest, samples, cache, encoders.open_image, LATENT_INPUTS)
    cache_texts(training_texts(manifest, 0.4), cache, encoders.open_text, TEXT_INPUTS)
    return manifest, samples, cache


def corpus_of(
    parts: Parts,
    memory_bytes: int = 1 << 20,
    text_inputs: Sequence[Mapping[str, Any]] = (TEXT_INPUTS,),
    **options: Any,
) -> Corpus:
    manifest, samples, cache = parts
    options = {"seed": 5, "batch": 2, "accumulate": 2, "caption_dropout": 0.4} | options
    return Corpus(
        manifest,
        samples,
        make_schedule(manifest, samples, **options),
        cache,
        latent_inputs=LATENT_INPUTS,
        text_inputs=text_inputs,
        memory_bytes=memory_bytes,
    )


def captions_of(micro: MicroBatch, manifest: Manifest) -> list[str]:
    """What a micro-batch is trained on: "" where the caption is dropped."""
    return [
        "" if item.drops_caption else manifest.pictures[item.picture].caption
        for item in micro.items
    ]


def first_batches(corpus: Corpus, num_steps: int) -> None:
    """Load the first batch of each step."""
    for step in range(num_steps):
        corpus.batch(step, 0)


def test_a_batch_holds_what_the_encoders_give_for_its_pictures_and_captions(parts: Parts) -> None:
    manifest, samples, _ = parts
    corpus = corpus_of(parts)
    seen_sets, seen_drops = set(), set()
    for number in range(24):
        batch = corpus.batch(*divmod(number, 2))
        micro = corpus.schedule.micro_batch(*divmod(number, 2))
        pictures = [manifest.pictures[item.picture] for item in micro.items]
        assert batch.seeds == tuple(item.noise_seed for item in micro.items)
        encoded = CountingEncoders()._encode_text(captions_of(micro, manifest))
        for name, expected in encoded.items():
            assert torch.equal(batch.conditions[name], expected)
            assert batch.conditions[name].dtype == expected.dtype
        for row, item in enumerate(micro.items):
            content = pictures[row].path.read_bytes()
            pixels = media.pixels_of(media.decode(content), samples[item.picture].crop)
            expected = torch.nn.functional.avg_pool2d(pixels, 8)
            assert torch.equal(batch.latents_BCHW[row], expected)
            seen_drops.add(item.drops_caption)
        (set_index,) = {picture.set_index for picture in pictures}
        weight = 0.5 if set_index == 1 else 1.0
        assert torch.equal(batch.loss_weight_B, torch.full((2,), weight))
        seen_sets.add(set_index)
    assert seen_sets == {0, 1}
    assert seen_drops == {True, False}


def test_the_trigger_is_in_the_captions_of_its_set_only(parts: Parts) -> None:
    manifest = parts[0]
    for picture in manifest.pictures:
        assert picture.caption.startswith("ohwx, ") == (picture.set_index == 0)


def test_batches_are_the_same_whatever_is_held_in_memory_and_in_whatever_order(
    parts: Parts,
) -> None:
    plenty, none = corpus_of(parts), corpus_of(parts, memory_bytes=0)
    expected = {number: plenty.batch(*divmod(number, 2)) for number in range(10)}
    for number in reversed(range(10)):
        again = none.batch(*divmod(number, 2))
        for field in dataclasses.fields(again):
            ours, theirs = getattr(again, field.name), getattr(expected[number], field.name)
            if isinstance(ours, torch.Tensor):
                assert torch.equal(ours, theirs)
            elif field.name == "conditions":
                assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
            else:
                assert ours == theirs


def test_memory_holds_no_more_than_its_limit(parts: Parts) -> None:
    corpus = corpus_of(parts, memory_bytes=700)
    for step in range(10):
        corpus.batch(step, 0)
        held = corpus._memory._held.values()
        num_bytes = sum(tensor.nbytes for entry in held for tensor in entry.values())
        assert num_bytes == corpus._memory._num_bytes <= 700
    assert corpus._memory._held


def test_writing_into_a_batch_does_not_change_the_next_one(parts: Parts) -> None:
    corpus = corpus_of(parts)
    first = corpus.batch(0, 0).latents_BCHW
    kept = first.clone()
    first.zero_()
    assert torch.equal(corpus.batch(0, 0).latents_BCHW, kept)


def test_a_missing_entry_is_an_error_that_names_the_picture_or_caption_and_the_remedy(
    parts: Parts,
) -> None:
    manifest, samples, cache = parts
    picture = manifest.pictures[0]
    cache.discard(latent_key(cache, picture, samples[0].crop, LATENT_INPUTS))
    with pytest.raises(StoreBroken, match=r"00\.png is not in the cache .* start again"):
        first_batches(corpus_of(parts), 20)
    cache.discard(text_key(cache, "", TEXT_INPUTS))
    with pytest.raises(StoreBroken, match="the caption '' is not in the cache"):
        first_batches(corpus_of(parts, caption_dropout=1), 1)


def test_a_broken_entry_is_discarded_and_named(parts: Parts) -> None:
    manifest, samples, cache = parts
    key = latent_key(cache, manifest.pictures[0], samples[0].crop, LATENT_INPUTS)
    content = bytearray(cache.path(key).read_bytes())
    content[-1] ^= 1
    cache.path(key).write_bytes(content)
    with pytest.raises(StoreBroken, match=r"00\.png cannot be trained on: .*digest"):
        first_batches(corpus_of(parts), 20)
    assert cache.missing([key]) == (key,)


def test_several_text_encoders_give_one_dictionary(parts: Parts) -> None:
    manifest, _, cache = parts
    second = {"encoder": "another"}

    class Second(CountingEncoders):
        def _encode_text(self, texts: list[str]) -> dict[str, torch.Tensor]:
            return {"other": torch.tensor([[float(len(text))] for text in texts])}

    cache_texts(training_texts(manifest, 0.4), cache, Second().open_text, second)
    corpus = corpus_of(parts, text_inputs=(TEXT_INPUTS, second))
    batch = corpus.batch(0, 0)
    assert set(batch.conditions) == {"text", "pooled", "other"}
    captions = captions_of(corpus.schedule.micro_batch(0, 0), manifest)
    lengths = [[float(len(caption))] for caption in captions]
    assert batch.conditions["other"].tolist() == lengths


def test_embeddings_of_different_lengths_in_one_batch_are_an_error_that_says_so(
    parts: Parts,
) -> None:
    manifest, _, cache = parts
    ragged = {"encoder": "ragged"}

    class Ragged(CountingEncoders):
        def _encode_text(self, texts: list[str]) -> dict[str, torch.Tensor]:
            return {"text": torch.zeros(1, 1 + len(texts[0]) * int(texts[0][-1:] == "1"))}

    cache_texts(training_texts(manifest, 0.4), cache, Ragged().open_text, ragged)
    with pytest.raises(RecipeError, match="cannot be stacked"):
        first_batches(corpus_of(parts, text_inputs=(ragged,), caption_dropout=0), 40)


def test_steps_are_told_apart_by_the_resolutions_that_they_draw(parts: Parts) -> None:
    """What a step takes depends on them: a pace is taken for each, and what is drawn must be what is told."""
    manifest, _, cache = parts
    samples = samples_of(manifest, [16, 32], 8)
    encoders = CountingEncoders()
    cache_latents(manifest, samples, cache, encoders.open_image, LATENT_INPUTS)
    corpus = corpus_of((manifest, samples, cache))
    found = set()
    for step in range(20):
        drawn = (corpus.batch(step, place).latents_BCHW.shape for place in range(2))
        # latents are an eighth of a picture's sides, and pictures have at most as many pixels as a square
        sides = (32 if (shape[-1] * shape[-2]) * 64 > 16 * 16 else 16 for shape in drawn)
        assert corpus.resolutions_of(step) == tuple(sorted(sides))
        found.add(corpus.resolutions_of(step))
    assert found == {(16, 16), (16, 32), (32, 32)}
