"""Qwen3.5 and 3.6, 27B, as language models: three layers of linear attention to one of full attention, which is gated.

Linear attention is computed by `_gated_delta.py` where there is no cache, since upstream's own torch code cannot keep packed
documents apart; generating goes through upstream's. Its two thin projections (`in_proj_a`, `in_proj_b`, one number a head)
decide how fast a state decays, so they stay in 16 bits and no adapter attaches to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from outsize.base.table import TensorSpec
from outsize.families._language import FULL, DecoderLanguage, renew_rotary_
from outsize.families._plain_decoder import gated_mlp
from outsize.families._specs import Specs, linear, norm, within
from outsize.families.protocol import LayerKind

if TYPE_CHECKING:
    from torch import Tensor, nn

LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One size. period: every period-th layer has full attention; linear_*: heads of linear attention and their width.

    taps: tokens that its convolution joins. sections: how positions of pictures share the rotary angles.
    """

    width: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    linear_key_heads: int
    linear_value_heads: int
    linear_dim: int
    period: int
    vocabulary: int
    max_positions: int
    sections: tuple[int, int, int]
    taps: int = 4

    @property
    def is_tied(self) -> bool:
        """Not in these sizes."""
        return False

    @property
    def softcap(self) -> None:
        """Logits are as they are."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Linear attention, and full attention in every period-th layer."""
        heads, dim = self.linear_value_heads, self.linear_dim
        linear_kind = LayerKind(
            LINEAR, heads * dim, 0, state=heads * dim * dim, key_width=heads * dim
        )
        full = LayerKind(
            FULL,
            self.num_heads * self.head_dim,
            2 * self.num_kv_heads * self.head_dim,
            self.head_dim,
        )
        return tuple(
            full if (i + 1) % self.period == 0 else linear_kind for i in range(self.num_layers)
        )

    @property
    def depth(self) -> dict[str, int]:
        """Blocks by kind."""
        return {"layer": self.num_layers}

    def at_depth(self, counts: tuple[int, ...], conditioners: str) -> Self:
        """The same widths with fewer layers."""
        if conditioners:
            raise ValueError("it has no text encoder of its own")
        return replace(self, num_layers=counts[0])


VARIANTS: dict[str, Variant] = {
    "27b": Variant(
        width=5120,
        inner=17408,
        num_layers=64,
        num_heads=24,
        num_kv_heads=4,
        head_dim=256,
        linear_key_heads=16,
        linear_value_heads=48,
        linear_dim=128,
        period=4,
        vocabulary=248320,
        max_positions=262144,
        sections=(11, 11, 10),
    ),
    "tiny": Variant(
        width=64,
        inner=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        linear_key_heads=2,
        linear_value_heads=4,
        linear_dim=16,
        period=2,
        vocabulary=640,
        max_positions=512,
        sections=(2, 1, 1),
    ),
}


def _linear_attention(row: Variant) -> Specs:
    keys, values = row.linear_key_heads * row.linear_dim, row.linear_value_heads * row.linear_dim
    heads, mixed = row.linear_value_heads, 2 * keys + values
    return (
        TensorSpec("dt_bias", (heads,), "linear_attention"),
        TensorSpec("A_log", (heads,), "linear_attention"),
        TensorSpec("conv1d.weight", (mixed, 1, row.taps), "conv"),
        *norm("norm", row.linear_dim),
        *linear("out_proj", row.width, values, "linear_attention"),
        *linear("in_proj_qkv", mixed, row.width, "linear_attention"),
        *linear("in_proj_z", values, row.width, "linear_attention"),
        TensorSpec("in_proj_b.weight", (heads, row.width), "linear_attention"),
        TensorSpec("in_proj_a.weight", (heads, row.width), "linear_attention"),
    )


def _full_attention(row: Variant, kind: LayerKind) -> Specs:
    keys = kind.kv_width // 2
    return (
        *linear("q_proj", 2 * kind.width, row.width, "attention"),  # queries, and as wide a gate
        *linear("k_proj", keys, row.width, "attention"),
        *linear("v_proj", keys, row.width, "attention"),
        *linear("o_proj", row.width, kind.width, "attention"),
        *norm("q_norm", row.head_dim),
        *norm("k_norm", row.head_dim),
    )


def _layer(row: Variant, kind: LayerKind) -> Specs:
    mixer = (
        within("linear_attn", _linear_attention(row))
        if kind.is_recurrent
        else within("self_attn", _full_attention(row, kind))
    )
    return (
        *mixer,
        *gated_mlp(row.width, row.inner),
        *norm("input_layernorm", row.width),
        *norm("post_attention_layernorm", row.width),
    )


def _values(row: Variant) -> dict[str, Any]:
    return {
        "hidden_size": row.width,
        "intermediate_size": row.inner,
        "num_hidden_layers": row.num_layers,
        "num_attention_heads": row.num_heads,
        "num_key_value_heads": row.num_kv_heads,
        "head_dim": row.head_dim,
        "layer_types": [kind.name for kind in row.kinds],
        "linear_num_key_heads": row.linear_key_heads,
        "linear_num_value_heads": row.linear_value_heads,
        "linear_key_head_dim": row.linear_dim,
        "linear_value_head_dim": row.linear_dim,
        "linear_conv_kernel_dim": row.taps,
        "vocab_size": row.vocabulary,
        "max_position_embeddings": row.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": list(row.sections),
        },
        "tie_word_embeddings": False,
    }


def _make(config: dict[str, Any]) -> nn.Module:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from outsize.families._attention import register

    model: Any = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config, attn_implementation=register()))
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            _replace_mixing_(layer.linear_attn)
    made: nn.Module = model
    return made


def _replace_mixing_(mixer: Any) -> None:
    """Give linear attention our forward where there is no cache, and leave it upstream's where there is one."""
    upstream = mixer.forward

    def forward(hidden_states: Tensor, **others: Any) -> Tensor:
        from outsize.families._gated_delta import mix_tokens

        # its name until transformers 5.17, and from 5.18 on
        if others.get("cache_params") is not None or others.get("cache") is not None:
            with_cache: Tensor = upstream(hidden_states, **others)
            return with_cache
        return mix_tokens(mixer, hidden_states, others.get("segments"))

    mixer.forward = forward


def _rotate(decoder: Any, hidden_BTD: Tensor, position_ids_BT: Tensor) -> Mapping[str, Any]:
    # text has the same position in time, height and width
    positions_3BT = position_ids_BT[None].expand(3, -1, -1)
    table = decoder.rotary_emb(hidden_BTD, positions_3BT)
    return {FULL: table, LINEAR: table}


plugin = DecoderLanguage(
    name="qwen3_5",
    rows=VARIANTS,
    layer=_layer,
    values=_values,
    upstream="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    make=_make,
    rotate=_rotate,
    fill_=renew_rotary_,
    left_out=("visual", "mtp"),
)
