"""Flux.2: dev (guidance-distilled, Mistral) and klein (Qwen3), over diffusers' Flux2Transformer2DModel.

A stream of image tokens and one of text tokens meet in double blocks and run as one through single blocks. Modulation
is shared by all blocks, so it is outside them; no linear has a bias. A latent is already patchified (128 channels), so
a token is one latent pixel.

Dimensions: B batch, C channels, H W latent height and width, N image tokens, T text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from outsize.base.layout import Layout
from outsize.base.table import ShapeTable
from outsize.families._bfl import block_paths
from outsize.families._build import build_on_meta, row_of
from outsize.families._flow import (
    check_guidance,
    empirical_mu,
    exact_time,
    flow_sigmas,
    scheduler_config,
)
from outsize.families._generation2 import SINGLE_FILE, positions, shape_table
from outsize.families.protocol import DEPTH_MARK, Component, Published

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Steps that the undistilled models are sampled with; the shift they are sampled at is the one to train at.
_TRAINING_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One size. num_steps, guidance, is_true_cfg: how it is sampled, as its model card and pipeline say."""

    num_double: int
    num_single: int
    num_heads: int
    joint_width: int
    text: tuple[str, str]
    codec: str
    num_steps: int
    guidance: float | None
    is_true_cfg: bool = False
    has_guidance: bool = False
    head_dim: int = 128
    in_channels: int = 128
    axes: tuple[int, ...] = (32, 32, 32, 32)
    text_tokens: int = 512
    mu: Callable[[int, int], float] | None = empirical_mu
    pipeline: str = "Flux2KleinPipeline"

    @property
    def width(self) -> int:
        """Width of the streams."""
        return self.num_heads * self.head_dim

    @property
    def depth(self) -> dict[str, int]:
        """Blocks by kind."""
        return {"double": self.num_double, "single": self.num_single}

    def at_depth(self, counts: tuple[int, ...], conditioners: str) -> Self:
        """The same widths with fewer blocks, and with fewer layers of the text encoder."""
        row = replace(self, num_double=counts[0], num_single=counts[1])
        return (
            replace(row, text=(row.text[0], f"{row.text[1]}{DEPTH_MARK}{conditioners}"))
            if conditioners
            else row
        )


# klein and klein-base differ in weights and sampling only: the distilled ones take 4 steps and no guidance (model card,
# `is_distilled` in model_index.json), the base ones 50 steps with true classifier-free guidance (Flux2KleinPipeline).
_KLEIN_4B: dict[str, Any] = {
    "num_double": 5,
    "num_single": 20,
    "num_heads": 24,
    "joint_width": 7680,
    "text": ("qwen3_text", "4b"),
    "codec": "flux2",
}
_KLEIN_9B: dict[str, Any] = {
    "num_double": 8,
    "num_single": 24,
    "num_heads": 32,
    "joint_width": 12288,
    "text": ("qwen3_text", "8b"),
    "codec": "flux2",
}
_TINY: dict[str, Any] = {
    "num_double": 2,
    "num_single": 2,
    "num_heads": 2,
    "head_dim": 32,
    "joint_width": 192,
    "in_channels": 16,
    "axes": (8, 8, 8, 8),
    "text_tokens": 64,
    "codec": "tiny",
}
# Its packaged config.json files are the truth; a test holds this row to them.
_TEACHING: dict[str, Any] = {
    "num_double": 2,
    "num_single": 6,
    "num_heads": 4,
    "head_dim": 48,
    "joint_width": 384,
    "in_channels": 48,
    "axes": (12, 12, 12, 12),
    "text": ("qwen3_text", "teaching"),
    "text_tokens": 20,
    "codec": "teaching",
    "num_steps": 6,
    "guidance": 2.0,
    "is_true_cfg": True,
    "mu": None,  # 36 tokens: it is trained and sampled without a shift
}
_BASE: dict[str, Any] = {"num_steps": 50, "guidance": 4.0, "is_true_cfg": True}
_GUIDED: dict[str, Any] = {"guidance": 4.0, "has_guidance": True, "pipeline": "Flux2Pipeline"}
_DISTILLED: dict[str, Any] = {"num_steps": 4, "guidance": None}

VARIANTS: dict[str, Variant] = {
    "dev": Variant(
        num_double=8,
        num_single=48,
        num_heads=48,
        joint_width=15360,
        text=("mistral3_text", "small-24b"),
        codec="flux2",
        num_steps=50,  # the pipeline's default; the model card calls 28 a good trade-off
        **_GUIDED,
    ),
    "klein-4b": Variant(**_KLEIN_4B, **_DISTILLED),
    "klein-9b": Variant(**_KLEIN_9B, **_DISTILLED),
    "klein-base-4b": Variant(**_KLEIN_4B, **_BASE),
    "klein-base-9b": Variant(**_KLEIN_9B, **_BASE),
    "teaching": Variant(**_TEACHING),
    "tiny": Variant(**_TINY, **_GUIDED, text=("mistral3_text", "tiny"), num_steps=4),
    "tiny-klein": Variant(
        **_TINY, text=("qwen3_text", "tiny"), num_steps=4, guidance=4.0, is_true_cfg=True
    ),
}


@dataclass(frozen=True, slots=True)
class Flux2:
    """The Flux.2 base family."""

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
        return shape_table(row_of("flux2", VARIANTS, variant))

    def layouts(self, variant: str) -> tuple[Layout, ...]:
        """Folders of diffusers and BFL's single files."""
        row_of("flux2", VARIANTS, variant)
        return Layout("diffusers"), SINGLE_FILE

    def block_paths(self, variant: str) -> tuple[str, ...]:
        """Double blocks, then single ones."""
        return block_paths(row_of("flux2", VARIANTS, variant))

    def config(self, variant: str) -> dict[str, Any]:
        """What upstream's config.json says of this variant."""
        row = row_of("flux2", VARIANTS, variant)
        return {
            "patch_size": 1,
            "in_channels": row.in_channels,
            "num_layers": row.num_double,
            "num_single_layers": row.num_single,
            "attention_head_dim": row.head_dim,
            "num_attention_heads": row.num_heads,
            "joint_attention_dim": row.joint_width,
            "timestep_guidance_channels": 256,
            "mlp_ratio": 3.0,
            "axes_dims_rope": list(row.axes),
            "rope_theta": 2000,
            "eps": 1e-6,
            "guidance_embeds": row.has_guidance,
        }

    def published(self, variant: str) -> Published:
        """Flux2Transformer2DModel, its pipeline and scheduler."""
        row = row_of("flux2", VARIANTS, variant)
        return Published(
            "diffusers",
            "Flux2Transformer2DModel",
            self.config(variant),
            pipeline=row.pipeline,
            scheduler=scheduler_config(is_shifted=row.mu is not None),
        )

    def build(self, variant: str) -> nn.Module:
        """Flux2Transformer2DModel on meta."""
        from diffusers import Flux2Transformer2DModel

        config = self.config(variant)
        return build_on_meta(lambda: Flux2Transformer2DModel(**config))

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: rotary angles are computed in every forward."""

    def components(self, variant: str) -> tuple[Component, ...]:
        """One text encoder, one codec."""
        row = row_of("flux2", VARIANTS, variant)
        return (
            Component("text_encoder", "text", *row.text, tokenizer="tokenizer"),
            Component("vae", "image", "autoencoder_kl_flux2", row.codec),
        )

    def condition_shapes(self, variant: str) -> dict[str, tuple[int, ...]]:
        """{"text": (T, D)}."""
        row = row_of("flux2", VARIANTS, variant)
        return {"text": (row.text_tokens, row.joint_width)}

    def num_tokens(self, variant: str, latent_shape: tuple[int, int, int]) -> int:
        """One token for each latent pixel."""
        row_of("flux2", VARIANTS, variant)
        return latent_shape[1] * latent_shape[2]

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

        Raises: RecipeError when a guidance-distilled variant gets none, or another one gets some (true guidance is two
        predictions, which the caller mixes).
        """
        row = row_of("flux2", VARIANTS, variant)
        check_guidance(variant, guidance, is_needed=row.has_guidance)
        height, width = noisy_BCHW.shape[-2:]
        text_BTD = conditions["text"].to(noisy_BCHW.dtype)
        guidance_B = None if guidance is None else sigma_B.new_full(sigma_B.shape, guidance)
        with exact_time(model.get_submodule("time_guidance_embed.time_proj"), sigma_B, guidance_B):
            tokens_BNC = model(
                hidden_states=noisy_BCHW.flatten(2).transpose(1, 2),
                encoder_hidden_states=text_BTD,
                timestep=sigma_B,
                guidance=guidance_B,
                img_ids=positions(1, height, width, 1, device=noisy_BCHW.device),
                txt_ids=positions(1, 1, 1, text_BTD.shape[1], device=noisy_BCHW.device),
                return_dict=False,
            )[0]
        velocity: Tensor = tokens_BNC.transpose(1, 2).reshape(noisy_BCHW.shape)
        return velocity

    def training_guidance(self, variant: str) -> float | None:
        """1.0 for dev, as the common trainer sets it: the embedding's neutral value."""
        return 1.0 if row_of("flux2", VARIANTS, variant).has_guidance else None

    def sampling_defaults(self, variant: str) -> dict[str, Any]:
        """Steps and guidance of the model card and pipeline."""
        row = row_of("flux2", VARIANTS, variant)
        return {
            "num_steps": row.num_steps,
            "guidance": row.guidance,
            "is_true_cfg": row.is_true_cfg,
        }

    def sigmas(self, variant: str, num_steps: int, num_tokens: int) -> list[float]:
        """linspace(1, 1/n, n), shifted by the variant's mu if it has one, then 0."""
        mu = row_of("flux2", VARIANTS, variant).mu
        return flow_sigmas(num_steps, None if mu is None else mu(num_tokens, num_steps))

    def shift_mu(self, variant: str, num_tokens: int) -> float:
        """The mu that undistilled models are sampled with; 0 moves nothing."""
        mu = row_of("flux2", VARIANTS, variant).mu
        return 0.0 if mu is None else mu(num_tokens, _TRAINING_STEPS)


plugin = Flux2()
