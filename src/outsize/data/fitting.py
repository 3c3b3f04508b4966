"""Documents made to fit the window, those kept from training, and what a person should know of both.

What is held out follows from a document's own tokens: neither the seed nor the order of files changes it, and a document
that is there twice is never on both sides.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outsize.base.errors import SourceError
from outsize.data.conversations import Columns
from outsize.data.documents import Documents, File
from outsize.recipes.text import LongSamples, TextChoice, TextSet

_MOST_NAMED = 10


class Pieces(NamedTuple):
    """What of a set goes into rows, (P,) each: whole documents, or what the window leaves of them.

    file: index among all files. document: index in the file. begin, end: tokens in the file. num_trained: labels.
    """

    file: NDArray[np.int64]
    document: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    num_trained: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each."""
        return self.end - self.begin

    def take(self, which: NDArray[Any]) -> Pieces:
        """Some of them, by mask or index."""
        return Pieces(*(one[which] for one in self))


@dataclass(frozen=True, slots=True)
class SetFacts:
    """Counts over a set, before anything is held out.

    num_tokens, num_trained: of all documents as they are read; a document's first token is never trained.
    num_long: documents longer than the window; num_lost: of their tokens, those that truncation leaves out.
    num_silent: documents without a label in the window, which are not trained on.
    num_turns, num_dropped, num_open: assistant turns, those the template leaves out, those it sets no end to.
    num_without_bos, num_several_bos, num_eos: documents without a beginning token, with several, and end tokens, 0 where
    the tokenizer has none. num_held_out: documents kept from training.
    """

    name: str
    kind: str
    num_documents: int
    num_tokens: int
    num_trained: int
    num_long: int
    num_lost: int
    num_silent: int
    num_turns: int
    num_dropped: int
    num_open: int
    num_without_bos: int
    num_several_bos: int
    num_eos: int
    num_held_out: int

    @property
    def trained_share(self) -> float:
        """Trained tokens of all tokens, 0..1."""
        return self.num_trained / max(self.num_tokens, 1)

    def describe(self) -> dict[str, Any]:
        """As JSON values, for journals and reports."""
        return asdict(self) | {"trained_share": self.trained_share}

    def sentences(self, choice: TextChoice) -> list[str]:
        """What is not as one would expect, a sentence each."""
        all_of = f"of {self.num_documents} samples"
        said = {
            f"{self.num_long} {all_of} are longer than the window of {choice.window} tokens and are cut there, so that "
            f"{self.num_lost} tokens are not seen": self.num_lost,
            f"{self.num_silent} {all_of} have no trained token within the window and are passed over": self.num_silent,
            f"{self.num_dropped} of {self.num_turns} assistant turns are left out by the chat template": self.num_dropped,
            f"{self.num_open} of {self.num_turns} assistant turns have no end in the chat template, so that stopping is "
            "not learned from them": self.num_open,
            f"{self.num_several_bos} {all_of} hold the beginning token more than once": self.num_several_bos,
            "nothing is held out, since all samples are the same": choice.held_out > 0
            and not self.num_held_out,
        }
        return [f"{self.name}: {sentence}" for sentence, is_so in said.items() if is_so]


@dataclass(frozen=True, slots=True)
class Fitted:
    """The pieces of one set: trained on and held out."""

    trained: Pieces
    held_out: Pieces
    facts: SetFacts


def fit(documents: Documents) -> tuple[Fitted, ...]:
    """Cut, split or refuse what is longer than the window, and hold documents out; for each set.

    Raises: SourceError naming samples that are too long where the recipe refuses them, and sets of which nothing, or by
    accident everything, would be trained.
    """
    choice = documents.choice
    return tuple(
        _fit_set(documents, index, choice, item, documents.kinds[index])
        for index, item in enumerate(choice.sets)
    )


def _fit_set(
    documents: Documents, index: int, choice: TextChoice, item: TextSet, columns: Columns
) -> Fitted:
    files = [(i, one) for i, one in enumerate(documents.files) if one.set_index == index]
    mode = choice.long_samples or ("split" if columns.kind == "text" else "truncate")
    if mode == "refuse":
        _refuse_long([file for _, file in files], choice.window)
    parts = [_cut(i, file, choice.window, mode) for i, file in files]
    pieces = Pieces(*(np.concatenate(one) for one in zip(*parts, strict=True)))
    pieces = pieces.take(pieces.num_trained > 0)
    is_held = _held_out(documents, pieces, item, choice)
    held_out = pieces.take(is_held)
    num_held = len(np.unique(held_out.file * _MOST_DOCUMENTS + held_out.document))
    lengths = np.concatenate([np.diff(file.begins) for _, file in files])
    num_kept = len(np.unique(pieces.file * _MOST_DOCUMENTS + pieces.document))
    turns = np.concatenate([file.turns for _, file in files]).sum(axis=0)
    begin = (
        None if documents.bos == documents.eos else documents.bos
    )  # one token for both tells nothing
    bos = np.concatenate([_count(file, begin) for _, file in files])
    facts = SetFacts(
        name=item.path.name,
        kind=columns.kind,
        num_documents=len(lengths),
        num_tokens=int(lengths.sum()),
        num_trained=sum(int(file.trained.sum()) for _, file in files),
        num_long=int((lengths > choice.window).sum()),
        num_lost=int(np.maximum(lengths - choice.window, 0).sum()) if mode == "truncate" else 0,
        num_silent=len(lengths) - num_kept,
        num_turns=int(turns[0]),
        num_dropped=int(turns[1]),
        num_open=int(turns[2]),
        num_without_bos=int((bos == 0).sum()) if begin is not None else 0,
        num_several_bos=int((bos > 1).sum()),
        num_eos=sum(int(_count(file, documents.eos).sum()) for _, file in files),
        num_held_out=num_held,
    )
    _check_share(facts, item, columns)
    return Fitted(pieces.take(~is_held), held_out, facts)


_MOST_DOCUMENTS = 1 << 40  # of a file: makes one number of a file's and a document's


def _check_share(facts: SetFacts, item: TextSet, columns: Columns) -> None:
    """Raises: SourceError when nothing, or by accident everything, would be trained."""
    if facts.num_documents == 0:
        raise SourceError(f"{item.path}: holds no sample")
    if facts.num_silent == facts.num_documents:
        raise SourceError(
            f"{item.path}: none of its {facts.num_tokens} tokens would be trained within the window, so nothing would be "
            "learned; look at them with `outsize data preview`, and at train_on and the window"
        )
    is_meant = columns.kind == "text" or item.train_on == "everything"
    if not is_meant and facts.num_trained == facts.num_tokens - facts.num_documents:
        raise SourceError(
            f"{item.path}: all of its {facts.num_tokens} tokens would be trained, prompts as well, so the chat template's "
            "marks are wrong; correct them, or set `train_on: everything` if this is meant"
        )


def _refuse_long(files: list[File], window: int) -> None:
    faults = []
    for file in files:
        lengths = np.diff(file.begins)
        faults += [
            f"  {file.place(int(i))}: {lengths[i]} tokens" for i in np.flatnonzero(lengths > window)
        ]
    if faults:
        more = len(faults) - _MOST_NAMED
        listed = "\n".join(faults[:_MOST_NAMED]) + (f"\n  and {more} more" if more > 0 else "")
        noun = "sample is" if len(faults) == 1 else "samples are"
        raise SourceError(
            f"{len(faults)} {noun} longer than the window of {window} tokens; widen it, or set long_samples to truncate "
            f"or split:\n{listed}"
        )


def _cut(index: int, file: File, window: int, mode: LongSamples) -> Pieces:
    """All pieces of a file, those without labels too.

    Pieces of a split document share one token: the last of one is the first of the next, where it is not predicted
    again; so each token is predicted exactly once.
    """
    begins, ends = file.begins[:-1], file.begins[1:]
    numbers = np.arange(len(begins))
    if mode == "split":
        counts = np.maximum(-(-(ends - begins - 1) // (window - 1)), 1)
        numbers = np.repeat(numbers, counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        begins = begins[numbers] + (np.arange(len(numbers)) - firsts) * (window - 1)
        ends = ends[numbers]
    ends = np.minimum(ends, begins + window)
    before = np.concatenate([[0], np.cumsum(file.trained, dtype=np.int64)])
    return Pieces(
        np.full(len(begins), index, dtype=np.int64),
        numbers.astype(np.int64),
        begins,
        ends,
        before[ends] - before[np.minimum(begins + 1, ends)],
    )


def _held_out(
    documents: Documents, pieces: Pieces, item: TextSet, choice: TextChoice
) -> NDArray[np.bool_]:
    """Which pieces are held out: those of the documents whose digests are the smallest, as many as the recipe says."""
    if item.is_held_out:
        return np.ones(len(pieces.file), dtype=np.bool_)
    digests = np.zeros(len(pieces.file), dtype=np.uint64)
    for i, (file, document) in enumerate(zip(pieces.file, pieces.document, strict=True)):
        if i and file == pieces.file[i - 1] and document == pieces.document[i - 1]:
            digests[i] = digests[i - 1]
            continue
        tokens, _ = documents.files[file].document(document)
        hashed = hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8).digest()
        digests[i] = int.from_bytes(hashed, "little")
    different = np.unique(digests)
    if not choice.held_out or len(different) < 2:
        return np.zeros(len(pieces.file), dtype=np.bool_)
    wanted = max(1, min(round(choice.held_out * len(different)), choice.held_out_limit))
    is_held: NDArray[np.bool_] = digests <= different[min(wanted, len(different) - 1) - 1]
    return is_held


def _count(file: File, token: int | None) -> NDArray[np.int64]:
    """How often a token is in each document."""
    if token is None:
        return np.zeros(len(file.rows), dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(file.tokens == token, dtype=np.int64)])
    counts: NDArray[np.int64] = before[file.begins[1:]] - before[file.begins[:-1]]
    return counts
