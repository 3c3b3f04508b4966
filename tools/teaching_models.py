"""The parts of the teaching base, their exact sizes, and a plain Euler sampler for them.

Legend: B batch, T text tokens, S picture tokens, C channels of a token, H W latent height and width.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from transformers import Qwen3Config, Qwen3ForCausalLM

TEXT_WIDTH = 128
TEXT_LAYERS = (1, 2, 3)
LATENT_CHANNELS = 12
TOKENS_SIDE = 6  # 48 px / 4 (autoencoder) / 2 (patches)
TOKEN_CHANNELS = 4 * LATENT_CHANNELS

# 2 + 6 blocks of width 192: 4-bit groups of 64 fit every input width (192, 576, 768), and bf16 stays below 15 MB.
TRANSFORMER = {
    "patch_size": 1,
    "in_channels": TOKEN_CHANNELS,
    "num_layers": 2,
    "num_single_layers": 6,
    "attention_head_dim": 48,
    "num_attention_heads": 4,
    "joint_attention_dim": TEXT_WIDTH * len(TEXT_LAYERS),
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (12, 12, 12, 12),
    "rope_theta": 2000,
    "guidance_embeds": False,
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (32, 64, 96),
    "layers_per_block": 1,
    "latent_channels": LATENT_CHANNELS,
    "norm_num_groups": 16,
    "sample_size": 48,
}
TEXT = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


@dataclass(slots=True)
class Parts:
    """The trained parts, as diffusers and transformers objects."""

    transformer: Flux2Transformer2DModel
    text_encoder: Qwen3ForCausalLM
    vae: AutoencoderKLFlux2


def build_parts(vectors: torch.Tensor) -> Parts:
    """Fresh parts from the current torch seed; the embedding table is vectors and frozen."""
    text_encoder = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(vectors), **TEXT))
    table = text_encoder.get_input_embeddings().weight
    table.data.copy_(vectors)
    text_encoder.requires_grad_(requires_grad=False)
    _pass_through_(text_encoder)
    transformer = Flux2Transformer2DModel(**TRANSFORMER)
    _soften_start_(transformer)
    return Parts(transformer, text_encoder, AutoencoderKLFlux2(**VAE))


def _pass_through_(text_encoder: Qwen3ForCausalLM) -> None:
    """Make every layer add nothing, so that all hidden states are the word vectors.

    A word then has one vector in every caption, and the transformer alone composes them. With a trained encoder a caption
    of several hundred became one state, and a new word in it ("pouting cat") was a state nobody had seen: adapters
    reached 0.3 to 0.6 of held-out cats, whatever their recipe.
    """
    for layer in text_encoder.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)


def load_parts(folder: Path) -> Parts:
    """The parts of a written base, in fp32."""
    return Parts(
        Flux2Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32),
        Qwen3ForCausalLM.from_pretrained(folder / "text_encoder", dtype=torch.float32),
        AutoencoderKLFlux2.from_pretrained(folder / "vae", torch_dtype=torch.float32),
    )


def write_parts(parts: Parts, folder: Path) -> None:
    """Write the diffusers layout in bf16, but for tokenizer and model index."""
    for name in ("transformer", "text_encoder", "vae"):
        part = getattr(parts, name).to("cpu", torch.bfloat16)
        part.save_pretrained(folder / name)
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")


def _soften_start_(transformer: Flux2Transformer2DModel) -> None:
    """Zero the gates' and the output's weights, so that training starts from the identity (adaLN-zero)."""
    for linear in (
        transformer.double_stream_modulation_img.linear,
        transformer.double_stream_modulation_txt.linear,
        transformer.single_stream_modulation.linear,
        transformer.norm_out.linear,
        transformer.proj_out,
    ):
        torch.nn.init.zeros_(linear.weight)


def position_ids(num_text: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Text and picture positions as Flux2KleinPipeline numbers them, (T, 4) and (S, 4)."""
    zero, one = torch.arange(1), torch.arange(TOKENS_SIDE)
    text = torch.cartesian_prod(zero, zero, zero, torch.arange(num_text))
    picture = torch.cartesian_prod(zero, one, one, zero)
    return text.to(device), picture.to(device)


def prompt_states(
    text_encoder: torch.nn.Module, ids_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Hidden states 1, 2, 3 side by side, (B, T, 3 x width): what klein does with 9, 18, 27."""
    states = text_encoder(
        input_ids=ids_BT, attention_mask=mask_BT, output_hidden_states=True, use_cache=False
    ).hidden_states
    return torch.cat([states[k] for k in TEXT_LAYERS], dim=-1)


def velocity(
    transformer: torch.nn.Module,
    noisy_BSC: torch.Tensor,
    states_BTD: torch.Tensor,
    sigma_B: torch.Tensor,
) -> torch.Tensor:
    """The transformer's velocity at noise level sigma, (B, S, C)."""
    text_ids, picture_ids = position_ids(states_BTD.shape[1], noisy_BSC.device)
    return transformer(
        hidden_states=noisy_BSC,
        encoder_hidden_states=states_BTD,
        timestep=sigma_B,
        img_ids=picture_ids,
        txt_ids=text_ids,
        return_dict=False,
    )[0]


@torch.no_grad()
def sample(
    transformer: torch.nn.Module,
    states_BTD: torch.Tensor,
    noise_BSC: torch.Tensor,
    *,
    steps: int,
    shift: float = 1.0,
    guidance: float = 1.0,
    empty_1TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Euler steps from noise to picture tokens, with the scheduler's sigmas (1 to 1/steps, then 0).

    Guidance above 1 moves each velocity away from that of the empty prompt, and doubles the work.
    """
    sigmas = torch.linspace(1.0, 1 / steps, steps, dtype=torch.float64)
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    levels = [*sigmas.tolist(), 0.0]
    tokens = noise_BSC
    for now, after in itertools.pairwise(levels):
        sigma_B = torch.full((len(tokens),), now, device=tokens.device)
        guess = velocity(transformer, tokens, states_BTD, sigma_B)
        if guidance != 1.0 and empty_1TD is not None:
            away = velocity(transformer, tokens, empty_1TD.expand(len(tokens), -1, -1), sigma_B)
            guess = away + guidance * (guess - away)
        tokens = tokens + (after - now) * guess
    return tokens


def patchify(latent_BCHW: torch.Tensor) -> torch.Tensor:
    """Fold 2 x 2 patches into channels, (B, 4C, H/2, W/2), in diffusers' order."""
    num, channels, height, width = latent_BCHW.shape
    folded = latent_BCHW.view(num, channels, height // 2, 2, width // 2, 2).permute(
        0, 1, 3, 5, 2, 4
    )
    return folded.reshape(num, channels * 4, height // 2, width // 2)


def unpatchify(folded_BCHW: torch.Tensor) -> torch.Tensor:
    """Inverse of `patchify`."""
    num, channels, height, width = folded_BCHW.shape
    latent = folded_BCHW.reshape(num, channels // 4, 2, 2, height, width).permute(0, 1, 4, 2, 5, 3)
    return latent.reshape(num, channels // 4, height * 2, width * 2)


def _latent_scale(vae: AutoencoderKLFlux2) -> tuple[torch.Tensor, torch.Tensor]:
    mean = vae.bn.running_mean.view(1, -1, 1, 1).float()
    std = (vae.bn.running_var.view(1, -1, 1, 1).float() + vae.config.batch_norm_eps).sqrt()
    return mean, std


@torch.no_grad()
def encode_pictures(
    vae: AutoencoderKLFlux2, pictures_NHWC: torch.Tensor, *, chunk: int = 512
) -> torch.Tensor:
    """Picture tokens (N, S, C) of uint8 pictures, normalised by the autoencoder's batch-norm statistics."""
    mean, std = _latent_scale(vae)
    rows = []
    for part in pictures_NHWC.split(chunk):
        pixels = part.to(mean.device).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        folded = (patchify(vae.encode(pixels).latent_dist.mode()) - mean) / std
        rows.append(folded.flatten(2).transpose(1, 2))
    return torch.cat(rows)


@torch.no_grad()
def decode_pictures(
    vae: AutoencoderKLFlux2, tokens_NSC: torch.Tensor, *, chunk: int = 512
) -> torch.Tensor:
    """uint8 pictures (N, 48, 48, 3) of picture tokens."""
    mean, std = _latent_scale(vae)
    rows = []
    for part in tokens_NSC.split(chunk):
        folded = part.transpose(1, 2).unflatten(2, (TOKENS_SIDE, TOKENS_SIDE))
        pixels = vae.decode(unpatchify(folded * std + mean)).sample
        rows.append(((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1))
    return torch.cat(rows).cpu()
