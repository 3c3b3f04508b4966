"""What a family is: all that is particular to one architecture.

All kinds share one foundation. A *model family* has a shape table, upstream's class built on the meta device, and
layouts of the files it is published in. A *trained family* is one that adapters are trained on: a *base family* makes
pictures, a *language family* text; its objective tells which. *Conditioners* (text encoders and image codecs) turn
captions and pictures into what a base is trained on. Families know nothing of formats, placements or client dialects.
Their modules import without torch; tables and layouts are pure data.

Dimensions: B batch, C channels, H W latent height and width, T text tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from outsize.base.catalogue import Catalogue
from outsize.base.layout import Layout
from outsize.base.table import ShapeTable, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FAMILIES = Catalogue("outsize.families", "family")
RECURRENT_CHUNK = 64  # tokens that linear attention takes at once
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


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How one layer of a language model mixes tokens, in numbers that plans need.

    name: upstream's word for it. width: of what all heads read, together. kv_width: of the keys and values that a cache
    keeps of one token. head_dim: width of one head of attention. window: a token sees that many, itself included; None for all before it. state: numbers of a
    recurrent state, 0 for attention; key_width: of all its heads' keys together.
    """

    name: str
    width: int
    kv_width: int
    head_dim: int = 0
    window: int | None = None
    state: int = 0
    key_width: int = 0

    @property
    def is_recurrent(self) -> bool:
        """Whether a state of fixed size stands for the tokens before."""
        return self.state > 0

    def num_pairs(self, num_tokens: int) -> int:
        """Pairs of a token and one that it sees, in one document."""
        seen = num_tokens if self.window is None else min(self.window, num_tokens)
        return seen * (seen + 1) // 2 + (num_tokens - seen) * seen

    def flops(self, num_tokens: int) -> int:
        """Of mixing the tokens of one document once, projections left out."""
        if not self.is_recurrent:
            return 4 * self.width * self.num_pairs(num_tokens)  # q k' and p v, two each
        # within a chunk k k', q k', and a triangular matrix times both; three products with the state
        inner = 2 * RECURRENT_CHUNK * (2 * self.key_width + 2 * self.width)
        return num_tokens * (inner + 6 * self.state)

    def cache_elements(self, num_tokens: int) -> int:
        """Numbers that generating keeps of one document."""
        seen = num_tokens if self.window is None else min(self.window, num_tokens)
        return self.state or self.kv_width * seen


class Head(NamedTuple):
    """What turns a hidden state into logits: z = h weight', and softcap * tanh(z / softcap) where there is a cap.

    weight (V, D): the token table itself, where the two are tied.
    """

    weight: Tensor
    softcap: float | None


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


class TrainedFamily(ModelFamily, Protocol):
    """A model that adapters are trained on, whatever it makes."""

    @property
    def objective(self) -> str:
        """Name of the objective plug-in it is trained with."""

    @property
    def folder(self) -> str:
        """Its sub-folder in a repository, where conditioners lie in one named by their slot; "" for the repository itself."""

    def components(self, variant: str) -> tuple[Component, ...]:
        """Its conditioners, in the order in which they are used; () when it has none."""


class BaseFamily(TrainedFamily, Protocol):
    """A model that makes pictures."""

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


class LanguageFamily(TrainedFamily, Protocol):
    """A model that predicts the next token; only its text part, whatever else is published with it."""

    @property
    def tokenizer_folder(self) -> str:
        """Where a repository keeps the tokenizer; "" for beside the weights."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of modules that published files hold and text needs not: towers for pictures and sound, drafting layers.

        A tensor is left out when its name has one of them between its dots.
        """

    def vocabulary(self, variant: str) -> int:
        """V: token ids are below it."""

    def layer_kinds(self, variant: str) -> tuple[LayerKind, ...]:
        """How each block mixes tokens, in running order."""

    def hidden(
        self,
        variant: str,
        model: nn.Module,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        segments_BT: Tensor | None = None,
    ) -> Tensor:
        """Last hidden states, normed: (B, T, D), ready for the head.

        position_ids begin at 0 in every document; segments count a row's documents in running order, -1 for padding, and
        none sees another. Rows of one document, padded behind at most, run without a mask; so do all without segments.
        On the host, segments are looked at without waiting for the device.
        """

    def head(self, variant: str, model: nn.Module) -> Head:
        """Weight and cap of the logits."""

    def new_cache(self, variant: str, model: nn.Module) -> Any:
        """Upstream's cache of keys, values and states, empty."""

    def next_logits(
        self, variant: str, model: nn.Module, input_ids_BT: Tensor, cache: Any
    ) -> Tensor:
        """Logits (B, V) of the token after these, fp32, capped; the cache, which holds what came before, takes these in.

        Rows are equally long and without padding. Without gradients.
        """
