"""The caching stages: captions and pictures to what the base is trained on, one encoder in memory at a time.

Keys hold everything that shapes a value: the store of the encoder (its weights' digest and format), the family's
variant, the device kind and compute type, and, for text, the tokenizer's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from outsize.app.parts import Part, of_kind
from outsize.app.pictures import samples_for, scan_recipe, schedule_for
from outsize.app.site import Site
from outsize.base.files import file_digest, json_digest
from outsize.data.batches import Corpus
from outsize.data.buckets import Bucket
from outsize.data.encode import cache_latents, cache_texts, training_texts
from outsize.data.held_out import held_out_pictures, held_out_samples
from outsize.data.manifest import Manifest
from outsize.data.masks import GridOf, cache_masks
from outsize.families.protocol import ImageCodec, TextEncoder
from outsize.weights.locate import locate_folder

if TYPE_CHECKING:
    pass

CODE_VERSION = 1  # raise it when the same inputs must lead to other latents or embeddings


@dataclass(frozen=True, slots=True)
class TextInputs:
    """A text encoder ready to be opened: its part, its tokenizer's folder, and its key inputs."""

    part: Part
    tokenizer: Path
    inputs: dict[str, Any]


def text_inputs(site: Site) -> list[TextInputs]:
    """All text encoders of the recipe with what identifies their embeddings; opens none."""
    found = []
    for part in of_kind(site.parts, "text"):
        assert part.tokenizer is not None, "a text encoder has a tokenizer"
        source = part.tokenizer_source or part.named_source
        folder = locate_folder(source, part.tokenizer, offline=site.offline)
        files = {one.name: file_digest(one) for one in sorted(folder.iterdir()) if one.is_file()}
        inputs = _key_inputs(site, part) | {"tokenizer": json_digest(files)}
        found.append(TextInputs(part, folder, inputs))
    return found


def codec_part(site: Site) -> Part:
    """The recipe's image codec."""
    (part,) = of_kind(site.parts, "image")
    return part


def codec_inputs(site: Site) -> dict[str, Any]:
    """What identifies the latents of the recipe's image codec."""
    return _key_inputs(site, codec_part(site))


def encode_texts(site: Site, encoders: Iterable[TextInputs], texts: Iterable[str]) -> None:
    """Make sure that all encoders' embeddings of the texts are cached."""
    texts = tuple(dict.fromkeys(texts))
    for encoder in encoders:
        with site.stages.stage(f"cache {encoder.part.slot}"):
            report = cache_texts(
                texts,
                site.cache,
                lambda encoder=encoder: _open_text(site, encoder),  # type: ignore[misc] # default binds
                encoder.inputs,
                progress=_count(site, f"embed captions ({encoder.part.slot})"),
                journal=site.journal,
            )
        site.journal.write(
            "cached", what=encoder.part.slot, reused=report.num_reused, encoded=report.num_encoded
        )


def _none(_manifest: Manifest) -> Iterable[str]:
    return ()


def scan_pictures(site: Site) -> Manifest:
    """The recipe's pictures, all read and hashed; what there is and what is odd about it goes to the journal."""
    manifest = scan_recipe(site.recipe)
    for warning in manifest.warnings:
        site.progress.say(f"warning: {warning}")
        site.journal.write("warning", what=warning)
    for one in manifest.left_out:
        site.progress.say(f"left out: {one.origin}: {one.reason}")
        site.journal.write("left_out", picture=str(one.origin), reason=one.reason)
    for number, item in enumerate(manifest.sets):
        found = [one for one in manifest.pictures if one.set_index == number]
        site.journal.write(
            "pictures", set=item.folder.name, pictures=len(found), flip=item.flip,
            masks=sum(one.mask is not None for one in found),
            own_captions=sum(one.has_own_caption for one in found),
            left_out=sum(one.set_index == number for one in manifest.left_out),
        )  # fmt: skip
    return manifest


def captions_of(manifest: Manifest) -> list[str]:
    """Captions of the subject's pictures, the first of each text."""
    taken = [
        picture.caption
        for picture in manifest.pictures
        if not manifest.sets[picture.set_index].is_regularisation
    ]
    return list(dict.fromkeys(taken))


def build_corpus(site: Site, more_texts: Callable[[Manifest], Iterable[str]] = _none) -> Corpus:
    """Scan, cache what is missing, and join all into the corpus. Text encoders first, then the codec.

    more_texts: what is to be embedded beside what is trained on, while the encoders are open.
    """
    recipe = site.recipe
    manifest = scan_pictures(site)
    samples = samples_for(recipe, manifest)
    part = codec_part(site)
    cache_masks(
        manifest, samples, _grid_of(part), site.cache
    )  # what can be wrong with them comes before what is slow
    encoders = text_inputs(site)
    texts = training_texts(manifest, recipe.pictures.caption_dropout)
    encode_texts(site, encoders, (*texts, *more_texts(manifest)))
    inputs = codec_inputs(site)
    with site.stages.stage("cache latents"):
        report = cache_latents(
            manifest,
            samples,
            site.cache,
            lambda: _open_encoder(site, part),
            inputs,
            progress=_count(site, "encode pictures"),
            journal=site.journal,
        )
    site.journal.write(
        "cached", what="latents", reused=report.num_reused, encoded=report.num_encoded
    )
    return Corpus(
        manifest,
        samples,
        schedule_for(recipe, manifest, samples),
        site.cache,
        latent_inputs=inputs,
        text_inputs=[one.inputs for one in encoders],
        held_out=held_out_samples(
            manifest, samples, held_out_pictures(manifest, recipe.pictures.held_out)
        ),
    )


def _grid_of(part: Part) -> GridOf:
    codec = cast("ImageCodec", part.family)

    def grid(bucket: Bucket) -> tuple[int, int]:
        _, height, width = codec.latent_shape(part.variant, bucket.height, bucket.width)
        return height, width

    return grid


def _key_inputs(site: Site, part: Part) -> dict[str, Any]:
    return {
        "family": part.family_name,
        "variant": part.variant,
        "store": site.stores.key(part.slot),
        "device": site.device.kind,
        "compute": str(site.device.compute_dtype),
        "code_version": CODE_VERSION,
    }


@contextmanager
def _open_text(
    site: Site, encoder: TextInputs
) -> Iterator[Callable[[list[str]], Mapping[str, Tensor]]]:
    part = encoder.part
    family = cast("TextEncoder", part.family)
    with site.opened(part.slot) as model:

        @torch.no_grad()
        def encode(texts: list[str]) -> Mapping[str, Tensor]:
            tokens = family.tokenize(part.variant, encoder.tokenizer, texts)
            placed = {name: one.to(site.device.torch_device) for name, one in tokens.items()}
            model.begin("forward")
            return family.encode(part.variant, model.module, placed)

        yield encode


@contextmanager
def _open_encoder(site: Site, part: Part) -> Iterator[Callable[[Tensor], Tensor]]:
    family = cast("ImageCodec", part.family)
    with site.opened(part.slot) as model:

        @torch.no_grad()
        def encode(pixels_BCHW: Tensor) -> Tensor:
            return family.encode(
                part.variant, model.module, pixels_BCHW.to(site.device.torch_device)
            )

        yield encode


def _count(site: Site, task: str) -> Callable[[int, int], None]:
    return lambda done, total: site.progress.advance(task, done, total)
