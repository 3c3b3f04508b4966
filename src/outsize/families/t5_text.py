"""T5 v1.1 XXL's encoder, which gives Flux.1 the embedding of every token of a caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from outsize.base.layout import Layout, Rule
from outsize.base.table import ShapeTable
from outsize.families._build import build_on_meta, row_of
from outsize.families._specs import Specs, embedding, linear, norm, within
from outsize.families._text import token_ids
from outsize.families.protocol import Published

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_NUM_BUCKETS = 32  # of relative positions

_TOKENS = "encoder.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One size; max_length is the number of tokens a caption is padded and cut to."""

    width: int
    inner: int
    num_layers: int
    num_heads: int
    head_dim: int
    vocabulary: int
    max_length: int

    @property
    def depth(self) -> dict[str, int]:
        """Blocks by kind."""
        return {"layer": self.num_layers}

    def at_depth(self, counts: tuple[int, ...], conditioners: str) -> Self:
        """The same widths with fewer layers."""
        if conditioners:
            raise ValueError("it has no text encoder of its own")
        return replace(self, num_layers=counts[0])


_XXL: dict[str, int] = {
    "width": 4096,
    "inner": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "head_dim": 64,
    "vocabulary": 32128,
}

VARIANTS: dict[str, Variant] = {
    "xxl": Variant(**_XXL, max_length=512),
    "xxl-256": Variant(**_XXL, max_length=256),  # as schnell was trained (its model card)
    "tiny": Variant(
        width=64,
        inner=128,
        num_layers=2,
        num_heads=2,
        head_dim=32,
        vocabulary=640,
        max_length=64,
    ),
}


def _layer(row: Variant, *, has_positions: bool) -> Specs:
    inner = row.num_heads * row.head_dim
    positions = "layer.0.SelfAttention.relative_attention_bias"
    return (
        *linear("layer.0.SelfAttention.q", inner, row.width, "attention"),
        *linear("layer.0.SelfAttention.k", inner, row.width, "attention"),
        *linear("layer.0.SelfAttention.v", inner, row.width, "attention"),
        *linear("layer.0.SelfAttention.o", row.width, inner, "attention"),
        *(embedding(positions, _NUM_BUCKETS, row.num_heads) if has_positions else ()),
        *norm("layer.0.layer_norm", row.width),
        *linear("layer.1.DenseReluDense.wi_0", row.inner, row.width, "mlp"),
        *linear("layer.1.DenseReluDense.wi_1", row.inner, row.width, "mlp"),
        *linear("layer.1.DenseReluDense.wo", row.width, row.inner, "mlp"),
        *norm("layer.1.layer_norm", row.width),
    )


@dataclass(frozen=True, slots=True)
class T5Text:
    """The sequence text encoder of Flux.1."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the sizes."""
        return tuple(VARIANTS)

    def table(self, variant: str) -> ShapeTable:
        """Every tensor of T5EncoderModel; the token table, which upstream lists twice, once."""
        row = row_of("t5_text", VARIANTS, variant)
        return ShapeTable(
            (
                *embedding("encoder.embed_tokens", row.vocabulary, row.width),
                *(
                    spec
                    for i in range(row.num_layers)
                    for spec in within(
                        f"encoder.block.{i}", _layer(row, has_positions=i == 0), block=i
                    )
                ),
                *norm("encoder.final_layer_norm", row.width),
            )
        )

    def layouts(self, variant: str) -> tuple[Layout, ...]:
        """Files hold the token table as `shared`, or under the encoder, or twice; ComfyUI's whole checkpoints below a path."""
        names = {spec.name: spec.name for spec in self.table(variant)} | {_TOKENS: "shared.weight"}
        rules = tuple(Rule(ours, theirs) for ours, theirs in names.items())
        prefixes = ("", "text_encoders.t5xxl.transformer.")
        return Layout("transformers", rules, prefixes), Layout("encoder-only", prefixes=prefixes)

    def block_paths(self, variant: str) -> tuple[str, ...]:
        """The layers."""
        row = row_of("t5_text", VARIANTS, variant)
        return tuple(f"encoder.block.{i}" for i in range(row.num_layers))

    def config(self, variant: str) -> dict[str, Any]:
        """What upstream's config.json says."""
        row = row_of("t5_text", VARIANTS, variant)
        return {
            "d_model": row.width,
            "d_ff": row.inner,
            "d_kv": row.head_dim,
            "num_layers": row.num_layers,
            "num_heads": row.num_heads,
            "vocab_size": row.vocabulary,
            "feed_forward_proj": "gated-gelu",
            "relative_attention_num_buckets": _NUM_BUCKETS,
            "relative_attention_max_distance": 128,
            "layer_norm_epsilon": 1e-6,
            "tie_word_embeddings": False,
        }

    def published(self, variant: str) -> Published:
        """T5EncoderModel."""
        config = {"model_type": "t5", **self.config(variant)}
        return Published("transformers", "T5EncoderModel", config)

    def build(self, variant: str) -> nn.Module:
        """T5EncoderModel on meta, without the second name of its token table."""
        from transformers import T5Config, T5EncoderModel

        config = self.config(variant)
        model = build_on_meta(lambda: T5EncoderModel(T5Config(**config)))
        del model.shared
        return model

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: relative positions are computed in every forward."""

    def tokenize(self, variant: str, tokenizer: Path, texts: Sequence[str]) -> dict[str, Tensor]:
        """input_ids (B, T), padded and cut to the variant's length."""
        return token_ids(tokenizer, texts, row_of("t5_text", VARIANTS, variant).max_length)

    def encode(
        self, variant: str, model: nn.Module, tokens: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """{"text": (B, T, D)}. As upstream, no mask is given: padding is seen."""
        import torch

        row_of("t5_text", VARIANTS, variant)
        device = model.get_parameter(_TOKENS).device
        with torch.no_grad():
            return {"text": model(tokens["input_ids"].to(device))[0]}


plugin = T5Text()
