"""Flux.1's image codec: 16 channels at an eighth of the size, over diffusers' AutoencoderKL.

A latent is the posterior's mean, (x - shift) * scale. The base packs 2 x 2 latent pixels into a token, so pictures
come in multiples of twice the stride.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outsize.base.layout import Layout
from outsize.base.table import ShapeTable
from outsize.families._build import build_on_meta, row_of
from outsize.families._codec import (
    Stack,
    decode_pixels,
    decoder_specs,
    encode_mean,
    encoder_specs,
    single_file_rules,
)
from outsize.families.protocol import Published

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# config.json of FLUX.1-dev's vae
SHIFT, SCALE = 0.1159, 0.3611

VARIANTS: dict[str, Stack] = {
    "flux1": Stack(channels=(128, 256, 512, 512), latent_channels=16),
    "tiny": Stack(channels=(8, 16), latent_channels=4, resnets_per_level=1, norm_groups=4),
}


@dataclass(frozen=True, slots=True)
class AutoencoderKl:
    """The image codec of Flux.1."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the sizes."""
        return tuple(VARIANTS)

    def table(self, variant: str) -> ShapeTable:
        """Every tensor; there are no blocks."""
        stack = row_of("autoencoder_kl", VARIANTS, variant)
        return ShapeTable((*encoder_specs(stack), *decoder_specs(stack)))

    def layouts(self, variant: str) -> tuple[Layout, ...]:
        """Folders of diffusers and BFL's ae.safetensors."""
        stack = row_of("autoencoder_kl", VARIANTS, variant)
        rules = single_file_rules(self.table(variant).specs, len(stack.channels))
        # ComfyUI's whole checkpoints have it below "vae.", older ones below "first_stage_model."
        prefixes = ("", "first_stage_model.", "vae.")
        return Layout("diffusers"), Layout("bfl", rules, prefixes)

    def block_paths(self, variant: str) -> tuple[str, ...]:
        """None: it is small enough to be held."""
        row_of("autoencoder_kl", VARIANTS, variant)
        return ()

    def config(self, variant: str) -> dict[str, Any]:
        """What upstream's config.json says."""
        return row_of("autoencoder_kl", VARIANTS, variant).config() | {
            "scaling_factor": SCALE,
            "shift_factor": SHIFT,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
        }

    def published(self, variant: str) -> Published:
        """AutoencoderKL."""
        return Published("diffusers", "AutoencoderKL", self.config(variant))

    def build(self, variant: str) -> nn.Module:
        """AutoencoderKL on meta."""
        from diffusers import AutoencoderKL

        config = self.config(variant)
        return build_on_meta(lambda: AutoencoderKL(**config))

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: it has none."""

    def pixel_multiple(self, variant: str) -> int:
        """Stride times the base's patch of 2."""
        return 2 * row_of("autoencoder_kl", VARIANTS, variant).stride

    def latent_shape(self, variant: str, height: int, width: int) -> tuple[int, int, int]:
        """(C, H, W), not packed."""
        stack = row_of("autoencoder_kl", VARIANTS, variant)
        return stack.latent_channels, height // stack.stride, width // stack.stride

    def encode(self, variant: str, model: nn.Module, pixels_BCHW: Tensor) -> Tensor:
        """Posterior mean, shifted and scaled, fp32."""
        row_of("autoencoder_kl", VARIANTS, variant)
        return (encode_mean(model, pixels_BCHW) - SHIFT) * SCALE

    def decode(self, variant: str, model: nn.Module, latents_BCHW: Tensor) -> Tensor:
        """Pixels in -1..1, fp32."""
        row_of("autoencoder_kl", VARIANTS, variant)
        return decode_pixels(model, latents_BCHW.float() / SCALE + SHIFT)


plugin = AutoencoderKl()
