"""Qwen3 as the text encoder of Flux.2-klein: hidden states 9, 18 and 27 of 36 layers, thinking switched off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outsize.families._text import Decoder, DecoderText

if TYPE_CHECKING:
    from torch import Tensor, nn

_PUBLISHED: dict[str, Any] = {
    "num_layers": 36,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocabulary": 151936,
    "rope_theta": 1_000_000.0,
    "max_positions": 40960,
    "max_length": 512,
    "read": (9, 18, 27),
}

VARIANTS: dict[str, Decoder] = {
    "4b": Decoder(width=2560, inner=9728, **_PUBLISHED),
    "8b": Decoder(width=4096, inner=12288, **_PUBLISHED),
    # the small base that ships with this package; its config.json is the truth
    "teaching": Decoder(
        width=128,
        inner=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocabulary=8192,
        rope_theta=10_000.0,
        max_positions=512,
        max_length=20,
        read=(1, 2, 3),
    ),
    "tiny": Decoder(
        width=64,
        inner=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        vocabulary=640,
        rope_theta=1_000_000.0,
        max_positions=512,
        max_length=64,
        read=(1, 2, 3),
    ),
}


def _publish(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "Qwen3ForCausalLM", {"model_type": "qwen3", **config}


def _make(config: dict[str, Any]) -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    model: nn.Module = Qwen3Model(Qwen3Config(**config))
    return model


def _tokenize(tokenizer: Any, texts: Sequence[str], max_length: int) -> Mapping[str, Tensor]:
    """As Flux2KleinPipeline: the reply is begun, and no thinking is asked for."""
    worded = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        for text in texts
    ]
    batch: Mapping[str, Tensor] = tokenizer(
        worded, return_tensors="pt", padding="max_length", truncation=True, max_length=max_length
    )
    return batch


plugin = DecoderText(
    name="qwen3_text",
    rows=VARIANTS,
    prefixes=("model.", ""),
    has_head_norms=True,
    norm_epsilon=1e-6,
    publish=_publish,
    make=_make,
    tokenize_batch=_tokenize,
)
