"""Pictures with captions: text encoders and an image codec run before the base, and the codec after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from outsize.base.errors import RecipeError
from outsize.families.protocol import FAMILIES, BaseFamily, ImageCodec
from outsize.plan.estimate import FORWARD_FACTOR
from outsize.plan.pools import Holding, Item, Phase, blocks, compute_pool, context, host, rest
from outsize.plan.sizes import ModelSizes
from outsize.plan.tasks._faults import unused, wrong_data
from outsize.plan.tasks.protocol import Edits
from outsize.plan.work import Conditioner, PreviewDecode, Work
from outsize.recipes.pictures import PictureChoice
from outsize.recipes.recipe import Recipe
from outsize.recipes.section import Section
from outsize.recipes.yaml_tree import Fault

# Pictures smaller than this are sampled and decoded several at a time, as many as make up its pixels.
_PIXELS_TOGETHER = 512 * 512
# Widest tensors of an image codec alive at once at full size, in units of its first convolution's output: a residual
# block holds input, normed, activated and convolved; the decoder runs the last level at twice the channels.
ENCODE_PLANES, DECODE_PLANES = 6, 10
_SIDES = (1024, 768, 512, 384, 256)
_OF_TEXT = (
    "placement.vocabulary_on_host",
    "compare.max_tokens",
    "compare.temperature",
    "compare.top_p",
)


@dataclass(frozen=True, slots=True)
class PictureDemand:
    """Numbers of one recipe, at the largest of its resolutions.

    tokens, sample_tokens: text included. context: tokens of one picture and its text. others: the same at the smaller
    resolutions. cached_elements: numbers in all latents and masks that are kept, whatever their resolution, mirrored ones
    too. forms: in words, what is kept of a picture.
    preview_pixels: of one preview, since they are decoded one by one.
    """

    tokens: int
    context: int
    sample_tokens: int
    text_tokens: int
    pixels: int
    sample_pixels: int
    latent_elements: int
    condition_elements: int
    num_pictures: int | None
    cached_elements: int
    forms: str = ""
    others: tuple[PictureDemand, ...] = ()
    preview_tokens: int = 0
    preview_pixels: int = 0
    preview_decode: PreviewDecode | None = None

    def mixing_flops(self, work: Work) -> Sequence[float]:
        """Every token sees all others of its picture and text."""
        return [4 * self.tokens * self.context * block.width for block in work.base.blocks]

    def head_flops(self, _work: Work) -> float:
        """The head is as thin as a latent."""
        return 0.0

    def training(self, work: Work, _holding: Holding) -> Iterator[Item]:
        """Clean latents, noise, their mixture and the prediction in fp32, and embeddings in the compute type."""
        each = 4 * 4 * self.latent_elements + self.condition_elements * work.compute_bytes
        device = compute_pool(work)
        yield Item("batch", device, work.batch * each, "latents, noise and embeddings")

    def sampling(self, _work: Work) -> Iterator[Item]:
        """Latents are nothing beside the blocks."""
        yield from ()

    def previewing(self, work: Work) -> Iterator[Item]:
        """The batch that waits."""
        each = 4 * 3 * self.latent_elements + self.condition_elements * work.compute_bytes
        why = "latents, noise and embeddings of the next step"
        yield Item("batch", compute_pool(work), work.batch * each, why)

    def decoding(self, work: Work) -> Iterator[Item]:
        """The codec, and one picture in it."""
        if self.preview_decode is not None:
            codec = _codec_of(work.conditioners)
            yield from _codec_items(work, codec, self.preview_pixels * DECODE_PLANES)

    def before(self, work: Work, hold: Callable[[ModelSizes], Holding]) -> Iterator[Phase]:
        """Captions and pictures are encoded, one encoder at a time."""
        for part in work.conditioners:
            if part.kind == "text":
                yield self._caching_text(work, part, hold(part.sizes))
            else:
                yield _codec("cache latents", work, part, self.pixels * ENCODE_PLANES)

    def after(self, work: Work) -> Iterator[Phase]:
        """Pictures that are sampled together are decoded."""
        codec = _codec_of(work.conditioners)
        yield _codec("decode pictures", work, codec, self.sample_pixels * DECODE_PLANES)

    def disk(self, _work: Work) -> Iterator[Item]:
        """The content cache."""
        count = self.num_pictures
        named = "one picture" if count is None else f"{count} pictures"
        why = f"latents and embeddings of {named}{self.forms}"
        # a caption each, and the empty one is too small a part to be counted
        embeddings = self.condition_elements * 2 * (count or 1)
        yield Item("cache", "disk", self.cached_elements * 4 + embeddings, why)

    def notes(self, _work: Work) -> Iterator[str]:
        """Whether there are pictures."""
        if self.num_pictures is None:
            yield "how many pictures there are is not known yet: the cache is counted for one of each set"
        if self.others:
            sides = len(self.others) + 1
            yield f"{sides} resolutions: memory is for the largest, seconds are their mean"

    def _caching_text(self, work: Work, part: Conditioner, holding: Holding) -> Phase:
        """One text encoder over one caption."""
        device = compute_pool(work)
        traffic = max((block.traffic for block in part.sizes.blocks), default=0)
        working = math.ceil(self.text_tokens * traffic * FORWARD_FACTOR) * work.compute_bytes
        return Phase(
            f"cache {part.slot}",
            (
                *blocks(part.sizes, holding, device),
                *rest(part.sizes, work.compute_bytes, device),
                Item("working set", device, working, f"one block run, {self.text_tokens} tokens"),
                *context(work),
                *host(work, part.sizes),
            ),
            holding,
        )


@dataclass(frozen=True, slots=True)
class PicturePlan:
    """See protocol.py."""

    @property
    def section(self) -> type[Section]:
        """Folders of pictures."""
        return PictureChoice

    @property
    def size(self) -> str:
        """Pixels of a side."""
        return "data.resolution"

    @property
    def synthetic(self) -> dict[str, Any]:
        """Data that nobody reads."""
        return {"resolution": 512, "sets": [{"folder": "synthetic", "default_caption": "none"}]}

    @property
    def example(self) -> dict[str, str]:
        """One folder."""
        return {"data.sets.folder": "pictures"}

    def faults(self, recipe: Recipe) -> Iterator[Fault]:
        """Data of another kind, and settings of text."""
        yield from wrong_data(recipe, self.section, "pictures")
        yield from unused(recipe, _OF_TEXT, "pictures")

    def demand(
        self,
        recipe: Recipe,
        conditioners: tuple[Conditioner, ...],
        num_samples: tuple[int, ...] | None,
    ) -> PictureDemand:
        """Tokens, pixels and elements of the recipe's pictures.

        Raises: RecipeError when pictures are smaller than a token.
        """
        sides = recipe.pictures.resolutions
        *others, largest = (self._at(side, recipe, conditioners, num_samples) for side in sides)
        return replace(largest, others=tuple(others))

    def _at(
        self,
        side: int,
        recipe: Recipe,
        conditioners: tuple[Conditioner, ...],
        num_samples: tuple[int, ...] | None,
    ) -> PictureDemand:
        """The demand when a pass is of one resolution."""
        family = cast("BaseFamily", FAMILIES.load(recipe.base.family))
        variant = recipe.base.variant
        conditions = family.condition_shapes(variant)
        text_tokens = sum(shape[0] for shape in conditions.values() if len(shape) == 2)
        largest = recipe.pictures.largest
        wide, high = recipe.compare.width or largest, recipe.compare.height or largest
        latent = _latent_shape(conditioners, height=side, width=side)
        together = max(1, _PIXELS_TOGETHER // (wide * high))

        def tokens_together(size: tuple[int, int]) -> int:
            """Of the pictures of a size that are sampled together."""
            shape = _latent_shape(conditioners, width=size[0], height=size[1])
            count = max(1, _PIXELS_TOGETHER // (size[0] * size[1]))
            return count * (family.num_tokens(variant, shape) + text_tokens)

        shown = _preview_size(recipe)
        context = family.num_tokens(variant, latent) + text_tokens
        return PictureDemand(
            tokens=recipe.train.batch * context,
            context=context,
            sample_tokens=tokens_together((wide, high)),
            text_tokens=text_tokens,
            pixels=side * side,
            sample_pixels=together * wide * high,
            latent_elements=math.prod(latent),
            condition_elements=_elements(conditions),
            num_pictures=None if num_samples is None else sum(num_samples),
            cached_elements=_cached_elements(recipe, conditioners, num_samples),
            forms=_forms(recipe),
            preview_tokens=0 if shown is None else tokens_together(shown),
            preview_pixels=0 if shown is None else shown[0] * shown[1],
            preview_decode=None if shown is None else recipe.previews.decode,
        )

    def shape(self, recipe: Recipe) -> str:
        """The largest resolution."""
        return f"{recipe.pictures.largest} px"

    def intake(self, recipe: Recipe) -> tuple[str, int]:
        """Pictures."""
        return "pictures", recipe.train.batch * recipe.train.accumulate

    def levers(self, recipe: Recipe) -> Iterator[list[Edits]]:
        """A smaller resolution; of several the largest are left out first.

        A recipe that says where to compare says so on purpose; otherwise comparing follows the training resolution.
        """
        now = recipe.pictures.resolutions
        fewer = [list(now[:count]) for count in range(len(now) - 1, 0, -1)]
        smaller = [[side] for side in _SIDES if side < min(now)]
        yield [
            (("data.resolution", sides[0] if len(sides) == 1 else sides),)
            for sides in (*fewer, *smaller)
        ]


def _preview_size(recipe: Recipe) -> tuple[int, int] | None:
    """Width and height of previews; None: none are made."""
    if recipe.previews.every is None:
        return None
    side, choice = recipe.pictures.largest, recipe.previews.over(recipe.compare)
    return choice.width or side, choice.height or side


def _codec_of(conditioners: tuple[Conditioner, ...]) -> Conditioner:
    return next(one for one in conditioners if one.kind == "image")


def _codec(name: str, work: Work, part: Conditioner, planes: int) -> Phase:
    """planes: as in _codec_items."""
    items = _codec_items(work, part, planes)
    return Phase(name, (*items, *context(work), *host(work, part.sizes)))


def _codec_items(work: Work, part: Conditioner, planes: int) -> Iterator[Item]:
    """planes: numbers of all the widest tensors alive at once, for each of their channels."""
    device = compute_pool(work)
    activations = planes * part.sizes.first_channels * work.compute_bytes
    why = f"the widest tensors alive at once, {part.sizes.first_channels} channels"
    yield Item("codec", device, part.sizes.small_elements * work.compute_bytes, "all of it")
    yield Item("working set of the codec", device, activations, why)


def _latent_shape(
    conditioners: tuple[Conditioner, ...], *, height: int, width: int
) -> tuple[int, int, int]:
    """Latent of one picture, its sides cut to what the codec takes."""
    part = _codec_of(conditioners)
    codec = cast("ImageCodec", FAMILIES.load(part.family))
    multiple = codec.pixel_multiple(part.variant)
    if min(height, width) < multiple:
        raise RecipeError(
            f"pictures of {width} x {height} pixels are smaller than one token of {part.family} "
            f"({multiple} pixels); raise data.resolution, or compare.width and compare.height"
        )
    return codec.latent_shape(
        part.variant, height // multiple * multiple, width // multiple * multiple
    )


def _cached_elements(
    recipe: Recipe, conditioners: tuple[Conditioner, ...], num_samples: tuple[int, ...] | None
) -> int:
    """Numbers in the latents and masks of all pictures, one of each set where their number is not known."""
    total = 0
    counts = num_samples or (1,) * len(recipe.pictures.sets)
    for item, count in zip(recipe.pictures.sets, counts, strict=True):
        forms = 2 if 0 < item.flip < 1 else 1
        has_masks = item.masks is not None or item.alpha_as_mask
        for side in recipe.pictures.resolutions:
            channels, height, width = _latent_shape(conditioners, height=side, width=side)
            total += count * (forms * channels + has_masks) * height * width
    return total


def _forms(recipe: Recipe) -> str:
    """What is kept of each picture, where it is more than one latent."""
    sets, num_sides = recipe.pictures.sets, len(recipe.pictures.resolutions)
    said = [f" at {num_sides} resolutions"] if num_sides > 1 else []
    flipped = sum(0 < item.flip < 1 for item in sets)
    if flipped:
        said.append(" mirrored too" if flipped == len(sets) else " some mirrored too")
    return ",".join(said)


def _elements(conditions: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in conditions.values())


plugin = PicturePlan()
