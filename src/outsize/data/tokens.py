"""Samples to tokens, each text tokenised once, and which of its tokens are trained.

Characters are matched to tokens by the offsets that fast tokenizers give. A token is trained when it holds a character
of a span, as transformers' own masks have it. Every document begins with the token that begins texts exactly once, where
the tokenizer sets one at all: many templates write it themselves, and then it is not set again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outsize.base.errors import SourceError
from outsize.data.conversations import Chat, Plain, Sample
from outsize.data.templates import ChatTemplate, Worded
from outsize.recipes.text import TrainOn


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens (N,) int32 of one sample; trained (N,) bool: whether a token is to be predicted from those before it.

    num_turns, num_dropped, num_open: see Worded.
    """

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    num_turns: int
    num_dropped: int
    num_open: int


class Tokenising:
    """A tokenizer with what it adds to texts."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None) -> None:
        """template: None where no sample is a conversation.

        Raises: SourceError when the tokenizer cannot say which characters its tokens hold.
        """
        if not tokenizer.is_fast:
            raise SourceError(
                f"the tokenizer {tokenizer.name_or_path} is a slow one, which does not tell where its tokens lie in a "
                "text; a folder with tokenizer.json gives the fast one"
            )
        self._tokenizer = tokenizer
        self._template = template
        self.sets_bos = _sets_bos(tokenizer)
        self.bos: int | None = tokenizer.bos_token_id
        self.eos: int | None = tokenizer.eos_token_id

    def word(self, sample: Sample, train_on: TrainOn) -> Worded:
        """The text of a sample. Raises: SourceError as ChatTemplate.word."""
        if isinstance(sample, Chat):
            assert self._template is not None, "conversations need a template"
            return self._template.word(sample, train_on)
        return _word_plain(sample, train_on)

    def documents(self, texts: Sequence[Worded]) -> Iterator[Document]:
        """The documents of texts, which are tokenised together on all processors."""
        if not texts:
            return
        batch = self._tokenizer(
            [one.text for one in texts],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # a text longer than the model's positions is dealt with where it is packed
        )
        rows = zip(texts, batch["input_ids"], batch["offset_mapping"], strict=True)
        for worded, ids, offsets in rows:
            yield self._document(worded, ids, offsets)

    def _document(self, worded: Worded, ids: list[int], offsets: list[tuple[int, int]]) -> Document:
        trained = tokens_in(offsets, worded.spans)
        tokens = np.array(ids, dtype=np.int32)
        if self.sets_bos and tokens[:1].tolist() != [self.bos]:
            tokens = np.concatenate([np.array([self.bos], dtype=np.int32), tokens])
            trained = np.concatenate([[False], trained])
        if worded.appends_end and self.eos is not None and tokens[-1:].tolist() != [self.eos]:
            tokens = np.concatenate([tokens, np.array([self.eos], np.int32)])
            trained = np.concatenate([trained, [True]])
        trained[:1] = False  # nothing comes before it
        return Document(tokens, trained, worded.num_turns, worded.num_dropped, worded.num_open)


def tokens_in(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> NDArray[np.bool_]:
    """Which tokens hold a character of a span.

    offsets: of each token its first character and that behind its last. Some tokenizers trim blanks from them, and some
    split a character among tokens; so a token reaches back to the end of the one before it, if that is further.
    """
    ends = np.array([end for _, end in offsets], dtype=np.int64)
    begins = np.array([begin for begin, _ in offsets], dtype=np.int64)
    if len(ends):
        begins[0] = 0
        begins[1:] = np.minimum(begins[1:], ends[:-1])
    held = np.zeros(len(ends), dtype=np.bool_)
    for begin, end in spans:
        if end > begin:
            held |= (ends > begin) & (begins < end)
    return held


def _word_plain(sample: Plain, train_on: TrainOn) -> Worded:
    text = sample.prompt + sample.text
    begin = 0 if train_on == "everything" else len(sample.prompt)
    return Worded(text, ((begin, len(text)),), appends_end=True)


def _sets_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer sets its beginning token before every text by itself."""
    first: list[int] = tokenizer("a", add_special_tokens=True)["input_ids"][:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
