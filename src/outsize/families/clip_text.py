"""CLIP ViT-L/14's text model, which gives Flux.1 one pooled vector for a caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from outsize.base.layout import Layout
from outsize.base.table import ShapeTable
from outsize.families._build import build_on_meta, row_of
from outsize.families._specs import Specs, embedding, linear, norm, within
from outsize.families._text import token_ids
from outsize.families.protocol import Published

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One size; max_length is the number of positions."""

    width: int
    inner: int
    num_layers: int
    num_heads: int
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


VARIANTS: dict[str, Variant] = {
    "large": Variant(
        width=768, inner=3072, num_layers=12, num_heads=12, vocabulary=49408, max_length=77
    ),
    "tiny": Variant(width=64, inner=128, num_layers=2, num_heads=2, vocabulary=640, max_length=64),
}


def _layer(row: Variant) -> Specs:
    names = ("k_proj", "v_proj", "q_proj", "out_proj")
    return (
        *(
            spec
            for name in names
            for spec in linear(
                f"self_attn.{name}", row.width, row.width, "attention", has_bias=True
            )
        ),
        *norm("layer_norm1", row.width, has_bias=True),
        *linear("mlp.fc1", row.inner, row.width, "mlp", has_bias=True),
        *linear("mlp.fc2", row.width, row.inner, "mlp", has_bias=True),
        *norm("layer_norm2", row.width, has_bias=True),
    )


@dataclass(frozen=True, slots=True)
class ClipText:
    """The pooled text encoder of Flux.1."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the sizes."""
        return tuple(VARIANTS)

    def table(self, variant: str) -> ShapeTable:
        """Every tensor of CLIPTextModel."""
        row = row_of("clip_text", VARIANTS, variant)
        return ShapeTable(
            (
                *embedding("embeddings.token_embedding", row.vocabulary, row.width),
                *embedding("embeddings.position_embedding", row.max_length, row.width),
                *(
                    spec
                    for i in range(row.num_layers)
                    for spec in within(f"encoder.layers.{i}", _layer(row), block=i)
                ),
                *norm("final_layer_norm", row.width, has_bias=True),
            )
        )

    def layouts(self, variant: str) -> tuple[Layout, ...]:
        """Published below `text_model.`, which transformers 5 leaves out; whole checkpoints of ComfyUI have more above it."""
        row_of("clip_text", VARIANTS, variant)
        prefixes = ("text_model.", "", "text_encoders.clip_l.transformer.text_model.")
        return (Layout("transformers", prefixes=prefixes),)

    def block_paths(self, variant: str) -> tuple[str, ...]:
        """The layers."""
        row = row_of("clip_text", VARIANTS, variant)
        return tuple(f"encoder.layers.{i}" for i in range(row.num_layers))

    def config(self, variant: str) -> dict[str, Any]:
        """What upstream's config.json says."""
        row = row_of("clip_text", VARIANTS, variant)
        return {
            "hidden_size": row.width,
            "intermediate_size": row.inner,
            "num_hidden_layers": row.num_layers,
            "num_attention_heads": row.num_heads,
            "vocab_size": row.vocabulary,
            "max_position_embeddings": row.max_length,
            "projection_dim": row.width,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
            "bos_token_id": 0,
            # as published: 2 means that the state is read at the largest token id, which is the end token's
            "eos_token_id": 2,
        }

    def published(self, variant: str) -> Published:
        """CLIPTextModel."""
        config = {"model_type": "clip_text_model", **self.config(variant)}
        return Published("transformers", "CLIPTextModel", config)

    def build(self, variant: str) -> nn.Module:
        """CLIPTextModel on meta."""
        from transformers import CLIPTextConfig, CLIPTextModel

        config = self.config(variant)
        return build_on_meta(lambda: CLIPTextModel(CLIPTextConfig(**config)))

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Position ids 0, 1, 2, ..."""
        import torch

        embeddings: Any = model.embeddings
        num_positions = embeddings.position_embedding.num_embeddings
        embeddings.position_ids = torch.arange(num_positions, device=device).expand((1, -1))

    def tokenize(self, variant: str, tokenizer: Path, texts: Sequence[str]) -> dict[str, Tensor]:
        """input_ids (B, T), padded and cut to the number of positions."""
        return token_ids(tokenizer, texts, row_of("clip_text", VARIANTS, variant).max_length)

    def encode(
        self, variant: str, model: nn.Module, tokens: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """{"pooled": (B, D)}. As upstream, no mask is given: padding is seen only after the end token."""
        import torch

        row_of("clip_text", VARIANTS, variant)
        device = model.get_parameter("embeddings.token_embedding.weight").device
        with torch.no_grad():
            return {"pooled": model(tokens["input_ids"].to(device)).pooler_output}


plugin = ClipText()
