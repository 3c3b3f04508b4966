"""Flux.1: dev (guidance-distilled) and schnell (4 steps), over diffusers' FluxTransformer2DModel.

Double blocks of image and text tokens, then single blocks of both; every block has its own modulation, driven by time,
guidance and CLIP's pooled vector. A latent has 16 channels; 2 x 2 of its pixels make a token.

Dimensions: B batch, C channels, H W latent height and width, N image tokens, T text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from outsize.base.layout import Layout
from outsize.base.table import ShapeTable
from outsize.families._bfl import block_paths
from outsize.families._build import build_on_meta, row_of
from outsize.families._flow import check_guidance, exact_time, flow_sigmas, scheduler_config
from outsize.families._generation1 import SINGLE_FILE, shape_table
from outsize.families.protocol import DEPTH_MARK, Component, Published

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def linear_mu(num_tokens: int) -> float:
    """Shift of dev's schedule: a line through 0.5 at 256 tokens and 1.15 at 4096.

    Source: scheduler_config.json of FLUX.1-dev; the order of operations is calculate_shift's, for equal bits.
    """
    slope = (1.15 - 0.5) / (4096 - 256)
    return num_tokens * slope + (0.5 - slope * 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One size. num_steps, guidance: how it is sampled, as its model card says."""

    num_double: int
    num_single: int
    num_heads: int
    head_dim: int
    joint_width: int
    pooled_width: int
    in_channels: int
    axes: tuple[int, int, int]
    clip: str
    t5: str
    codec: str
    text_tokens: int
    num_steps: int
    guidance: float | None
    is_shifted: bool
    has_guidance: bool

    @property
    def width(self) -> int:
        """Width of the streams."""
        return self.num_heads * self.head_dim

    @property
    def depth(self) -> dict[str, int]:
        """Blocks by kind."""
        return {"double": self.num_double, "single": self.num_single}

    def at_depth(self, counts: tuple[int, ...], conditioners: str) -> Self:
        """The same widths with fewer blocks, and with fewer layers of T5."""
        row = replace(self, num_double=counts[0], num_single=counts[1])
        return replace(row, t5=f"{row.t5}{DEPTH_MARK}{conditioners}") if conditioners else row


_FULL: dict[str, Any] = {
    "num_double": 19,
    "num_single": 38,
    "num_heads": 24,
    "head_dim": 128,
    "joint_width": 4096,
    "pooled_width": 768,
    "in_channels": 64,
    "axes": (16, 56, 56),
    "clip": "large",
    "codec": "flux1",
}

VARIANTS: dict[str, Variant] = {
    # The card samples 50 steps; 28 are the pipeline's default.
    "dev": Variant(
        **_FULL,
        t5="xxl",
        text_tokens=512,
        num_steps=50,
        guidance=3.5,
        is_shifted=True,
        has_guidance=True,
    ),
    "schnell": Variant(
        **_FULL,
        t5="xxl-256",
        text_tokens=256,
        num_steps=4,
        guidance=None,
        is_shifted=False,
        has_guidance=False,
    ),
    "tiny": Variant(
        num_double=2,
        num_single=2,
        num_heads=2,
        head_dim=32,
        joint_width=64,
        pooled_width=64,
        in_channels=16,
        axes=(8, 12, 12),
        clip="tiny",
        t5="tiny",
        codec="tiny",
        text_tokens=64,
        num_steps=4,
        guidance=3.5,
        is_shifted=True,
        has_guidance=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Flux1:
    """The Flux.1 base family."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the sizes."""
        return tuple(VARIANTS)

    @property
    def objective(self) -> str:
        """Rectified flow."""
        return "flow_matching"

    @property
    def folder(self) -> str:
        """Sub-folder in a diffusers repository."""
        return "transformer"

    def table(self, variant: str) -> ShapeTable:
        """Every tensor; double blocks are numbered first, then single ones."""
        return shape_table(row_of("flux1", VARIANTS, variant))

    def layouts(self, variant: str) -> tuple[Layout, ...]:
        """Folders of diffusers and BFL's single files."""
        row_of("flux1", VARIANTS, variant)
        return Layout("diffusers"), SINGLE_FILE

    def block_paths(self, variant: str) -> tuple[str, ...]:
        """Double blocks, then single ones."""
        return block_paths(row_of("flux1", VARIANTS, variant))

    def config(self, variant: str) -> dict[str, Any]:
        """What upstream's config.json says of this variant."""
        row = row_of("flux1", VARIANTS, variant)
        return {
            "patch_size": 1,
            "in_channels": row.in_channels,
            "num_layers": row.num_double,
            "num_single_layers": row.num_single,
            "attention_head_dim": row.head_dim,
            "num_attention_heads": row.num_heads,
            "joint_attention_dim": row.joint_width,
            "pooled_projection_dim": row.pooled_width,
            "guidance_embeds": row.has_guidance,
            "axes_dims_rope": list(row.axes),
        }

    def published(self, variant: str) -> Published:
        """FluxTransformer2DModel, its pipeline and scheduler."""
        row = row_of("flux1", VARIANTS, variant)
        return Published(
            "diffusers",
            "FluxTransformer2DModel",
            self.config(variant),
            pipeline="FluxPipeline",
            scheduler=scheduler_config(is_shifted=row.is_shifted, max_image_seq_len=4096),
        )

    def build(self, variant: str) -> nn.Module:
        """FluxTransformer2DModel on meta."""
        from diffusers import FluxTransformer2DModel

        config = self.config(variant)
        return build_on_meta(lambda: FluxTransformer2DModel(**config))

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: rotary angles are computed in every forward."""

    def components(self, variant: str) -> tuple[Component, ...]:
        """CLIP for the pooled vector, T5 for the tokens, one codec."""
        row = row_of("flux1", VARIANTS, variant)
        return (
            Component("text_encoder", "text", "clip_text", row.clip, tokenizer="tokenizer"),
            Component("text_encoder_2", "text", "t5_text", row.t5, tokenizer="tokenizer_2"),
            Component("vae", "image", "autoencoder_kl", row.codec),
        )

    def condition_shapes(self, variant: str) -> dict[str, tuple[int, ...]]:
        """{"pooled": (D,), "text": (T, D)}."""
        row = row_of("flux1", VARIANTS, variant)
        return {"pooled": (row.pooled_width,), "text": (row.text_tokens, row.joint_width)}

    def num_tokens(self, variant: str, latent_shape: tuple[int, int, int]) -> int:
        """One token for 2 x 2 latent pixels."""
        row_of("flux1", VARIANTS, variant)
        return latent_shape[1] // 2 * (latent_shape[2] // 2)

    def predict(  # noqa: PLR0917 - the protocol's order
        self,
        variant: str,
        model: nn.Module,
        noisy_BCHW: Tensor,
        sigma_B: Tensor,
        conditions: Mapping[str, Tensor],
        guidance: float | None,
    ) -> Tensor:
        """Velocity (noise - data) of noisy_BCHW, in its type.

        Raises: RecipeError when a guidance-distilled variant gets none, or another one gets some.
        """
        row = row_of("flux1", VARIANTS, variant)
        check_guidance(variant, guidance, is_needed=row.has_guidance)
        dtype, device = noisy_BCHW.dtype, noisy_BCHW.device
        height, width = (size // 2 for size in noisy_BCHW.shape[-2:])
        text_BTD = conditions["text"].to(dtype)
        guidance_B = None if guidance is None else sigma_B.new_full(sigma_B.shape, guidance)
        with exact_time(model.get_submodule("time_text_embed.time_proj"), sigma_B, guidance_B):
            tokens_BNC = model(
                hidden_states=_pack(noisy_BCHW),
                encoder_hidden_states=text_BTD,
                pooled_projections=conditions["pooled"].to(dtype),
                timestep=sigma_B,
                guidance=guidance_B,
                img_ids=_positions(height, width, device),
                txt_ids=_positions(1, 1, device).expand(text_BTD.shape[1], -1),
                return_dict=False,
            )[0]
        return _unpack(tokens_BNC, height, width)

    def training_guidance(self, variant: str) -> float | None:
        """1.0 for dev, as the common trainer sets it: the embedding's neutral value."""
        return 1.0 if row_of("flux1", VARIANTS, variant).has_guidance else None

    def sampling_defaults(self, variant: str) -> dict[str, Any]:
        """Steps and guidance of the model card."""
        row = row_of("flux1", VARIANTS, variant)
        return {"num_steps": row.num_steps, "guidance": row.guidance, "is_true_cfg": False}

    def sigmas(self, variant: str, num_steps: int, num_tokens: int) -> list[float]:
        """linspace(1, 1/n, n), shifted for dev, then 0."""
        row = row_of("flux1", VARIANTS, variant)
        return flow_sigmas(num_steps, linear_mu(num_tokens) if row.is_shifted else None)

    def shift_mu(self, variant: str, num_tokens: int) -> float:
        """The mu it is sampled with; 0 moves nothing."""
        return linear_mu(num_tokens) if row_of("flux1", VARIANTS, variant).is_shifted else 0.0


def _pack(latent_BCHW: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H/2 W/2, 4 C), channel slowest, then row and column within the patch."""
    from torch.nn.functional import pixel_unshuffle

    return pixel_unshuffle(latent_BCHW, 2).flatten(2).transpose(1, 2)


def _unpack(tokens_BNC: Tensor, height: int, width: int) -> Tensor:
    """The inverse of _pack; height and width count tokens."""
    from torch.nn.functional import pixel_shuffle

    num_samples, _, channels = tokens_BNC.shape
    return pixel_shuffle(
        tokens_BNC.transpose(1, 2).reshape(num_samples, channels, height, width), 2
    )


def _positions(height: int, width: int, device: torch.device) -> Tensor:
    """Position ids (height*width, 3): 0, row, column; exact in fp32."""
    import torch

    axes = (torch.arange(size, device=device, dtype=torch.float32) for size in (1, height, width))
    return torch.cartesian_prod(*axes)


plugin = Flux1()
