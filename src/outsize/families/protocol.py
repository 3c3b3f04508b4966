"""What a family is: all that is particular to one architecture.

Three kinds share one foundation. A *model family* has a shape table, upstream's class built on the meta device, and
layouts of the files it is published in. A *base family* is one that is trained; *conditioners* (text encoders and
image codecs) turn captions and pictures into what it is trained on. Families know nothing of formats, placements or
client dialects. Their modules import without torch; tables and layouts are pure data.

Dimensions: B batch, C channels, H W latent height and width, T text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from outsize.base.catalogue import Catalogue
from outsize.base.layout import Layout
from outsize.base.table import ShapeTable, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FAMILIES = Catalogue("outsize.families", "family")
DEPTH_MARK = "@"  # "dev@2+6" is dev's widths with 2 blocks of its first kind and 6 of its second


@dataclass(frozen=True, slots=True)
class Component:
    """A conditioner that a base family needs.

    slot: its name in recipes and in diffusers folders ("text_encoder", "text_encoder_2", "vae"). tokenizer: folder
    beside it, for text encoders.
    """

    slot: str
    kind: Literal["text", "image"]
    family: str
    variant: str
    tokenizer: str | None = None


def without_depth(variant: str) -> str:
    """The variant as it is listed: "dev" of "dev@2+6"."""
    return variant.partition(DEPTH_MARK)[0]


@dataclass(frozen=True, slots=True)
class Published:
    """How one model lies in a repository of the library that defines it.

    library, upstream: whose class it is, and which. config: what config.json says besides the class. unread: tensors of
    the published files beyond the table, under our names (layers above those that are read). pipeline, scheduler: for
    bases, the class that joins all parts, and scheduler_config.json.
    """

    library: Literal["diffusers", "transformers"]
    upstream: str
    config: Mapping[str, Any]
    unread: tuple[TensorSpec, ...] = ()
    pipeline: str = ""
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """Name of the weights without their ending."""
        return "diffusion_pytorch_model" if self.library == "diffusers" else "model"

    @property
    def config_json(self) -> dict[str, Any]:
        """config.json whole."""
        is_diffusers = self.library == "diffusers"
        head = (
            {"_class_name": self.upstream} if is_diffusers else {"architectures": [self.upstream]}
        )
        return {**head, **self.config}


class ModelFamily(Protocol):
    """Shape table, upstream class, files."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants: sizes of the architecture, the tiny one included; at full depth."""

    def table(self, variant: str) -> ShapeTable:
        """Every tensor that is loaded, blocks in running order; no torch."""

    def layouts(self, variant: str) -> tuple[Layout, ...]:
        """The file layouts this variant is published in, most common first."""

    def block_paths(self, variant: str) -> tuple[str, ...]:
        """Module path of each block, by block number; () when nothing streams."""

    def published(self, variant: str) -> Published:
        """How it lies in a repository, apart from the names of its tensors (the first of `layouts`)."""

    def build(self, variant: str) -> nn.Module:
        """Upstream's module on the meta device, in eval mode; its state dict has the table's names and shapes."""

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Give real values to buffers that no checkpoint holds (rotary tables).

        Meta tensors may be left only where the table names them.
        """


class TextEncoder(ModelFamily, Protocol):
    """Captions -> embeddings."""

    def tokenize(self, variant: str, tokenizer: Path, texts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids and masks (B, T), as the upstream pipeline makes them. Reads local files only."""

    def encode(
        self, variant: str, model: nn.Module, tokens: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Embeddings by name, batch first: "text" (B, T, D), "pooled" (B, D)."""


class ImageCodec(ModelFamily, Protocol):
    """Pictures <-> latents, normalised as the base is trained on them."""

    def pixel_multiple(self, variant: str) -> int:
        """Width and height of a picture must be multiples of this (codec stride times patch)."""

    def latent_shape(self, variant: str, height: int, width: int) -> tuple[int, int, int]:
        """(C, H, W) of one picture's latent."""

    def encode(self, variant: str, model: nn.Module, pixels_BCHW: Tensor) -> Tensor:
        """Posterior mean, normalised, fp32; pixels in -1..1."""

    def decode(self, variant: str, model: nn.Module, latents_BCHW: Tensor) -> Tensor:
        """Pixels (B, 3, height, width) in -1..1, fp32."""


class BaseFamily(ModelFamily, Protocol):
    """The model that is trained."""

    @property
    def objective(self) -> str:
        """Name of the objective plug-in it is trained with."""

    @property
    def folder(self) -> str:
        """Its sub-folder in a diffusers repository, where conditioners lie in one named by their slot."""

    def components(self, variant: str) -> tuple[Component, ...]:
        """Its conditioners, in the order in which they are used."""

    def condition_shapes(self, variant: str) -> dict[str, tuple[int, ...]]:
        """Shape of each embedding of one caption, as the text encoders give them."""

    def num_tokens(self, variant: str, latent_shape: tuple[int, int, int]) -> int:
        """Image tokens of one latent."""

    def predict(  # noqa: PLR0917 - read in the order in which the model takes them
        self,
        variant: str,
        model: nn.Module,
        noisy_BCHW: Tensor,
        sigma_B: Tensor,
        conditions: Mapping[str, Tensor],
        guidance: float | None,
    ) -> Tensor:
        """Velocity (noise - data), same shape as noisy. sigma fp32 in 0..1, reaching the model without rounding."""

    def training_guidance(self, variant: str) -> float | None:
        """Guidance given to guidance-distilled models while training; None for others."""

    def sampling_defaults(self, variant: str) -> dict[str, Any]:
        """num_steps, guidance, is_true_cfg (two predictions, with and without the prompt), as published."""

    def sigmas(self, variant: str, num_steps: int, num_tokens: int) -> list[float]:
        """The flow schedule of the upstream pipeline: num_steps + 1 falling values that end in 0."""

    def shift_mu(self, variant: str, num_tokens: int) -> float:
        """Resolution shift used for training timesteps: sigma' = e^mu / (e^mu + 1/sigma - 1)."""
