"""Tiny tokenizers on disk, of the classes and files that the real repositories hold.

Every one of them keeps different captions apart: bytes or letters are tokens of their own, and the words of the chat
templates are whole tokens, so that a caption still fits beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from outsize.families.mistral3_text import SYSTEM_MESSAGE

MISTRAL_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- set words = message['content'] if message['content'] is string"
    " else message['content'] | map(attribute='text') | join('') %}"
    "{%- if message['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + words + '[/SYSTEM_PROMPT]' }}"
    "{%- elif message['role'] == 'user' %}{{- '[INST]' + words + '[/INST]' }}"
    "{%- else %}{{- words + eos_token }}{%- endif %}{%- endfor %}"
)
QWEN_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
_CAPTION_WORDS = " a photo of an the red green blue yellow cat dog bird picture"


@cache
def _byte_level(special: tuple[str, ...], sentences: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences * 2, trainer)
    text: str = tokenizer.to_str()
    return text


def _write_json(folder: Path, name: str, value: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_mistral(folder: Path) -> None:
    """A byte-level tokenizer padded on the left, with Mistral's control tokens and chat template."""
    special = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>")
    special += ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    _write_json(
        folder, "tokenizer.json", json.loads(_byte_level(special, (SYSTEM_MESSAGE, _CAPTION_WORDS)))
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "padding_side": "left",
        "model_max_length": 512,
    }
    _write_json(folder, "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(MISTRAL_TEMPLATE, encoding="utf-8")


def write_qwen(folder: Path) -> None:
    """A byte-level tokenizer padded on the right, with Qwen3's turn tokens and chat template."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    made = json.loads(_byte_level(special, (_CAPTION_WORDS, "user assistant system")))
    _write_json(folder, "tokenizer.json", made)
    _write_json(folder, "vocab.json", made["model"]["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in made["model"]["merges"])
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 512,
    }
    _write_json(folder, "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE, encoding="utf-8")


def write_clip(folder: Path) -> None:
    """CLIP's vocab.json and merges.txt without merges: letters, and letters that end a word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # the end token has the largest id: CLIP's pooled state is read there
    pieces = [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    _write_json(folder, "vocab.json", {piece: i for i, piece in enumerate(pieces)})
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 64,
    }
    _write_json(folder, "tokenizer_config.json", config)


def write_t5(folder: Path) -> None:
    """T5's tokenizer.json: a unigram model of printable ASCII that ends every text with </s>."""
    pieces = ["<pad>", "</s>", "<unk>", "\N{LOWER ONE EIGHTH BLOCK}", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.Unigram([(piece, -2.0) for piece in pieces], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    _write_json(folder, "tokenizer.json", json.loads(tokenizer.to_str()))
    config = {
        "tokenizer_class": "T5Tokenizer",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "extra_ids": 0,
        "model_max_length": 512,
    }
    _write_json(folder, "tokenizer_config.json", config)


TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "mistral3_text": write_mistral,
    "qwen3_text": write_qwen,
    "clip_text": write_clip,
    "t5_text": write_t5,
}
