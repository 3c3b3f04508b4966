"""Gemma 4 as a language model: 31B, dense, over transformers' class for text.

Most layers see a window; every sixth, and the last, sees all, with heads twice as wide and fewer keys, which serve as values
too: it has no v_proj. Each layer's output is multiplied by a number of its own (`layer_scalar`, a buffer in the files), the
token vectors by the root of their width, and logits are capped. The head is the token table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from outsize.base.table import TensorSpec
from outsize.families._language import FULL, DecoderLanguage, renew_rotary_
from outsize.families._plain_decoder import gated_mlp
from outsize.families._specs import Specs, linear, norm
from outsize.families.protocol import LayerKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One size. period: every period-th layer sees all tokens; full_heads, full_dim: its key heads and their width."""

    width: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    full_kv_heads: int
    full_dim: int
    window: int
    period: int
    vocabulary: int
    max_positions: int
    softcap: float

    @property
    def is_tied(self) -> bool:
        """In every size."""
        return True

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Windows, and all tokens in every period-th layer and the last."""
        sliding = LayerKind(
            SLIDING,
            self.num_heads * self.head_dim,
            2 * self.num_kv_heads * self.head_dim,
            self.head_dim,
            window=self.window,
        )
        full = LayerKind(
            FULL,
            self.num_heads * self.full_dim,
            2 * self.full_kv_heads * self.full_dim,
            self.full_dim,
        )
        last = self.num_layers - 1
        return tuple(
            full if (i + 1) % self.period == 0 or i == last else sliding
            for i in range(self.num_layers)
        )

    @property
    def depth(self) -> dict[str, int]:
        """Blocks by kind."""
        return {"layer": self.num_layers}

    def at_depth(self, counts: tuple[int, ...], conditioners: str) -> Self:
        """The same widths with fewer layers, the last of which sees all tokens."""
        if conditioners:
            raise ValueError("it has no text encoder of its own")
        return replace(self, num_layers=counts[0])


VARIANTS: dict[str, Variant] = {
    "31b": Variant(
        width=5376,
        inner=21504,
        num_layers=60,
        num_heads=32,
        num_kv_heads=16,
        head_dim=256,
        full_kv_heads=4,
        full_dim=512,
        window=1024,
        period=6,
        vocabulary=262144,
        max_positions=262144,
        softcap=30.0,
    ),
    "tiny": Variant(
        width=64,
        inner=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        full_kv_heads=1,
        full_dim=32,
        window=8,
        period=2,
        vocabulary=640,
        max_positions=512,
        softcap=30.0,
    ),
}


def _layer(row: Variant, kind: LayerKind) -> Specs:
    is_full = kind.name == FULL
    keys = kind.kv_width // 2
    head_dim = row.full_dim if is_full else row.head_dim
    values = () if is_full else linear("self_attn.v_proj", keys, row.width, "attention")
    return (
        TensorSpec("layer_scalar", (1,), "buffer"),
        *linear("self_attn.q_proj", kind.width, row.width, "attention"),
        *norm("self_attn.q_norm", head_dim),
        *norm("self_attn.k_norm", head_dim),
        *linear("self_attn.k_proj", keys, row.width, "attention"),
        *values,
        *linear("self_attn.o_proj", row.width, kind.width, "attention"),
        *gated_mlp(row.width, row.inner),
        *norm("input_layernorm", row.width),
        *norm("post_attention_layernorm", row.width),
        *norm("pre_feedforward_layernorm", row.width),
        *norm("post_feedforward_layernorm", row.width),
    )


def _values(row: Variant) -> dict[str, Any]:
    return {
        "hidden_size": row.width,
        "intermediate_size": row.inner,
        "num_hidden_layers": row.num_layers,
        "num_attention_heads": row.num_heads,
        "num_key_value_heads": row.num_kv_heads,
        "head_dim": row.head_dim,
        "num_global_key_value_heads": row.full_kv_heads,
        "global_head_dim": row.full_dim,
        "attention_k_eq_v": True,
        "layer_types": [kind.name for kind in row.kinds],
        "sliding_window": row.window,
        "vocab_size": row.vocabulary,
        "vocab_size_per_layer_input": row.vocabulary,
        "hidden_size_per_layer_input": 0,  # only the small sizes have vectors for each layer
        "num_kv_shared_layers": 0,
        "max_position_embeddings": row.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
        "final_logit_softcapping": row.softcap,
        "tie_word_embeddings": True,
    }


def _make(config: dict[str, Any]) -> nn.Module:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    from outsize.families._attention import register

    model: Any = Gemma4ForCausalLM(Gemma4TextConfig(**config, attn_implementation=register()))
    for layer in model.model.layers:
        # upstream keeps keys and values of the last layers for a drafting model, graph and all; nobody here reads them
        layer.self_attn.store_full_length_kv = False
    made: nn.Module = model
    return made


def _rotate(decoder: Any, hidden_BTD: Tensor, position_ids_BT: Tensor) -> Mapping[str, Any]:
    kinds = sorted(set(decoder.config.layer_types))
    return {kind: decoder.rotary_emb(hidden_BTD, position_ids_BT, kind) for kind in kinds}


def _fill_(decoder: Any, device: torch.device) -> None:
    import torch

    renew_rotary_(decoder, device)
    table = decoder.embed_tokens
    where = device if table.weight.is_meta else table.weight.device
    table.embed_scale = torch.tensor(table.scalar_embed_scale, device=where)


plugin = DecoderLanguage(
    name="gemma4",
    rows=VARIANTS,
    layer=_layer,
    values=_values,
    upstream="Gemma4ForCausalLM",
    model_type="gemma4_text",
    make=_make,
    rotate=_rotate,
    fill_=_fill_,
    left_out=("vision_tower", "embed_vision", "audio_tower", "embed_audio"),
)
