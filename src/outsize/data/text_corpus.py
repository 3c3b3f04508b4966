"""The texts' corpus: rows packed from documents, and the batch of a step as a function of (data, seed, step, place).

As for pictures nothing is replayed and no generator has a state. Rows are numbered through a run; a comparison of whole
numbers says which set a row is drawn from, and how many that set had before, so sets keep their shares at every moment.
A set's rows are its epochs' rows one after another; how many an epoch has follows from its packing.

Dimensions: B rows, T tokens of a row.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize.base.files import json_digest
from outsize.data.documents import Documents
from outsize.data.fitting import Pieces, SetFacts, fit
from outsize.data.packing import PackedRow, Rows, pack_epoch, pack_row
from outsize.data.schedule import draw_set, exact_shares

_MULTIPLE = (
    64  # rows shorter than the window are as long as a multiple of it, so that few shapes occur
)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Rows on the CPU, (B, T) each but the last.

    labels: the token to be predicted at each position, -100 where none is; the shift is done. position_ids: from 0 in
    each document. segments: 0, 1, ... by document of a row, -1 for padding (int32, the others int64).
    loss_weight_B: factor on the loss of each row, fp32.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    segments: Tensor
    loss_weight_B: Tensor


class TextCorpus:
    """The batch of step n, and the batches that are held out."""

    def __init__(
        self, documents: Documents, *, seed: int, batch: int = 1, accumulate: int = 1
    ) -> None:
        """Fit the documents and plan; two corpora made alike give the same batches.

        batch: rows of a micro-batch. accumulate: micro-batches of a step.
        Raises: SourceError as fitting.fit; RecipeError when the shares of sets do not add up.
        """
        assert batch >= 1, "a micro-batch has at least one row"
        assert accumulate >= 1, "a step has at least one micro-batch"
        self._documents = documents
        self._choice = documents.choice
        self.batch_rows = batch
        self.accumulate = accumulate
        self._fitted = fit(documents)
        trained = {i: one.trained for i, one in enumerate(self._fitted) if len(one.trained.file)}
        totals = {i: int(pieces.lengths.sum()) for i, pieces in trained.items()}
        self._shares = exact_shares([one.share for one in self._choice.sets], totals)
        self._streams = {
            i: _Stream(pieces, self._choice.window, (seed, i), is_packed=self._choice.pack)
            for i, pieces in trained.items()
        }
        self._longest = max(totals.values())
        self._held_out = tuple(
            (i, row)
            for i, one in enumerate(self._fitted)
            for row in _plan(
                one.held_out, self._choice.window, ("held out", i), is_packed=self._choice.pack
            )
        )

    @property
    def facts(self) -> tuple[SetFacts, ...]:
        """Counts, by set."""
        return tuple(one.facts for one in self._fitted)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know before training, a sentence each."""
        return tuple(one for facts in self.facts for one in facts.sentences(self._choice))

    @property
    def num_held_out_batches(self) -> int:
        """Batches of rows that are evaluated and never trained on."""
        return -(-len(self._held_out) // self.batch_rows)

    def digest(self) -> str:
        """Equal exactly when the same documents take part alike, wherever their files lie."""
        files = [
            [file.set_index, *map(_digest, (file.tokens, file.trained, file.begins))]
            for file in self._documents.files
        ]
        without_paths = self._choice.model_dump(mode="json") | {
            "sets": [one.model_dump(mode="json", exclude={"path"}) for one in self._choice.sets]
        }
        return json_digest({"choice": without_paths, "files": files})

    def batch(self, step: int, place: int) -> TextBatch:
        """The micro-batch `place` (below `accumulate`) of a step, counted from 0."""
        return self._batch(
            [(i, self._fitted[i].trained, row) for i, row in self._rows(step, place)]
        )

    def held_out_batch(self, number: int) -> TextBatch:
        """A batch of what is held out; the last one may have fewer rows."""
        begin = number * self.batch_rows
        rows = self._held_out[begin : begin + self.batch_rows]
        return self._batch([(i, self._fitted[i].held_out, row) for i, row in rows])

    def num_trained(self, step: int) -> int:
        """Labels of a whole step, over all its micro-batches: what a mean over the step divides by."""
        return sum(
            int(self._fitted[i].trained.num_trained[list(row)].sum())
            for place in range(self.accumulate)
            for i, row in self._rows(step, place)
        )

    def rows_per_epoch(self, set_index: int) -> int:
        """Rows of a set's first epoch; later ones differ by few. 0 for sets that are not trained on."""
        stream = self._streams.get(set_index)
        return 0 if stream is None else len(stream.plan(0))

    def places_of(self, step: int) -> list[str]:
        """File and row of every document that a step draws, in order."""
        files = self._documents.files
        return [
            files[self._fitted[i].trained.file[one]].place(self._fitted[i].trained.document[one])
            for place in range(self.accumulate)
            for i, row in self._rows(step, place)
            for one in row
        ]

    def _rows(self, step: int, place: int) -> list[tuple[int, tuple[int, ...]]]:
        """Set and pieces of each row of a micro-batch."""
        assert step >= 0, "steps are counted from 0"
        assert 0 <= place < self.accumulate, "a place is below the number accumulated"
        first = (step * self.accumulate + place) * self.batch_rows
        rows = []
        for number in range(first, first + self.batch_rows):
            set_index, ordinal = draw_set(self._shares, number)
            rows.append((set_index, self._streams[set_index].row(ordinal)))
        return rows

    def _batch(self, drawn: Sequence[tuple[int, Pieces, tuple[int, ...]]]) -> TextBatch:
        documents = [[self._piece(pieces, one) for one in row] for _, pieces, row in drawn]
        needed = max(sum(len(tokens) for tokens, _ in row) for row in documents)
        if self._choice.pack:  # one shape for all, unless all texts together are shorter than a row
            needed = max(needed, min(self._longest, self._choice.window))
        length = min(self._choice.window, -(-needed // _MULTIPLE) * _MULTIPLE)
        padding = 0 if self._documents.eos is None else self._documents.eos
        rows = [pack_row(row, length, padding=padding) for row in documents]
        tensors = (torch.from_numpy(np.stack(one)) for one in zip(*rows, strict=True))
        weights = [self._choice.sets[i].loss_weight for i, _, _ in drawn]
        named = dict(zip(PackedRow._fields, tensors, strict=True))
        return TextBatch(**named, loss_weight_B=torch.tensor(weights, dtype=torch.float32))

    def _piece(self, pieces: Pieces, index: int) -> tuple[Any, Any]:
        file = self._documents.files[pieces.file[index]]
        begin, end = pieces.begin[index], pieces.end[index]
        return file.tokens[begin:end], file.trained[begin:end]


class _Stream:
    """The rows of one set, by ordinal."""

    def __init__(
        self, pieces: Pieces, window: int, key: tuple[int | str, ...], *, is_packed: bool
    ) -> None:
        self._begins = [0]  # rows before each epoch, as far as it was asked for
        # A step may reach over an epoch's end; a few more for other readers.
        self.plan = functools.lru_cache(maxsize=4)(
            lambda epoch: _plan(pieces, window, (*key, epoch), is_packed=is_packed)
        )

    def row(self, ordinal: int) -> tuple[int, ...]:
        """Pieces of the set's row number `ordinal`."""
        while self._begins[-1] <= ordinal:
            self._begins.append(self._begins[-1] + len(self.plan(len(self._begins) - 1)))
        epoch = bisect_right(self._begins, ordinal) - 1
        return self.plan(epoch)[ordinal - self._begins[epoch]]


def _plan(pieces: Pieces, window: int, key: tuple[int | str, ...], *, is_packed: bool) -> Rows:
    return pack_epoch(pieces.lengths.tolist(), window, key=key, is_packed=is_packed)


def _digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
