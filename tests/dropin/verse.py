"""A language family that this project does not have: Qwen3's architecture, whose queries and keys are normed by head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outsize.families._language import DecoderLanguage, renew_rotary_, rotate_alike
from outsize.families._plain_decoder import PlainDecoder, plain_layer, plain_values
from outsize.families._specs import Specs, norm

if TYPE_CHECKING:
    from torch import nn

    from outsize.families.protocol import LayerKind

ROWS = {
    "tiny": PlainDecoder(
        width=64,
        inner=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocabulary=640,
        rope_theta=10_000.0,
        max_positions=512,
        is_tied=False,
    ),
}


def _layer(row: PlainDecoder, kind: LayerKind) -> Specs:
    by_head = (f"self_attn.{name}_norm" for name in "qk")
    return (
        *plain_layer(row, kind),
        *(spec for name in by_head for spec in norm(name, row.head_dim)),
    )


def make(config: dict[str, Any]) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**config, attn_implementation="sdpa"))
    return model


plugin = DecoderLanguage(
    name="verse",
    rows=ROWS,
    layer=_layer,
    values=plain_values,
    upstream="Qwen3ForCausalLM",
    model_type="qwen3",
    make=make,
    rotate=rotate_alike,
    fill_=renew_rotary_,
)
