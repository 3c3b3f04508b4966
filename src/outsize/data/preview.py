"""What a person looks at before training: a document's text in spans that are trained and spans that are not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outsize.data.documents import Documents


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens that are all trained, or all not; text: as the tokenizer decodes them."""

    text: str
    num_tokens: int
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """One document. place: its file and row."""

    place: str
    set_index: int
    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        """Of the document."""
        return sum(span.num_tokens for span in self.spans)

    @property
    def num_trained(self) -> int:
        """Tokens to be predicted."""
        return sum(span.num_tokens for span in self.spans if span.is_trained)


def previews(documents: Documents, tokenizer: Any, count: int) -> tuple[Preview, ...]:
    """Up to `count` documents of each set, at even distances."""
    found = []
    for set_index in range(len(documents.choice.sets)):
        held = list(documents.of_set(set_index))
        for i in range(min(count, len(held))):
            file, index = held[i * len(held) // min(count, len(held))]
            spans = spans_of(tokenizer, *file.document(index))
            found.append(Preview(file.place(index), set_index, spans))
    return tuple(found)


def spans_of(
    tokenizer: Any, tokens: NDArray[np.int32], trained: NDArray[np.bool_]
) -> tuple[Span, ...]:
    """The spans of a document, (N,) tokens; their texts put together are the document's as it is decoded whole."""
    turns = np.flatnonzero(np.diff(trained)) + 1
    bounds = [0, *turns.tolist(), len(tokens)]
    spans, before = [], 0
    for begin, end in pairwise(bounds):
        # Decoded from the document's beginning, since a tokenizer may treat the first word of a text unlike others.
        text = tokenizer.decode(
            tokens[:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if end > begin:
            spans.append(Span(text[before:], end - begin, bool(trained[begin])))
        before = len(text)
    return tuple(spans)
