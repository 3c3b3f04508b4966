"""What the two Flux autoencoders share: shapes of diffusers' encoder and decoder, and BFL's names for them.

BFL count decoder levels from the bottom (level 0 is the largest picture), diffusers in running order, and BFL write the
attention's linears as 1x1 convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outsize.base.layout import Rule
from outsize.base.table import TensorSpec
from outsize.families._specs import Specs, conv, linear, norm, within

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One size: channels of each level, from the picture down."""

    channels: tuple[int, ...]
    latent_channels: int
    resnets_per_level: int = 2
    norm_groups: int = 32
    sample_size: int = 1024

    @property
    def stride(self) -> int:
        """Pixels along one side of a latent pixel."""
        return int(2 ** (len(self.channels) - 1))

    def config(self) -> dict[str, Any]:
        """The part of config.json that both autoencoders share."""
        num_levels = len(self.channels)
        return {
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ["DownEncoderBlock2D"] * num_levels,
            "up_block_types": ["UpDecoderBlock2D"] * num_levels,
            "block_out_channels": list(self.channels),
            "layers_per_block": self.resnets_per_level,
            "latent_channels": self.latent_channels,
            "norm_num_groups": self.norm_groups,
            "act_fn": "silu",
            "sample_size": self.sample_size,
            "mid_block_add_attention": True,
        }


def encoder_specs(stack: Stack) -> Specs:
    """Every tensor of diffusers' Encoder."""
    first, last = stack.channels[0], stack.channels[-1]
    inputs = (first, *stack.channels[:-1])
    levels = tuple(
        spec
        for i, (num_in, num_out) in enumerate(zip(inputs, stack.channels, strict=True))
        for spec in within(
            f"down_blocks.{i}",
            (
                *_resnets(num_in, num_out, stack.resnets_per_level),
                *(conv("downsamplers.0.conv", num_out, num_out) if i < len(inputs) - 1 else ()),
            ),
        )
    )
    return within(
        "encoder",
        (
            *conv("conv_in", first, 3),
            *levels,
            *_middle(last),
            *norm("conv_norm_out", last, has_bias=True),
            *conv("conv_out", 2 * stack.latent_channels, last),
        ),
    )


def decoder_specs(stack: Stack) -> Specs:
    """Every tensor of diffusers' Decoder."""
    outputs = stack.channels[::-1]
    inputs = (outputs[0], *outputs[:-1])
    levels = tuple(
        spec
        for i, (num_in, num_out) in enumerate(zip(inputs, outputs, strict=True))
        for spec in within(
            f"up_blocks.{i}",
            (
                *_resnets(num_in, num_out, stack.resnets_per_level + 1),
                *(conv("upsamplers.0.conv", num_out, num_out) if i < len(outputs) - 1 else ()),
            ),
        )
    )
    return within(
        "decoder",
        (
            *conv("conv_in", outputs[0], stack.latent_channels),
            *levels,
            *_middle(outputs[0]),
            *norm("conv_norm_out", outputs[-1], has_bias=True),
            *conv("conv_out", 3, outputs[-1]),
        ),
    )


def _resnet(num_in: int, num_out: int) -> Specs:
    return (
        *norm("norm1", num_in, has_bias=True),
        *conv("conv1", num_out, num_in),
        *norm("norm2", num_out, has_bias=True),
        *conv("conv2", num_out, num_out),
        *(conv("conv_shortcut", num_out, num_in, kernel=1) if num_in != num_out else ()),
    )


def _resnets(num_in: int, num_out: int, count: int) -> Specs:
    return tuple(
        spec
        for i in range(count)
        for spec in within(f"resnets.{i}", _resnet(num_in if i == 0 else num_out, num_out))
    )


_QKV = ("to_q", "to_k", "to_v", "to_out.0")


def _middle(width: int) -> Specs:
    attention = (
        *norm("group_norm", width, has_bias=True),
        *(spec for name in _QKV for spec in linear(name, width, width, "attention", has_bias=True)),
    )
    return within(
        "mid_block",
        (*within("attentions.0", attention), *_resnets(width, width, 2)),
    )


def single_file_rules(specs: Sequence[TensorSpec], num_levels: int) -> tuple[Rule, ...]:
    """One rule for each tensor: where it lies in BFL's ae.safetensors."""
    return tuple(_rule(spec, dict(_renames(num_levels))) for spec in specs)


def _renames(num_levels: int) -> Iterator[tuple[str, str]]:
    """Prefixes of module paths, ours -> theirs, the longer ones first."""
    for i in range(num_levels):
        level = num_levels - 1 - i
        yield f"encoder.down_blocks.{i}.resnets.", f"encoder.down.{i}.block."
        yield f"encoder.down_blocks.{i}.downsamplers.0.", f"encoder.down.{i}.downsample."
        yield f"decoder.up_blocks.{i}.resnets.", f"decoder.up.{level}.block."
        yield f"decoder.up_blocks.{i}.upsamplers.0.", f"decoder.up.{level}.upsample."
    for half in ("encoder", "decoder"):
        for i in range(2):
            yield f"{half}.mid_block.resnets.{i}.", f"{half}.mid.block_{i + 1}."
        theirs = ("norm", "q", "k", "v", "proj_out")
        for ours, name in zip(("group_norm", *_QKV), theirs, strict=True):
            yield f"{half}.mid_block.attentions.0.{ours}.", f"{half}.mid.attn_1.{name}."
        yield f"{half}.conv_norm_out.", f"{half}.norm_out."
    # in Flux.2's file these belong to encoder and decoder
    yield "quant_conv.", "encoder.quant_conv."
    yield "post_quant_conv.", "decoder.post_quant_conv."


def _rule(spec: TensorSpec, renames: dict[str, str]) -> Rule:
    theirs = spec.name
    for ours_prefix, their_prefix in renames.items():
        if spec.name.startswith(ours_prefix):
            theirs = their_prefix + spec.name.removeprefix(ours_prefix)
            break
    theirs = theirs.replace(".conv_shortcut.", ".nin_shortcut.")
    return Rule(spec.name, theirs, ones=2 if spec.is_linear else 0)


def encode_mean(model: nn.Module, pixels_BCHW: Tensor) -> Tensor:
    """Mean of the posterior, fp32, before any normalisation."""
    import torch

    at = model.get_parameter("encoder.conv_in.weight")
    codec: Any = model
    with torch.no_grad():
        mean: Tensor = codec.encode(pixels_BCHW.to(at.device, at.dtype)).latent_dist.mode()
    # convolutions may answer channels-last, and other strides make other bits downstream
    return mean.float().contiguous()


def decode_pixels(model: nn.Module, latent_BCHW: Tensor) -> Tensor:
    """Pixels of a latent that is no longer normalised, fp32."""
    import torch

    at = model.get_parameter("decoder.conv_in.weight")
    codec: Any = model
    with torch.no_grad():
        pixels: Tensor = codec.decode(
            latent_BCHW.to(at.device, at.dtype).contiguous(), return_dict=False
        )[0]
    return pixels.float()
