"""Mistral-Small-3.1-24B as the text encoder of Flux.2-dev: hidden states 10, 20 and 30 of 40 layers.

Only the language model is built: neither vision tower nor head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outsize.families._text import Decoder, DecoderText

if TYPE_CHECKING:
    from torch import Tensor, nn

VARIANTS: dict[str, Decoder] = {
    "small-24b": Decoder(
        width=5120,
        inner=32768,
        num_layers=40,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocabulary=131072,
        rope_theta=1_000_000_000.0,
        max_positions=131072,
        max_length=512,
        read=(10, 20, 30),
    ),
    "tiny": Decoder(
        width=64,
        inner=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        vocabulary=640,
        rope_theta=1_000_000_000.0,
        max_positions=512,
        max_length=64,
        read=(1, 2, 3),
    ),
}

# The words the model was trained with, the line break included (BFL's flux2 repository, system_messages.py).
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing"
    " on object relationships, object\nattribution and actions without speculation."
)


def _publish(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = {"model_type": "mistral", **config}
    return "Mistral3ForConditionalGeneration", {"model_type": "mistral3", "text_config": text}


def _make(config: dict[str, Any]) -> nn.Module:
    from transformers import MistralConfig, MistralModel

    model: nn.Module = MistralModel(MistralConfig(**config, sliding_window=None))
    return model


def _conversation(text: str) -> list[dict[str, Any]]:
    # "[IMG]" would be read as the place of a picture
    worded = (("system", SYSTEM_MESSAGE), ("user", text.replace("[IMG]", "")))
    return [{"role": role, "content": [{"type": "text", "text": words}]} for role, words in worded]


def _tokenize(tokenizer: Any, texts: Sequence[str], max_length: int) -> Mapping[str, Tensor]:
    """As Flux2Pipeline: no reply is begun."""
    batch: Mapping[str, Tensor] = tokenizer.apply_chat_template(
        [_conversation(text) for text in texts],
        add_generation_prompt=False,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=max_length,
    )
    return batch


plugin = DecoderText(
    name="mistral3_text",
    rows=VARIANTS,
    # as published (and in the first files of Flux.2), as transformers 5 writes it, as a language model alone
    prefixes=("language_model.model.", "model.language_model.", "model.", ""),
    has_head_norms=False,
    norm_epsilon=1e-5,
    publish=_publish,
    make=_make,
    tokenize_batch=_tokenize,
)
