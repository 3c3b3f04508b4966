"""Pictures from the base: embed the prompts, sample with and without the adapter, decode; one model at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from outsize.app.attached import adapted, put_on_, require_adapter
from outsize.app.encode import TextInputs, codec_part, encode_texts, text_inputs
from outsize.app.parts import BASE
from outsize.app.people import people_rendered
from outsize.app.site import Site
from outsize.base.files import write_json_atomically
from outsize.data.encode import text_key
from outsize.families.protocol import BaseFamily, ImageCodec
from outsize.layers.model import FrozenModel
from outsize.recipes.showing import CompareChoice
from outsize.runs.folder import RunFolder
from outsize.sample.flow import guided, integrate, noise_of

PIXELS_PER_BATCH = 512 * 512  # pictures sampled together; one at a time from 512 px on


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture to make."""

    prompt: str
    seed: int


@dataclass(frozen=True, slots=True)
class Pair:
    """One shot by the base alone and by the base with an adapter."""

    shot: Shot
    before: Image.Image
    after: Image.Image


@dataclass(frozen=True, slots=True)
class RenderSettings:
    """How pictures are made. width, height: pixels. guidance: None for models that take none."""

    width: int
    height: int
    num_steps: int
    guidance: float | None
    is_true_cfg: bool


def settings_of(site: Site, choice: CompareChoice | None = None) -> RenderSettings:
    """The recipe's choice (or another), filled up with the family's published defaults."""
    part = site.parts[BASE]
    choice = site.recipe.compare if choice is None else choice
    defaults = cast("BaseFamily", part.family).sampling_defaults(part.variant)
    multiple = cast("ImageCodec", codec_part(site).family).pixel_multiple(codec_part(site).variant)
    sides = [
        (side or site.recipe.pictures.largest) // multiple * multiple
        for side in (choice.width, choice.height)
    ]
    return RenderSettings(
        width=sides[0],
        height=sides[1],
        num_steps=choice.steps or defaults["num_steps"],
        guidance=defaults["guidance"] if choice.guidance is None else choice.guidance,
        is_true_cfg=defaults["is_true_cfg"],
    )


def render_pairs(
    site: Site, run: RunFolder, shots: Sequence[Shot], settings: RenderSettings
) -> list[Pair]:
    """Each shot by the base alone and by the base with the run's adapter.

    Raises: ConsentMissing when somebody whom the adapter shows has not agreed, or has not any more when it is done.
    """
    people = people_rendered(site, run, with_adapter=True)
    people.begin("render")
    conditions = _conditions(site, [shot.prompt for shot in shots], settings)
    with adapted(site) as (model, adapter, _):
        put_on_(site, run, adapter)
        with site.stages.stage("sample base"), adapter.disabled():
            before = sample_latents(site, model, shots, conditions, settings)
        with site.stages.stage("sample adapter"):
            after = sample_latents(site, model, shots, conditions, settings)
    with site.stages.stage("decode pictures"):
        pictures = list(decode_latents(site, [*before, *after]))
    people.release("render")
    split = len(shots)
    return [Pair(*one) for one in zip(shots, pictures[:split], pictures[split:], strict=True)]


def render(
    site: Site,
    run: RunFolder,
    shots: Sequence[Shot],
    settings: RenderSettings,
    *,
    with_adapter: bool,
) -> list[Image.Image]:
    """Each shot once, with the run's adapter or by the base alone.

    Raises: RecipeError, before any model is opened, when the run has no adapter of this recipe; ConsentMissing as
    `render_pairs`.
    """
    if with_adapter:
        require_adapter(site, run)
    people = people_rendered(site, run, with_adapter=with_adapter)
    people.begin("render")
    conditions = _conditions(site, [shot.prompt for shot in shots], settings)
    with adapted(site) as (model, adapter, _):
        if with_adapter:
            put_on_(site, run, adapter)
        with (
            nullcontext() if with_adapter else adapter.disabled(),
            site.stages.stage("sample adapter" if with_adapter else "sample base"),
        ):
            latents = sample_latents(site, model, shots, conditions, settings)
    with site.stages.stage("decode pictures"):
        pictures = list(decode_latents(site, latents))
    people.release("render")
    return pictures


def save_samples(
    run: RunFolder, shots: Sequence[Shot], pictures: Sequence[Image.Image]
) -> list[Path]:
    """Write pictures into samples/ of the run folder, numbered on, and what each shows beside it as JSON."""
    folder = run.path / "samples"
    folder.mkdir(exist_ok=True)
    first = 1 + max(
        (int(one.stem) for one in folder.glob("*.png") if one.stem.isdigit()), default=0
    )
    paths = []
    for number, (shot, picture) in enumerate(zip(shots, pictures, strict=True), start=first):
        path = folder / f"{number:04d}.png"
        picture.save(path)
        write_json_atomically(path.with_suffix(".json"), asdict(shot))
        paths.append(path)
    return paths


def texts_of(prompts: Sequence[str], settings: RenderSettings) -> list[str]:
    """What must be embedded: every prompt, and "" for true guidance."""
    return [*prompts, ""] if settings.is_true_cfg else list(prompts)


def _conditions(
    site: Site, prompts: Sequence[str], settings: RenderSettings
) -> dict[str, dict[str, Tensor]]:
    """Embeddings of all that is asked for, through the cache."""
    encoders = text_inputs(site)
    encode_texts(site, encoders, texts_of(prompts, settings))
    return read_conditions(site, encoders, prompts, settings)


def read_conditions(
    site: Site,
    encoders: Sequence[TextInputs],
    prompts: Sequence[str],
    settings: RenderSettings,
) -> dict[str, dict[str, Tensor]]:
    """Embeddings by text, from the cache, which must hold them."""
    found: dict[str, dict[str, Tensor]] = {}
    for text in texts_of(prompts, settings):
        merged: dict[str, Tensor] = {}
        for encoder in encoders:
            entry = site.cache.get(text_key(site.cache, text, encoder.inputs))
            assert entry is not None, "it was just cached"
            merged |= entry
        found[text] = merged
    return found


def sample_latents(
    site: Site,
    model: FrozenModel,
    shots: Sequence[Shot],
    conditions: Mapping[str, Mapping[str, Tensor]],
    settings: RenderSettings,
    *,
    task: str = "sample",
) -> list[Tensor]:
    """Clean latents of every shot, fp32, on the host. task: as progress calls it."""
    part, codec = site.parts[BASE], codec_part(site)
    family = cast("BaseFamily", part.family)
    shape = cast("ImageCodec", codec.family).latent_shape(
        codec.variant, settings.height, settings.width
    )
    sigmas = family.sigmas(part.variant, settings.num_steps, family.num_tokens(part.variant, shape))
    device, compute = site.device.torch_device, site.device.compute_dtype
    latents: list[Tensor] = []
    site.progress.advance(task, 0, len(shots), "pictures")
    for batch in _batches(shots, settings):
        noise = noise_of([shot.seed for shot in batch], shape).to(device)
        predict = _predict(
            site, model, [conditions[shot.prompt] for shot in batch],
            conditions.get("", {}), settings,
        )  # fmt: skip
        clean = integrate(predict, noise, sigmas, compute=compute)
        latents += list(clean.cpu())
        site.progress.advance(task, len(latents), len(shots), "pictures")
    return latents


def _predict(
    site: Site,
    model: FrozenModel,
    prompts: Sequence[Mapping[str, Tensor]],
    blank: Mapping[str, Tensor],
    settings: RenderSettings,
) -> Callable[[Tensor, Tensor], Tensor]:
    part = site.parts[BASE]
    family = cast("BaseFamily", part.family)
    device, compute = site.device.torch_device, site.device.compute_dtype
    guidance = None if settings.is_true_cfg else settings.guidance

    def placed(several: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            name: torch.stack([one[name] for one in several]).to(device, compute)
            for name in several[0]
        }

    def along(conditions: dict[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def predict(noisy: Tensor, sigma_B: Tensor) -> Tensor:
            model.begin("forward")
            return family.predict(part.variant, model.module, noisy, sigma_B, conditions, guidance)

        return predict

    if not settings.is_true_cfg:
        return along(placed(prompts))
    scale = 1.0 if settings.guidance is None else settings.guidance
    return guided(along(placed(prompts)), along(placed([blank] * len(prompts))), scale)


def _batches(shots: Sequence[Shot], settings: RenderSettings) -> Iterator[Sequence[Shot]]:
    size = max(1, PIXELS_PER_BATCH // (settings.width * settings.height))
    for start in range(0, len(shots), size):
        yield shots[start : start + size]


def decode_latents(site: Site, latents: Iterable[Tensor]) -> Generator[Image.Image, None, None]:
    """Pictures of latents, one after the other, by the image codec, which is open until the last one is taken."""
    part = codec_part(site)
    codec = cast("ImageCodec", part.family)
    with site.opened(part.slot) as model:
        for latent in latents:
            placed = latent[None].to(site.device.torch_device)
            with torch.no_grad():
                pixels = codec.decode(part.variant, model.module, placed)
            yield to_picture(pixels[0])


def to_picture(pixels_CHW: Tensor) -> Image.Image:
    """Pixels in -1..1 as an 8-bit RGB picture."""
    scaled = ((pixels_CHW.float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(cast("Any", scaled.permute(1, 2, 0).contiguous().numpy()))
