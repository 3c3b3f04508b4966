"""The caching stage: exactly what changed is encoded anew, and encoders open only when needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from data_support import (
    LATENT_INPUTS,
    TEXT_INPUTS,
    CountingEncoders,
    cache_folder,
    keys_in,
    write_captioned,
    write_picture,
)
from PIL import Image

from outsize.base.errors import NotFinite, SourceError
from outsize.base.journal import Journal, read_journal
from outsize.data import media
from outsize.data.buckets import crop_plan
from outsize.data.cache import ContentCache
from outsize.data.encode import (
    cache_latents,
    cache_texts,
    latent_key,
    text_key,
    training_texts,
)
from outsize.data.found import PictureSet
from outsize.data.samples import samples_of
from outsize.data.scanning import scan

SIZES = [(40, 40), (60, 30), (30, 60)]
NUM = 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_captioned(tmp_path / "pictures", NUM, SIZES)


@pytest.fixture
def cache(tmp_path: Path) -> ContentCache:
    return ContentCache(tmp_path / "cache")


def counts(folder: Path, cache: ContentCache, **changes: Any) -> tuple[int, int]:
    """(latents, texts) encoded by a fresh start."""
    encoders = CountingEncoders()
    latents, texts, _ = cache_folder(folder, cache, encoders, **changes)
    assert latents.num_encoded == encoders.num_pictures
    assert texts.num_encoded == len(encoders.texts)
    assert latents.num_reused + latents.num_encoded == NUM
    return encoders.num_pictures, len(encoders.texts)


def test_a_first_start_encodes_everything_and_the_empty_caption(
    folder: Path, cache: ContentCache
) -> None:
    encoders = CountingEncoders()
    latents, texts, manifest = cache_folder(folder, cache, encoders)
    assert (latents.num_encoded, latents.num_reused) == (NUM, 0)
    assert texts.num_encoded == NUM + 1
    assert "" in encoders.texts
    assert encoders.events == ["image opened", "image closed", "text opened", "text closed"]
    assert cache.missing([text_key(cache, "", TEXT_INPUTS)]) == ()
    assert training_texts(manifest, 0.0) == manifest.captions()


def test_a_second_start_opens_no_encoder_at_all(folder: Path, cache: ContentCache) -> None:
    counts(folder, cache)
    encoders = CountingEncoders()
    cache_folder(folder, cache, encoders)
    assert encoders.events == []


def test_every_change_encodes_exactly_what_it_changed(folder: Path, cache: ContentCache) -> None:
    assert counts(folder, cache) == (NUM, NUM + 1)
    write_picture(folder / "01.png", SIZES[1], seed=99)
    assert counts(folder, cache) == (1, 0)
    (folder / "02.txt").write_text("another caption")
    assert counts(folder, cache) == (0, 1)
    assert counts(folder, cache, resolution=48) == (NUM, 0)
    assert counts(folder, cache) == (0, 0), "the old resolution is still there"
    newer = {"latent_inputs": LATENT_INPUTS | {"encoder": "codec-store-2"}}
    assert counts(folder, cache, **newer) == (NUM, 0)
    assert counts(folder, cache, text_inputs=TEXT_INPUTS | {"format": "nf4"}) == (0, NUM + 1)
    assert counts(folder, cache) == (0, 0)


def test_a_new_version_of_the_transform_encodes_all_pictures(
    folder: Path, cache: ContentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts(folder, cache)
    monkeypatch.setattr(media, "TRANSFORM", "media/next")
    assert counts(folder, cache) == (NUM, 0)


def test_a_renamed_picture_or_moved_folder_encodes_nothing(
    folder: Path, cache: ContentCache
) -> None:
    counts(folder, cache)
    for ending in (".png", ".txt"):
        (folder / f"03{ending}").rename(folder / f"zz{ending}")
    assert counts(folder.rename(folder.with_name("moved")), cache) == (0, 0)


def test_equal_pictures_and_captions_are_encoded_once(tmp_path: Path, cache: ContentCache) -> None:
    for name in "ab":
        write_picture(tmp_path / "p" / f"{name}.png", seed=5).with_suffix(".txt").write_text("same")
    encoders = CountingEncoders()
    cache_folder(tmp_path / "p", cache, encoders)
    assert (encoders.num_pictures, encoders.texts) == (1, ["same", ""])


def test_a_changed_crop_alone_gives_another_key(folder: Path, cache: ContentCache) -> None:
    picture = scan([PictureSet(folder=folder)]).pictures[1]
    crop = samples_of(scan([PictureSet(folder=folder)]), [32], 8)[1].crop
    shifted = crop_plan(picture.width + 4, picture.height, crop.bucket)
    assert crop.bucket == shifted.bucket
    assert latent_key(cache, picture, crop, {}) != latent_key(cache, picture, shifted, {})


def test_a_latent_is_what_the_encoder_gives_for_the_cropped_picture_alone(
    folder: Path, cache: ContentCache
) -> None:
    manifest = cache_folder(folder, cache, CountingEncoders())[2]
    samples = samples_of(manifest, [32], 8)
    for picture, crop in zip(manifest.pictures, (one.crop for one in samples), strict=True):
        entry = cache.get(latent_key(cache, picture, crop, LATENT_INPUTS))
        assert entry is not None
        pixels = media.pixels_of(media.decode(picture.path.read_bytes()), crop)
        expected = torch.nn.functional.avg_pool2d(pixels, 8)
        assert torch.equal(entry["latent"], expected), picture.name


def test_a_broken_entry_is_journalled_and_encoded_anew(
    folder: Path, cache: ContentCache, tmp_path: Path
) -> None:
    manifest = cache_folder(folder, cache, CountingEncoders())[2]
    picture = manifest.pictures[0]
    crop = samples_of(manifest, [32], 8)[0].crop
    path = cache.path(latent_key(cache, picture, crop, LATENT_INPUTS))
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    journal = Journal(tmp_path / "journal.jsonl")
    latents, texts, _ = cache_folder(folder, cache, CountingEncoders(), journal=journal)
    journal.close()
    assert (latents.num_encoded, texts.num_encoded) == (1, 0)
    assert path.read_bytes() == whole
    (event,) = (e for e in read_journal(journal.path) if e["event"] == "cache_entry_broken")
    assert str(path) in event["fault"]


def test_progress_goes_from_nothing_to_all_and_stays_silent_when_warm(
    folder: Path, cache: ContentCache
) -> None:
    seen: list[tuple[int, ...]] = []
    cache_folder(folder, cache, CountingEncoders(), progress=lambda *now: seen.append(now))
    assert seen[:NUM] == [(done, NUM) for done in range(1, NUM + 1)]
    assert seen[-1] == (NUM + 1, NUM + 1)
    seen.clear()
    cache_folder(folder, cache, CountingEncoders(), progress=lambda *now: seen.append(now))
    assert seen == []


def test_an_error_in_the_encoder_keeps_what_was_encoded_and_closes_it(
    folder: Path, cache: ContentCache
) -> None:
    class Failing(CountingEncoders):
        def _encode_image(self, pixels_BCHW: torch.Tensor) -> torch.Tensor:
            if self.num_pictures == 3:
                raise RuntimeError("out of memory")
            return super()._encode_image(pixels_BCHW)

    with pytest.raises(RuntimeError, match="out of memory"):
        cache_folder(folder, cache, Failing())
    assert len(keys_in(cache)) == 3
    assert counts(folder, cache) == (NUM - 3, NUM + 1)


def test_latents_that_are_not_finite_are_refused_by_name_and_not_cached(
    folder: Path, cache: ContentCache
) -> None:
    class Poisoned(CountingEncoders):
        def _encode_image(self, pixels_BCHW: torch.Tensor) -> torch.Tensor:
            latents = super()._encode_image(pixels_BCHW)
            if self.num_pictures == 4:
                latents[0, 0, 0, 0] = float("nan")
            return latents

    with pytest.raises(NotFinite, match=r"the picture .*03\.png holds NaN"):
        cache_folder(folder, cache, Poisoned())
    assert len(keys_in(cache)) == 3


def test_embeddings_that_are_not_finite_are_refused_by_text(cache: ContentCache) -> None:
    class Poisoned(CountingEncoders):
        def _encode_text(self, texts: list[str]) -> dict[str, torch.Tensor]:
            return {"text": torch.tensor([[float("inf") if t == "b" else 0.0] for t in texts])}

    with pytest.raises(NotFinite, match="the text 'b' holds NaN"):
        cache_texts(["a", "b", "c"], cache, Poisoned().open_text, {})
    assert len(keys_in(cache)) == 1


def test_a_picture_that_changes_after_the_scan_stops_the_stage(
    folder: Path, cache: ContentCache
) -> None:
    manifest = scan([PictureSet(folder=folder)])
    samples = samples_of(manifest, [32], 8)
    Image.new("RGB", (40, 40)).save(folder / "03.png")
    with pytest.raises(SourceError, match=r"03\.png changed"):
        cache_latents(manifest, samples, cache, CountingEncoders().open_image, {})
    (folder / "03.png").unlink()
    with pytest.raises(SourceError, match=r"03\.png can no longer be read"):
        cache_latents(manifest, samples, cache, CountingEncoders().open_image, {})


def test_a_remembered_size_that_is_wrong_stops_the_stage(
    folder: Path, cache: ContentCache, tmp_path: Path
) -> None:
    """A wrong size would squeeze the picture; the bytes are decoded here, so it is found out."""
    facts = tmp_path / "facts.json"
    scan([PictureSet(folder=folder)], facts_file=facts)
    stored = json.loads(facts.read_bytes())
    stored["looks"] = dict.fromkeys(stored["looks"], (44, 44, False, False, ""))
    facts.write_text(json.dumps(stored))
    manifest = scan([PictureSet(folder=folder)], facts_file=facts)
    samples = samples_of(manifest, [32], 8)
    with pytest.raises(SourceError, match="decodes to 40 x 40 px, where the scan found 44 x 44"):
        cache_latents(manifest, samples, cache, CountingEncoders().open_image, {})
