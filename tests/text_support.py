"""Tiny tokenizers with chat templates like the real ones, each also with marks of what the assistant writes.

In the templates below, what stands between [[ and ]] is what the model generates: without the brackets it is the template
as models have it, with `{% generation %}` in their place it is what transformers' own masks are made from.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# The turn's end is not the end of text, content is trimmed, the assistant has another name.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant', 'system'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{% if m.role == 'assistant' %}[[{{ m.content | trim }}{{ '<turn|>' }}]]"
    "{% else %}{{ m.content | trim }}{{ '<turn|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n<|channel>thought\\n<channel|>' }}{% endif %}"
)
# Thinking of all turns but those behind the last question is dropped, the last turn always has some.
QWEN = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] | trim if '</think>' in m.content else '' %}"
    "{% set said = (m.content.split('</think>')[-1]).lstrip('\\n') %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\\n' }}[[{{ thought + '\\n</think>\\n\\n' + said + '<|im_end|>' }}]]"
    "{% else %}[[{{ said + '<|im_end|>' }}]]{% endif %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
# No prompt for an answer; roles must take turns; the system message stands in the last question.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='', last=0) %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}{% endif %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' }}[[{{ m.content + eos_token }}]]{% endif %}{% endfor %}"
)
LLAMA = (
    "{% for m in messages %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{% if m.role == 'assistant' %}[[{{ m.content | trim + '<|eot_id|>' }}]]"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Nothing of it begins alike in a longer conversation: it counts messages in front, ends the last turn with another token,
# cuts earlier answers to their first line and puts earlier questions into brackets.
ADVERSARIAL = (
    "{{ bos_token ~ messages | length ~ ':' }}{% for m in messages %}"
    "{{ '<|start|>' + m.role + ('' if loop.last else '!') + '<|message|>' }}"
    "{% if m.role == 'assistant' %}"
    "[[{{ m.content if loop.last else m.content.split('\\n')[0] }}{{ '<|return|>' if loop.last else '<|end|>' }}]]"
    "{% else %}{{ m.content if loop.revindex < 3 else '(' + m.content | trim + ')' }}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}"
)
TEMPLATES = {
    "gemma": GEMMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "adversarial": ADVERSARIAL,
}
SPECIAL = (
    "<s>", "</s>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>",
)  # fmt: skip
_SENTENCES = (
    "the quick brown fox says yes and no, user assistant system model",
    "answers are words with spaces between them and thinking before",
)

WORDS = st.sampled_from(
    [
        " ",
        "\n",
        "\n\n",
        "  ",
        "yes",
        "No",
        "fox,",
        "\N{SNOWMAN}",
        "\N{LATIN SMALL LETTER E WITH ACUTE}",
        "<b>",
        "<think>",
        "</think>",
        "<turn|>",
        "[/INST]",
        "<|im_end|>",
        "assistant\n",
        ":",
        ".",
    ]
)
CONTENTS = st.lists(WORDS, min_size=1, max_size=8).map("".join)
ANSWERS = CONTENTS.filter(lambda text: bool(text.split("</think>")[-1].split("\n")[0].strip()))


@st.composite
def conversations(draw: Any) -> list[dict[str, str]]:
    """A system message or none, then one to four questions with answers."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(CONTENTS)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": "q" + draw(CONTENTS)})
        thought = draw(st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>yes</think>"]))
        messages.append({"role": "assistant", "content": thought + draw(ANSWERS)})
    return messages


def plain(template: str) -> str:
    """The template without marks."""
    return template.replace("[[", "").replace("]]", "")


def marked(template: str) -> str:
    """The template with `{% generation %}` around what the model writes."""
    return template.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")


@cache
def _bytes_model() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    text: str = tokenizer.to_str()
    return text


@cache
def _pieces_model() -> str:
    """Pieces with blanks in front, unknown characters as bytes, as SentencePiece models have it."""
    letters = sorted({*"".join(_SENTENCES), *map(chr, range(33, 127)), "\n", "\N{LOWER ONE EIGHTH BLOCK}"} - {" "})  # fmt: skip
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL])
    text: str = tokenizer.to_str()
    return text


def tokenizer_of(
    template: str | None, *, pieces: bool = False, trims: bool = False, sets_bos: bool = False
) -> Any:
    """A fast tokenizer. trims: its offsets leave blanks out. sets_bos: it begins every text with <s> by itself."""
    made = Tokenizer.from_str(_pieces_model() if pieces else _bytes_model())
    if trims:
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    if sets_bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def write_lines(path: Path, rows: list[Any]) -> Path:
    """A JSON lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def chat_row(*turns: str) -> dict[str, Any]:
    """Questions and answers in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}
