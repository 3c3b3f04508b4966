"""Packing: which documents share a row, as a pure function of their lengths, a seed and an epoch.

An epoch takes all documents in hashed order, some thousand at a time, and puts each where it fits best, the longest first.
Each document is in exactly one row of an epoch. In which other documents' company changes from epoch to epoch; no
document sees or is predicted from another, so that it matters to the order of updates only.

Dimensions: T tokens of a row.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # a label that is not trained, as cross entropy has it
PADDING = -1  # segment of what belongs to no document

# Documents that are fitted together: enough that rows are full, few enough that an epoch's company differs from the last's.
_AT_ONCE = 4096

Rows = tuple[tuple[int, ...], ...]


class PackedRow(NamedTuple):
    """One row, (T,) each: labels aligned so that labels[t] is to be predicted at t; positions from 0 in each segment."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    segments: NDArray[np.int32]


def pack_epoch(
    lengths: Sequence[int], window: int, *, key: Sequence[int | str], is_packed: bool = True
) -> Rows:
    """The rows of an epoch: indices of documents, in the order in which they are trained.

    lengths: tokens of each document, none above the window. key: what decides the order, as (seed, set, epoch).
    is_packed: False gives each document a row of its own.
    """
    assert all(0 < length <= window for length in lengths), "documents fit into the window"
    order = hashed_order(len(lengths), (*key, "documents"))
    if not is_packed:
        return tuple((int(index),) for index in order)
    rows: list[tuple[int, ...]] = []
    for begin in range(0, len(order), _AT_ONCE):
        rows += _fit(order[begin : begin + _AT_ONCE].tolist(), lengths, window)
    return tuple(rows[i] for i in hashed_order(len(rows), (*key, "rows")))


def hashed_order(count: int, key: Sequence[int | str]) -> NDArray[np.int64]:
    """0..count-1 in an order that looks random, the same on every machine."""
    text = "/".join(map(str, key)).encode()
    base = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    # SplitMix64: steps of the golden ratio through 64-bit numbers, then its finaliser, which is a permutation.
    mixed = np.uint64(base) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def pack_row(
    documents: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]], length: int, *, padding: int
) -> PackedRow:
    """Lay documents side by side in a row of `length` tokens; the rest is the token `padding`.

    documents: tokens and whether each is to be predicted. The first token of a document is predicted by nothing.
    """
    row = PackedRow(
        np.full(length, padding, np.int64),
        np.full(length, IGNORED, np.int64),
        np.zeros(length, np.int64),
        np.full(length, PADDING, np.int32),
    )
    begin = 0
    for segment, (tokens, trained) in enumerate(documents):
        end = begin + len(tokens)
        assert end <= length, "documents of a row fit into it"
        row.input_ids[begin:end] = tokens
        row.labels[begin : end - 1] = np.where(trained[1:], tokens[1:], IGNORED)
        row.position_ids[begin:end] = np.arange(len(tokens))
        row.segments[begin:end] = segment
        begin = end
    return row


def _fit(documents: Sequence[int], lengths: Sequence[int], window: int) -> list[tuple[int, ...]]:
    """Best fit, the longest first; among equals as they come."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(documents, key=lambda one: -lengths[one]):
        at = bisect_left(room, (lengths[index], 0))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = window, len(rows)
            rows.append([])
        rows[row].append(index)
        if left > lengths[index]:
            insort(room, (left - lengths[index], row))
    return [tuple(row) for row in rows]
