"""The rows of an output head in tiles, wherever it lies.

A head in host memory (5 GiB in bf16 for some models) is brought through two buffers: while one is multiplied with, the other is
filled. On a card that takes streams and pinned memory, which the device's own copies know; without them each tile is copied in line.

Dimensions: D width, V words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from outsize.objectives.protocol import TileCopies


class InLine:
    """Copies in the order of the computation."""

    def open_(self, track: int) -> None:
        """Whatever is queued later runs later."""

    def copy(self, track: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:  # noqa: ARG002
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    def wait(self, track: int) -> None:
        """Whatever is queued later runs later."""


class Tile(NamedTuple):
    """Words from `first` on: weight (words, D) as products take it and bias (words), valid until the next tile is asked for."""

    first: int
    weight: Tensor
    bias: Tensor | None


def operand_type(rows: Tensor) -> torch.dtype:
    """What rows are multiplied in: their own type; on processors, where 16 bits are slow and rounded, fp32 for these."""
    is_narrow = rows.device.type == "cpu" and rows.element_size() < 4
    return torch.float32 if is_narrow else rows.dtype


class HeadTiles:
    """All tiles of `words` rows of a head, the last one shorter, where `rows` are; may be gone through again."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        words: int,
        rows: Tensor,
        copies: TileCopies | None,
    ) -> None:
        self._weight, self._words, self._device = weight, words, rows.device
        self._dtype = operand_type(rows)
        self._bias = None if bias is None else bias.to(rows.device)
        self._copies = InLine() if copies is None else copies

    @staticmethod
    def word_bytes(weight: Tensor, rows: Tensor) -> int:
        """Memory that a tile takes for each word on the device of `rows`: the buffers, and rows in the products' own type.

        Counted alike wherever the head lies: tiles are then the same, and so are their sums to the last bit.
        """
        buffered = 2 * weight.element_size()
        wanted = operand_type(rows)
        return weight.shape[1] * (buffered + (0 if weight.dtype == wanted else wanted.itemsize))

    def __iter__(self) -> Iterator[Tile]:
        firsts = range(0, len(self._weight), self._words)
        tiles = self._there if self._weight.device == self._device else self._brought
        for first, weight in zip(firsts, tiles(), strict=True):
            bias = None if self._bias is None else self._bias[first : first + len(weight)]
            yield Tile(first, weight.to(self._dtype), bias)

    def _there(self) -> Iterator[Tensor]:
        yield from torch.split(self._weight, self._words)

    def _brought(self) -> Iterator[Tensor]:
        sources = torch.split(self._weight, self._words)
        buffers = [
            torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in sources[:2]
        ]

        def fill(number: int) -> None:
            track, source = number % 2, sources[number]
            # the track's buffer was last read by products that are all queued by now
            self._copies.open_(track)
            self._copies.copy(track, [(buffers[track][: len(source)], source)])

        fill(0)
        for number, source in enumerate(sources):
            if number + 1 < len(sources):
                fill(number + 1)
            self._copies.wait(number % 2)
            yield buffers[number % 2][: len(source)]
