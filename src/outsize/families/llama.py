"""Llama's architecture as a language model: SmolLM2-135M, whose head is its token table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outsize.families._language import DecoderLanguage, renew_rotary_, rotate_alike
from outsize.families._plain_decoder import PlainDecoder, plain_layer, plain_values

if TYPE_CHECKING:
    from torch import nn

VARIANTS: dict[str, PlainDecoder] = {
    "smollm2-135m": PlainDecoder(
        width=576,
        inner=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocabulary=49152,
        rope_theta=100_000.0,
        max_positions=8192,
        is_tied=True,
    ),
    "tiny": PlainDecoder(
        width=64,
        inner=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocabulary=640,
        rope_theta=100_000.0,
        max_positions=512,
        is_tied=True,
    ),
}


def _make(config: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    from outsize.families._attention import register

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**config, attn_implementation=register()))
    return model


plugin = DecoderLanguage(
    name="llama",
    rows=VARIANTS,
    layer=plain_layer,
    values=plain_values,
    upstream="LlamaForCausalLM",
    model_type="llama",
    make=_make,
    rotate=rotate_alike,
    fill_=renew_rotary_,
)
