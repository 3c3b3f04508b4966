"""Encoding by slabs of rows: what every format's encoder does alike.

A format says how a few rows become flat pieces; this file cuts what is pushed into pieces small enough for the cache
or the card, keeps count of the rows, and writes the pieces into buffers that are allocated once. Since no piece reaches
over a row's end, the cuts cannot be seen in the result.

Dimensions: N rows, K columns (or whatever follows the first dimension), R rows of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outsize.base.errors import FormatError

# A chunk's fp32 copy stays in a core's cache on a CPU (2**20 elements took 12 ns each, 2**18 took 5); on a card it
# must be large enough to fill it.
_CPU_CHUNK = 2**18
_DEVICE_CHUNK = 2**24

EncodeChunk = Callable[[Tensor, int], Mapping[str, Tensor]]
Complete = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class SlabEncoder:
    """The Encoder of one tensor.

    encode_chunk(rows, first_row): the flat pieces of some rows by part name, each with an equal share per row.
    complete(buffers): the parts, from the flat buffers of all rows.
    Memory: the buffers, and about ten bytes per element of one chunk, on the rows' device.
    """

    def __init__(
        self, shape: tuple[int, ...], encode_chunk: EncodeChunk, complete: Complete
    ) -> None:
        self._shape = shape
        self._num_rows = shape[0] if shape else 1
        self._row_elements = math.prod(shape[1:])
        self._encode_chunk = encode_chunk
        self._complete = complete
        self._buffers: dict[str, Tensor] = {}
        self._done = 0

    @torch.no_grad()
    def push(self, rows_NK: Tensor) -> None:
        """Encode the next rows, on the device where they are.

        Raises: FormatError for rows of another width, rows too many, or a row that cannot be held (named).
        """
        rows = rows_NK if self._shape else rows_NK.reshape(1)
        self._require_next(rows)
        limit = _CPU_CHUNK if rows.device.type == "cpu" else _DEVICE_CHUNK
        step = max(1, limit // max(1, self._row_elements))
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            self._keep(len(chunk), self._encode_chunk(chunk, self._done))

    def finish(self) -> dict[str, Tensor]:
        """The parts.

        Raises: FormatError when rows are missing.
        """
        if self._done != self._num_rows:
            raise FormatError(
                f"{self._done} of {self._num_rows} rows were given of a tensor {self._shape}"
            )
        return self._complete(self._buffers)

    def _require_next(self, rows: Tensor) -> None:
        """Raise FormatError unless such rows may come next."""
        if rows.shape[1:] != self._shape[1:] or self._done + len(rows) > self._num_rows:
            raise FormatError(
                f"rows of shape {tuple(rows.shape)} do not continue a tensor of shape {self._shape} "
                f"of which {self._done} rows are there"
            )

    def _keep(self, num_rows: int, pieces: Mapping[str, Tensor]) -> None:
        for name, piece in pieces.items():
            per_row = piece.numel() // num_rows
            if name not in self._buffers:
                self._buffers[name] = piece.new_empty(per_row * self._num_rows)
            self._buffers[name][self._done * per_row :][: piece.numel()] = piece.reshape(-1)
        self._done += num_rows


def refuse_non_finite(values_R: Tensor, first_row: int, why: str) -> None:
    """Raise unless all values are finite; values_R (R, ...) stand for R rows.

    why: ends the sentence "row 7 of the tensor ...".
    Raises: FormatError naming the first such row.
    """
    if bool(torch.isfinite(values_R).all()):
        return
    is_good_R = torch.isfinite(values_R.reshape(len(values_R), -1)).all(dim=1)
    row = first_row + int(is_good_R.logical_not().nonzero()[0])
    raise FormatError(f"row {row} of the tensor {why}")
