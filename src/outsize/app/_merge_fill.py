"""Filling a checkpoint's tensors with merged weights, and measuring what survives.

Dimensions: R rows of one window, K columns.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Protocol, cast

import torch

from outsize.weights import checkpoint_writer
from outsize.weights.checkpoint_writer import NewTensor, Piece

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.app._merge_rows import Deltas, OurRows, Rows
    from outsize.export.survival import Meter
    from outsize.formats._packing import Packing
    from outsize.formats.protocol import Format, Publishing

_WINDOW_ELEMENTS = 2**19  # of a weight that is merged at a time: 2 MB in fp32
PLAIN = "rounded to the type of the weight"
FROM_WHOLE = "packed from the unpacked sum"
FROM_PACKED = "packed again from the packed base's sum"


class Tensors(Protocol):
    """What is to be written, and its bytes by pieces."""

    def tensors(self) -> tuple[NewTensor, ...]:
        """In order."""

    def num_threads(self, most: int) -> int:
        """How many may ask for pieces at once."""

    def __call__(self, piece: Piece) -> memoryview:
        """The bytes of a piece; the view is reused by the next call in the same thread."""


class PlainFill:
    """Weights of the types that their rows have: the sum in fp32, rounded once."""

    def __init__(self, rows: Rows, deltas: Deltas, meter: Meter) -> None:
        self._rows, self._deltas, self._meter = rows, deltas, meter
        self._own = threading.local()

    def tensors(self) -> tuple[NewTensor, ...]:
        return self._rows.tensors()

    def num_threads(self, most: int) -> int:
        return 1 if getattr(self._rows, "is_decoding", False) else most

    def __call__(self, piece: Piece) -> memoryview:
        tensor = piece.tensor
        num_rows = tensor.shape[0] if tensor.shape else 1
        num_columns = tensor.num_elements // num_rows
        size = tensor.num_bytes // tensor.num_elements
        first, last = piece.start // num_columns, -(-piece.stop // num_columns)
        out = self._buffer((last - first) * num_columns * size)
        module = self._rows.module_of(tensor.name)
        if module is None:
            self._rows.raw(tensor.name, first, last, out.numpy().data)
        else:
            step = max(1, _WINDOW_ELEMENTS // num_columns)
            for start in range(first, last, step):
                stop = min(start + step, last)
                merged = self._merged(piece, module, start, stop)
                begin = (start - first) * num_columns * size
                out[begin : begin + merged.nbytes] = merged.view(torch.uint8).flatten()
        begin = (piece.start - first * num_columns) * size
        return out[begin : begin + (piece.stop - piece.start) * size].numpy().data

    def _merged(self, piece: Piece, module: str, start: int, stop: int) -> Tensor:
        weight, delta = self._rows.window(piece.tensor.name, start, stop, self._deltas)
        wide = torch.promote_types(weight.dtype, torch.float32)
        base = weight.to(wide)
        merged = (base + delta).to(weight.dtype)
        # rows at the ends of a piece are another's as well, and are counted once
        offset = start * weight.shape[1]
        inside = slice(max(piece.start - offset, 0), min(piece.stop - offset, weight.numel()))
        survived = (merged.to(wide) - base).flatten()[inside]
        self._meter.add(PLAIN, module, delta.flatten()[inside], survived)
        return merged.contiguous()

    def _buffer(self, num_bytes: int) -> Tensor:
        held = getattr(self._own, "buffer", None)
        if held is None or len(held) < num_bytes:
            held = torch.empty(max(num_bytes, checkpoint_writer.PIECE_BYTES), dtype=torch.uint8)
            self._own.buffer = held
        return cast("Tensor", held)[:num_bytes]


class PackedFill:
    """Matrices packed as other programs read them, from the unpacked sum; everything else as PlainFill does.

    Pieces are asked for in order, by one thread: a matrix is packed when the first of its tensors is asked for. What is
    measured is measured by windows; scales that are packed themselves are so within each.
    """

    def __init__(
        self, rows: OurRows, packing: Packing, deltas: Deltas, meter: Meter, device: torch.device
    ) -> None:
        self._rows, self._deltas, self._meter, self._device = rows, deltas, meter, device
        self._format: Format = packing.packed
        self._packed: dict[str, tuple[int, ...]] = {
            name: packing.shapes[ours]
            for name, ours in rows.our_names()
            if packing.formats[ours] is packing.packed
        }
        self._plain = PlainFill(rows, deltas, meter)
        self._owner: dict[str, tuple[str, str]] = {}
        self._made: tuple[str, dict[str, Tensor]] = ("", {})

    def tensors(self) -> tuple[NewTensor, ...]:
        found: list[NewTensor] = []
        for one in self._rows.tensors():
            if one.name not in self._packed:
                found.append(one)
                continue
            for suffix, dtype, shape in self._publishing.published(one.shape):
                self._owner[one.name + suffix] = (one.name, suffix)
                found.append(NewTensor(one.name + suffix, dtype, shape))
        return tuple(found)

    def num_threads(self, most: int) -> int:  # noqa: ARG002 - see the class
        return 1

    def __call__(self, piece: Piece) -> memoryview:
        if piece.tensor.name not in self._owner:
            return self._plain(piece)
        name, suffix = self._owner[piece.tensor.name]
        if self._made[0] != name:
            self._made = ("", {})  # one matrix at a time
            self._made = (name, self._pack(name))
        flat = self._made[1][suffix].contiguous().flatten()
        return flat[piece.start : piece.stop].view(torch.uint8).numpy().data

    @property
    def _publishing(self) -> Publishing:
        return cast("Publishing", self._format)

    def _pack(self, name: str) -> dict[str, Tensor]:
        shape, module = self._packed[name], self._rows.module_of(name)
        encoder = self._format.encoder(shape)
        step = max(1, _WINDOW_ELEMENTS // math.prod(shape[1:]))
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            if module is None:
                whole = self._rows.weight(name, start, stop).to(self._device).float()
            else:
                weight, delta = self._rows.window(name, start, stop, self._deltas)
                base, delta = weight.to(self._device).float(), delta.to(self._device)
                whole = base + delta
                self._measure(module, base, delta)
            encoder.push(whole)
        dtype = self._rows.decoded_dtype()
        return self._publishing.publish(encoder.finish(), shape, dtype)

    def _measure(self, module: str, base: Tensor, delta: Tensor) -> None:
        packed = self._through(base)
        self._meter.add(FROM_WHOLE, module, delta, self._through(base + delta) - packed)
        self._meter.add(FROM_PACKED, module, delta, self._through(packed + delta) - packed)

    def _through(self, rows_RK: Tensor) -> Tensor:
        """What the format leaves of some rows."""
        shape = tuple(rows_RK.shape)
        encoder = self._format.encoder(shape)
        encoder.push(rows_RK)
        return self._format.decode(encoder.finish(), shape, torch.float32)
