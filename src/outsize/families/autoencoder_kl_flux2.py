"""Flux.2's image codec: 32 channels at an eighth of the size, 2 x 2 of them packed to 128 at a sixteenth.

A latent is the posterior's mean, patchified and normed by the running statistics of a BatchNorm that the file holds;
that is done in fp32, whatever the codec computes in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outsize.base.layout import Layout
from outsize.base.table import ShapeTable, TensorSpec
from outsize.families._build import build_on_meta, row_of
from outsize.families._codec import (
    Stack,
    decode_pixels,
    decoder_specs,
    encode_mean,
    encoder_specs,
    single_file_rules,
)
from outsize.families._specs import Specs, conv
from outsize.families.protocol import Published

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_EPSILON = 1e-4  # batch_norm_eps in config.json
_PATCH = 2

VARIANTS: dict[str, Stack] = {
    "flux2": Stack(channels=(128, 256, 512, 512), latent_channels=32),
    # the small base that ships with this package; its config.json is the truth
    "teaching": Stack(
        channels=(32, 64, 96),
        latent_channels=12,
        resnets_per_level=1,
        norm_groups=16,
        sample_size=48,
    ),
    "tiny": Stack(channels=(8, 16), latent_channels=4, resnets_per_level=1, norm_groups=4),
}


def _statistics(num_channels: int) -> Specs:
    return (
        TensorSpec("bn.running_mean", (num_channels,), "buffer"),
        TensorSpec("bn.running_var", (num_channels,), "buffer"),
        TensorSpec("bn.num_batches_tracked", (), "buffer"),
    )


@dataclass(frozen=True, slots=True)
class AutoencoderKlFlux2:
    """The image codec of Flux.2."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the sizes."""
        return tuple(VARIANTS)

    def table(self, variant: str) -> ShapeTable:
        """Every tensor; there are no blocks."""
        stack = row_of("autoencoder_kl_flux2", VARIANTS, variant)
        channels = stack.latent_channels
        return ShapeTable(
            (
                *encoder_specs(stack),
                *decoder_specs(stack),
                *conv("quant_conv", 2 * channels, 2 * channels, kernel=1),
                *conv("post_quant_conv", channels, channels, kernel=1),
                *_statistics(_PATCH**2 * channels),
            )
        )

    def layouts(self, variant: str) -> tuple[Layout, ...]:
        """Folders of diffusers, BFL's ae.safetensors, and what ComfyUI saves: the same with both 1x1 convolutions outside."""
        stack = row_of("autoencoder_kl_flux2", VARIANTS, variant)
        rules = single_file_rules(self.table(variant).specs, len(stack.channels))
        outside = tuple(
            replace(rule, theirs=rule.ours) if "quant_conv." in rule.ours else rule
            for rule in rules
        )
        prefixes = ("", "vae.")
        return (
            Layout("diffusers"),
            Layout("bfl", rules, prefixes),
            Layout("bfl-outside", outside, prefixes),
        )

    def block_paths(self, variant: str) -> tuple[str, ...]:
        """None: it is small enough to be held."""
        row_of("autoencoder_kl_flux2", VARIANTS, variant)
        return ()

    def config(self, variant: str) -> dict[str, Any]:
        """What upstream's config.json says."""
        return row_of("autoencoder_kl_flux2", VARIANTS, variant).config() | {
            "use_quant_conv": True,
            "use_post_quant_conv": True,
            "batch_norm_eps": _EPSILON,
            "batch_norm_momentum": 0.1,
            "patch_size": [_PATCH, _PATCH],
        }

    def published(self, variant: str) -> Published:
        """AutoencoderKLFlux2."""
        return Published("diffusers", "AutoencoderKLFlux2", self.config(variant))

    def build(self, variant: str) -> nn.Module:
        """AutoencoderKLFlux2 on meta."""
        from diffusers import AutoencoderKLFlux2

        config = self.config(variant)
        return build_on_meta(lambda: AutoencoderKLFlux2(**config))

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the running statistics are in the table."""

    def pixel_multiple(self, variant: str) -> int:
        """Stride times patch."""
        return _PATCH * row_of("autoencoder_kl_flux2", VARIANTS, variant).stride

    def latent_shape(self, variant: str, height: int, width: int) -> tuple[int, int, int]:
        """(C, H, W), patchified."""
        stack = row_of("autoencoder_kl_flux2", VARIANTS, variant)
        side = _PATCH * stack.stride
        return _PATCH**2 * stack.latent_channels, height // side, width // side

    def encode(self, variant: str, model: nn.Module, pixels_BCHW: Tensor) -> Tensor:
        """Posterior mean, patchified and normed, fp32."""
        from torch.nn.functional import pixel_unshuffle

        row_of("autoencoder_kl_flux2", VARIANTS, variant)
        mean_C11, deviation_C11 = _normalisation(model)
        return (pixel_unshuffle(encode_mean(model, pixels_BCHW), _PATCH) - mean_C11) / deviation_C11

    def decode(self, variant: str, model: nn.Module, latents_BCHW: Tensor) -> Tensor:
        """Pixels in -1..1, fp32."""
        from torch.nn.functional import pixel_shuffle

        row_of("autoencoder_kl_flux2", VARIANTS, variant)
        mean_C11, deviation_C11 = _normalisation(model)
        latents = latents_BCHW.to(mean_C11.device, mean_C11.dtype) * deviation_C11 + mean_C11
        return decode_pixels(model, pixel_shuffle(latents, _PATCH))


def _normalisation(model: nn.Module) -> tuple[Tensor, Tensor]:
    mean = model.get_buffer("bn.running_mean").float()
    variance = model.get_buffer("bn.running_var").float()
    return mean.view(-1, 1, 1), (variance.view(-1, 1, 1) + _EPSILON).sqrt()


plugin = AutoencoderKlFlux2()
