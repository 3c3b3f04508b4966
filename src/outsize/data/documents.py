"""All documents of a data set, tokenised: read from the cache where a file and everything that shapes it is the same.

A file is one entry of the cache, so that a file added to a folder costs only itself. Reading looks at every row before
any work starts and reports all faults at once, with file and line; a file with faults is not cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outsize.base.errors import SourceError, StoreBroken
from outsize.base.files import file_digest
from outsize.base.progress import OnProgress
from outsize.data.cache import ContentCache
from outsize.data.conversations import Columns, columns_of, sample_of
from outsize.data.templates import ChatTemplate, Worded
from outsize.data.text_files import find_files, place_of, read_rows
from outsize.data.tokens import Document, Tokenising
from outsize.recipes.text import TextChoice, TextSet

CODE_VERSION = 1  # raise it when the same file must lead to other documents
_AT_ONCE = 256  # rows worded and tokenised together
_MOST_NAMED = 20  # faults


@dataclass(frozen=True, slots=True)
class File:
    """One file's documents.

    tokens (N,) int32 and trained (N,) bool of all documents in a row; begins (D + 1,) int64: where each begins, and the
    end; rows (D,) int64: the number of its row; turns (D, 3) int64: assistant turns, those left out, those without end.
    """

    path: Path
    set_index: int
    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    begins: NDArray[np.int64]
    rows: NDArray[np.int64]
    turns: NDArray[np.int64]

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Tokens and trained of one document."""
        begin, end = self.begins[index], self.begins[index + 1]
        return self.tokens[begin:end], self.trained[begin:end]

    def place(self, index: int) -> str:
        """Where a document comes from, as errors name it."""
        return place_of(self.path, int(self.rows[index]))


@dataclass(frozen=True, slots=True)
class Documents:
    """All documents, by set, file and row. kinds: what each set's columns mean.

    bos, eos: tokens that begin and end texts, where the tokenizer has them.
    """

    choice: TextChoice
    files: tuple[File, ...]
    kinds: tuple[Columns, ...]
    bos: int | None
    eos: int | None
    num_reused: int

    def of_set(self, set_index: int) -> Iterator[tuple[File, int]]:
        """Each document of a set: its file and its place in it."""
        for file in self.files:
            if file.set_index == set_index:
                yield from ((file, index) for index in range(len(file.rows)))


def read_documents(
    choice: TextChoice,
    tokenizer: Any,
    *,
    inputs: Mapping[str, Any],
    cache: ContentCache | None = None,
    progress: OnProgress | None = None,
) -> Documents:
    """Read, word and tokenise all sets.

    tokenizer: of transformers, a fast one. inputs: what identifies it (the digest of its files), as JSON values.
    progress: counts files.
    Raises: SourceError naming every fault with its file and row: what is no JSON, columns that are not there, roles that
    the template does not know, empty turns; or that the tokenizer has no chat template and a set needs one.
    """
    found = [
        (index, path)
        for index, one in enumerate(choice.sets)
        for path in find_files(one.path, one.split)
    ]
    kinds = tuple(_kind_of(one) for one in choice.sets)
    template = None
    if any(kind.is_chat for kind in kinds):
        template = ChatTemplate(tokenizer, options=choice.template_options, today=choice.today)
    tokenising = Tokenising(tokenizer, template)
    shaped_by = [_inputs(*both, template, inputs) for both in zip(choice.sets, kinds, strict=True)]
    faults: list[str] = []
    files: list[File] = []
    num_reused = 0
    for index, path in found:
        key = None
        if cache is not None:
            key = cache.key(file=file_digest(path), ending=path.suffix.lower(), **shaped_by[index])
        arrays = _get(cache, key)
        num_reused += arrays is not None
        if arrays is None:
            num_before = len(faults)
            arrays = _read(path, choice.sets[index], kinds[index], tokenising, faults)
            if len(faults) == num_before:
                _put(cache, key, arrays)
        files.append(File(path, index, **arrays))
        if progress is not None:
            progress(len(files), len(found))
    if faults:
        raise SourceError(_list(faults))
    return Documents(choice, tuple(files), kinds, tokenising.bos, tokenising.eos, num_reused)


def _kind_of(item: TextSet) -> Columns:
    """What a set's columns mean, from its first row that can be read. Raises: SourceError."""
    files = find_files(item.path, item.split)
    for path in files:
        for row in read_rows(path):
            if row.value is None:
                continue
            try:
                return columns_of(item, row.value)
            except SourceError as error:
                raise SourceError(f"{place_of(path, row.number)}: {error}") from error
    faults = [
        f"{place_of(path, row.number)}: {row.fault}" for path in files for row in read_rows(path)
    ]
    if faults:
        raise SourceError(_list(faults))
    raise SourceError(f"{item.path}: holds no sample")


def _read(
    path: Path, item: TextSet, columns: Columns, tokenising: Tokenising, faults: list[str]
) -> dict[str, NDArray[Any]]:
    """The arrays of a File; rows with faults are added to these instead."""
    documents: list[Document] = []
    rows: list[int] = []
    worded = _worded(path, item, columns, tokenising, faults)
    while part := list(islice(worded, _AT_ONCE)):
        rows += [number for number, _ in part]
        documents += tokenising.documents([text for _, text in part])
    lengths = [len(one.tokens) for one in documents]
    return {
        "tokens": np.concatenate([np.zeros(0, np.int32), *(one.tokens for one in documents)]),
        "trained": np.concatenate([np.zeros(0, np.bool_), *(one.trained for one in documents)]),
        "begins": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        "rows": np.array(rows, dtype=np.int64),
        "turns": np.array(
            [(one.num_turns, one.num_dropped, one.num_open) for one in documents], dtype=np.int64
        ).reshape(-1, 3),
    }


def _worded(
    path: Path, item: TextSet, columns: Columns, tokenising: Tokenising, faults: list[str]
) -> Iterator[tuple[int, Worded]]:
    for row in read_rows(path):
        if row.value is None:
            faults.append(f"{place_of(path, row.number)}: {row.fault}")
            continue
        try:
            text = tokenising.word(sample_of(row.value, columns), item.train_on)
        except SourceError as error:
            faults.append(f"{place_of(path, row.number)}: {error}")
        else:
            yield row.number, text


def _inputs(
    item: TextSet, columns: Columns, template: ChatTemplate | None, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """All but the file's bytes that shapes what is made of it, for its key."""
    return {
        "kind": "documents",
        "code_version": CODE_VERSION,
        "columns": [columns.kind, list(columns.names), columns.as_chat],
        "train_on": item.train_on,
        "wording": template.describe() if template is not None and columns.is_chat else None,
        "tokenizer": dict(inputs),
    }


def _get(cache: ContentCache | None, key: str | None) -> dict[str, NDArray[Any]] | None:
    """A file's arrays; None when there are none, or when what there is is broken, which is discarded."""
    if cache is None or key is None:
        return None
    try:
        entry = cache.get(key)
    except StoreBroken:
        cache.discard(key)
        return None
    return None if entry is None else {name: tensor.numpy() for name, tensor in entry.items()}


def _put(cache: ContentCache | None, key: str | None, arrays: Mapping[str, NDArray[Any]]) -> None:
    import torch

    if cache is not None and key is not None:
        cache.put(key, {name: torch.from_numpy(array) for name, array in arrays.items()})


def _list(faults: Sequence[str]) -> str:
    noun = "fault" if len(faults) == 1 else "faults"
    lines = "\n".join(f"  {fault}" for fault in faults[:_MOST_NAMED])
    more = len(faults) - _MOST_NAMED
    rest = f"\n  and {more} more" if more > 0 else ""
    return f"{len(faults)} {noun} in the texts; nothing was started:\n{lines}{rest}"
