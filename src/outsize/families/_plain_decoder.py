"""Decoders whose layers are all alike: full attention and a gated feed-forward, as Llama began them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from outsize.families._language import FULL
from outsize.families._specs import Specs, linear, norm
from outsize.families.protocol import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDecoder:
    """One size of such a decoder."""

    width: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float
    max_positions: int
    is_tied: bool

    @property
    def softcap(self) -> None:
        """Logits are as they are."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """All alike."""
        kind = LayerKind(
            FULL,
            self.num_heads * self.head_dim,
            2 * self.num_kv_heads * self.head_dim,
            self.head_dim,
        )
        return (kind,) * self.num_layers

    @property
    def depth(self) -> dict[str, int]:
        """Blocks by kind."""
        return {"layer": self.num_layers}

    def at_depth(self, counts: tuple[int, ...], conditioners: str) -> Self:
        """The same widths with fewer layers."""
        if conditioners:
            raise ValueError("it has no text encoder of its own")
        return replace(self, num_layers=counts[0])


def plain_layer(row: PlainDecoder, kind: LayerKind) -> Specs:
    """The tensors of one layer, in upstream's order."""
    return (
        *attention(row, kind),
        *gated_mlp(row.width, row.inner),
        *norm("input_layernorm", row.width),
        *norm("post_attention_layernorm", row.width),
    )


def attention(row: PlainDecoder, kind: LayerKind) -> Specs:
    """Projections without biases."""
    keys = kind.kv_width // 2
    return (
        *linear("self_attn.q_proj", kind.width, row.width, "attention"),
        *linear("self_attn.k_proj", keys, row.width, "attention"),
        *linear("self_attn.v_proj", keys, row.width, "attention"),
        *linear("self_attn.o_proj", row.width, kind.width, "attention"),
    )


def gated_mlp(width: int, inner: int) -> Specs:
    """Gate, up and down."""
    return (
        *linear("mlp.gate_proj", inner, width, "mlp"),
        *linear("mlp.up_proj", inner, width, "mlp"),
        *linear("mlp.down_proj", width, inner, "mlp"),
    )


def plain_values(row: PlainDecoder) -> dict[str, Any]:
    """What config.json says of it; their epsilon is the same in all published sizes."""
    return {
        "hidden_size": row.width,
        "intermediate_size": row.inner,
        "num_hidden_layers": row.num_layers,
        "num_attention_heads": row.num_heads,
        "num_key_value_heads": row.num_kv_heads,
        "head_dim": row.head_dim,
        "vocab_size": row.vocabulary,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": row.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": row.rope_theta},
        "tie_word_embeddings": row.is_tied,
    }
