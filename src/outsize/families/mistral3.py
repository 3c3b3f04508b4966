"""Mistral-Small-24B as a language model: 3.1 and 3.2, published with a vision tower, and 3 (2501), for text alone.

The two differ in nothing but rotary frequencies and length, which no shape shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outsize.families._language import DecoderLanguage, renew_rotary_, rotate_alike
from outsize.families._plain_decoder import PlainDecoder, plain_layer, plain_values

if TYPE_CHECKING:
    from torch import nn

_SMALL: dict[str, Any] = {
    "width": 5120,
    "inner": 32768,
    "num_layers": 40,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocabulary": 131072,
    "is_tied": False,
}

VARIANTS: dict[str, PlainDecoder] = {
    "small-24b": PlainDecoder(**_SMALL, rope_theta=1_000_000_000.0, max_positions=131072),
    "small-24b-2501": PlainDecoder(**_SMALL, rope_theta=100_000_000.0, max_positions=32768),
    "tiny": PlainDecoder(
        width=64,
        inner=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocabulary=640,
        rope_theta=1_000_000_000.0,
        max_positions=512,
        is_tied=False,
    ),
}


def _values(row: PlainDecoder) -> dict[str, Any]:
    # upstream's default is the window of the first Mistral
    return {**plain_values(row), "sliding_window": None}


def _make(config: dict[str, Any]) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    from outsize.families._attention import register

    model: nn.Module = MistralForCausalLM(MistralConfig(**config, attn_implementation=register()))
    return model


plugin = DecoderLanguage(
    name="mistral3",
    rows=VARIANTS,
    layer=plain_layer,
    values=_values,
    upstream="MistralForCausalLM",
    model_type="mistral",
    make=_make,
    rotate=rotate_alike,
    fill_=renew_rotary_,
    left_out=("vision_tower", "multi_modal_projector"),
)
