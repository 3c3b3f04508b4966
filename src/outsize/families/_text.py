"""What the text encoders share: tokenizers from local folders, and decoders read at some of their layers.

A decoder is cut above the last layer that is read, and its final norm is an identity: `hidden_states[k]` of the whole
model is the plain output of layer k - 1, which a cut model would give normed.

Dimensions: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from outsize.base.errors import SourceError
from outsize.base.layout import Layout
from outsize.base.table import ShapeTable
from outsize.families._build import build_on_meta, row_of
from outsize.families._specs import Specs, embedding, linear, norm, within
from outsize.families.protocol import Published

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a local folder; nothing is fetched.

    Raises: SourceError when the folder is missing or holds no tokenizer.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise SourceError(f"there is no tokenizer folder {folder}")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{folder} holds no tokenizer that transformers can read: {error}"
        ) from error


def token_ids(folder: Path, texts: Sequence[str], max_length: int) -> dict[str, Tensor]:
    """{"input_ids": (B, max_length)}: padded and cut, without a mask.

    Raises: SourceError as load_tokenizer.
    """
    batch = load_tokenizer(folder)(
        list(texts),
        padding="max_length",
        max_length=max_length,
        truncation=True,
        return_tensors="pt",
    )
    return {"input_ids": batch["input_ids"]}


def chat_tokenizer(folder: Path) -> Any:
    """A tokenizer that has a chat template.

    Raises: SourceError when it has none.
    """
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        raise SourceError(
            f"{folder} has no chat template (chat_template.jinja), and captions cannot be worded"
            " as the model was trained without one; take the whole folder from the model's repository"
        )
    return tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One size of a decoder. read: k for which hidden state k is read, k >= 1 counting layers from below."""

    width: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float
    max_positions: int
    max_length: int
    read: tuple[int, int, int]

    @property
    def num_read_layers(self) -> int:
        """Layers that are loaded."""
        return max(self.read)

    @property
    def depth(self) -> dict[str, int]:
        """Blocks by kind."""
        return {"layer": self.num_layers}

    def at_depth(self, counts: tuple[int, ...], conditioners: str) -> Self:
        """The same widths with fewer layers, read at the same fractions of the depth (a layer may be read twice)."""
        if conditioners:
            raise ValueError("it has no text encoder of its own")
        first, second, third = (max(1, k * counts[0] // self.num_layers) for k in self.read)
        return replace(self, num_layers=counts[0], read=(first, second, third))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderText:
    """A text encoder family over a decoder of transformers.

    prefixes: where its files keep the decoder. publish: (upstream's class, config.json) from the decoder's values.
    has_head_norms: query and key are normed per head. make: upstream's
    decoder from config values. tokenize_batch: (tokenizer, texts, max_length) -> what upstream's pipeline makes.
    """

    name: str
    rows: Mapping[str, Decoder]
    prefixes: tuple[str, ...]
    has_head_norms: bool
    norm_epsilon: float
    publish: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]
    make: Callable[[dict[str, Any]], nn.Module]
    tokenize_batch: Callable[[Any, Sequence[str], int], Mapping[str, Tensor]]

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the sizes."""
        return tuple(self.rows)

    def table(self, variant: str) -> ShapeTable:
        """Token table and the layers that are read; neither norm nor head above them."""
        row = row_of(self.name, self.rows, variant)
        layer = _layer(row, has_head_norms=self.has_head_norms)
        return ShapeTable(
            (
                *embedding("embed_tokens", row.vocabulary, row.width),
                *(
                    spec
                    for i in range(row.num_read_layers)
                    for spec in within(f"layers.{i}", layer, block=i)
                ),
            )
        )

    def layouts(self, variant: str) -> tuple[Layout, ...]:
        """The names of transformers, below one of the paths under which they are published."""
        row_of(self.name, self.rows, variant)
        return (Layout("transformers", prefixes=self.prefixes),)

    def block_paths(self, variant: str) -> tuple[str, ...]:
        """The layers."""
        row = row_of(self.name, self.rows, variant)
        return tuple(f"layers.{i}" for i in range(row.num_read_layers))

    def config(self, variant: str) -> dict[str, Any]:
        """What upstream's config.json says of the whole decoder."""
        row = row_of(self.name, self.rows, variant)
        return {
            "hidden_size": row.width,
            "intermediate_size": row.inner,
            "num_hidden_layers": row.num_layers,
            "num_attention_heads": row.num_heads,
            "num_key_value_heads": row.num_kv_heads,
            "head_dim": row.head_dim,
            "vocab_size": row.vocabulary,
            "rms_norm_eps": self.norm_epsilon,
            "max_position_embeddings": row.max_positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": row.rope_theta},
        }

    def published(self, variant: str) -> Published:
        """The whole decoder: the layers above those that are read too, and the norm; neither head nor vision tower."""
        row = row_of(self.name, self.rows, variant)
        layer = _layer(row, has_head_norms=self.has_head_norms)
        above = range(row.num_read_layers, row.num_layers)
        unread = tuple(spec for i in above for spec in within(f"layers.{i}", layer))
        upstream, config = self.publish(self.config(variant))
        return Published("transformers", upstream, config, (*unread, *norm("norm", row.width)))

    def build(self, variant: str) -> nn.Module:
        """The decoder without what lies above the last layer that is read."""
        from torch import nn

        row = row_of(self.name, self.rows, variant)
        config = self.config(variant) | {"num_hidden_layers": row.num_read_layers}
        model = build_on_meta(lambda: self.make(config))
        model.norm = nn.Identity()
        return model

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Rotary frequencies, computed on the CPU as upstream does, whatever the device."""
        rotary: Any = model.rotary_emb
        model.rotary_emb = type(rotary)(config=model.config).to(device)

    def tokenize(self, variant: str, tokenizer: Path, texts: Sequence[str]) -> dict[str, Tensor]:
        """input_ids and attention_mask (B, T), padded to the variant's length."""
        row = row_of(self.name, self.rows, variant)
        batch = self.tokenize_batch(chat_tokenizer(tokenizer), texts, row.max_length)
        return {key: batch[key] for key in ("input_ids", "attention_mask")}

    def encode(
        self, variant: str, model: nn.Module, tokens: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """{"text": (B, T, 3 D)}: the states that are read, side by side."""
        row = row_of(self.name, self.rows, variant)
        return {"text": read_states(model, row.read, tokens)}


def read_states(model: nn.Module, read: Sequence[int], tokens: Mapping[str, Tensor]) -> Tensor:
    """Run a decoder and put the outputs of some layers side by side: (B, T, len(read) D)."""
    import torch

    states: dict[int, Tensor] = {}

    def keep(k: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            states[k] = out[0] if isinstance(out, tuple) else out

        return hook

    handles = [model.get_submodule(f"layers.{k - 1}").register_forward_hook(keep(k)) for k in read]
    device = model.get_parameter("embed_tokens.weight").device
    try:
        with torch.no_grad():
            model(
                input_ids=tokens["input_ids"].to(device),
                attention_mask=tokens["attention_mask"].to(device),
                use_cache=False,
            )
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([states[k] for k in read], dim=-1)


def _layer(row: Decoder, *, has_head_norms: bool) -> Specs:
    queries, keys = row.num_heads * row.head_dim, row.num_kv_heads * row.head_dim
    head_norms = ("self_attn.q_norm", "self_attn.k_norm") if has_head_norms else ()
    return (
        *linear("self_attn.q_proj", queries, row.width, "attention"),
        *linear("self_attn.k_proj", keys, row.width, "attention"),
        *linear("self_attn.v_proj", keys, row.width, "attention"),
        *linear("self_attn.o_proj", row.width, queries, "attention"),
        *(spec for name in head_norms for spec in norm(name, row.head_dim)),
        *linear("mlp.gate_proj", row.inner, row.width, "mlp"),
        *linear("mlp.up_proj", row.inner, row.width, "mlp"),
        *linear("mlp.down_proj", row.width, row.inner, "mlp"),
        *norm("input_layernorm", row.width),
        *norm("post_attention_layernorm", row.width),
    )
