"""One tensor on its way from the source into a packet: encoded, cast row by row, or taken in the few bits that it has.

What leads a tensor's windows to `Taking.take` is app/_encoding.py; each way gives values for the packet's entries, in the
order in which they lie there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, cast

from outsize.base.quantised import CODES
from outsize.formats._packing import Packing
from outsize.weights.budget import is_stored_as_itself
from outsize.weights.dtypes import torch_dtype
from outsize.weights.mapping import MappedSource
from outsize.weights.pieces import RowWindow
from outsize.weights.scaled import SCALE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.formats.protocol import Adopter, Encoder, Format, KeepingEncoder
    from outsize.weights.quantised import Quantised
    from outsize.weights.scaled import Scaled

_RESCALED = 2**22  # numbers that are made fp32 at once

Piece = tuple[str, "Tensor"]  # of a part, by name: the next of its values, which own their memory


class Taking(Protocol):
    """One tensor's way."""

    def take(self, window: RowWindow, raw_u8: Tensor) -> Iterator[Piece]:
        """The next window; raw_u8 is only lent. What can be written already.

        Raises: FormatError for rows that cannot be held.
        """

    def finish(self) -> Iterator[Piece]:
        """What is left to write after the last window."""


def taking_of(mapped: MappedSource, packing: Packing, name: str) -> Taking:
    """The way of one tensor."""
    fmt, shape = packing.formats[name], packing.shapes[name]
    is_itself = is_stored_as_itself(shape, packing.parts(name))
    found = mapped.quantised.get(name)
    if found is None:
        dtype = torch_dtype(mapped.info(name).dtype)
        way = _Cast(fmt, shape, dtype) if is_itself else _Encode(fmt, shape, dtype)
        scaled = mapped.scaled.get(name)
        return way if scaled is None else _Rescale(way, scaled)
    adopt = _Adopt(packing, name, found)
    return adopt if fmt is packing.packed else _Decode(fmt, adopt)


def _rows(raw_u8: Tensor, window: RowWindow, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    row_shape = (window.stop - window.start, *shape[1:]) if shape else ()
    return raw_u8.view(dtype).view(row_shape)


class _Encode:
    """Rows into a format, which gives its parts when it has seen all."""

    def __init__(self, fmt: Format, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._encoder, self.shape, self.dtype = fmt.encoder(shape), shape, dtype

    def take(self, window: RowWindow, raw_u8: Tensor) -> Iterator[Piece]:
        rows = _rows(raw_u8, window, self.shape, self.dtype)
        if self.keeps_codes:
            yield from self.take_codes(rows, rows.new_ones(len(rows), dtype=torch_dtype("F32")))
        else:
            yield from self.take_rows(rows)

    @property
    def keeps_codes(self) -> bool:
        """Whether rows are kept in the type that they have, with a scale for each."""
        return getattr(self._encoder, "keeps", None) == self.dtype

    def take_codes(self, codes: Tensor, scales: Tensor) -> Iterator[Piece]:
        """The next rows in that type, and their scales."""
        cast("KeepingEncoder", self._encoder).push_codes(codes, scales)
        yield from ()

    def take_rows(self, rows: Tensor) -> Iterator[Piece]:
        """The next rows, in any type."""
        self._encoder.push(rows)
        yield from ()

    def finish(self) -> Iterator[Piece]:
        yield from self._encoder.finish().items()


class _Cast:
    """Rows that are stored as themselves, and written as they come."""

    def __init__(self, fmt: Format, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._format, self.shape, self.dtype = fmt, shape, dtype

    def take(self, window: RowWindow, raw_u8: Tensor) -> Iterator[Piece]:
        yield from self.take_rows(_rows(raw_u8, window, self.shape, self.dtype))

    def take_rows(self, rows: Tensor) -> Iterator[Piece]:
        """The next rows, in any type."""
        yield from _cast(self._format, rows)

    def finish(self) -> Iterator[Piece]:
        yield from ()


class _Rescale:
    """A tensor in 8-bit floats with scales: multiplied in fp32, a few rows at a time, and then on its way like any other.

    The product of an 8-bit float (4 bits at most) and a scale is rounded once, to fp32, whatever the device.
    """

    def __init__(self, way: _Encode | _Cast, scaled: Scaled) -> None:
        self._way, self._scaled = way, scaled
        self._read: list[Tensor] = []
        self._scales: Tensor | None = None

    def take(self, window: RowWindow, raw_u8: Tensor) -> Iterator[Piece]:
        if window.part == SCALE:
            self._read.append(raw_u8.clone())
            return
        rows = _rows(raw_u8, window, self._way.shape, self._way.dtype)
        step = max(1, _RESCALED // max(1, rows[:1].numel()))
        for start in range(0, window.stop - window.start, step):
            some = rows[start : start + step] if rows.ndim else rows
            yield from self._take_some(some, window.start + start)

    def finish(self) -> Iterator[Piece]:
        yield from self._way.finish()

    def _take_some(self, rows: Tensor, first_row: int) -> Iterator[Piece]:
        """A few rows; first_row: of the tensor."""
        way, per_row, scales = self._way, self._scaled.per_row, self._all_scales()
        some = scales[first_row : first_row + len(rows)] if per_row else scales
        if isinstance(way, _Encode) and way.keeps_codes and per_row <= 1:
            yield from way.take_codes(rows, some.reshape(-1).expand(len(rows)))
            return
        yield from way.take_rows(
            rows.float().view(len(some), per_row or 1, -1).mul_(some).view(rows.shape)
        )

    def _all_scales(self) -> Tensor:
        """In fp32, (rows, scales of a row, 1), or (1, 1, 1)."""
        if self._scales is None:
            import torch

            read = torch.cat(self._read).view(torch_dtype(self._scaled.dtype))
            self._scales = read.float().view(-1, self._scaled.per_row or 1, 1)
            self._read.clear()
        return self._scales


def _cast(fmt: Format, rows: Tensor) -> Iterator[Piece]:
    encoder: Encoder = fmt.encoder(tuple(rows.shape))
    encoder.push(rows)
    yield from encoder.finish().items()


class _Adopt:
    """A matrix in 4 bits: its small parts are kept until its codes, which are only copied, have passed."""

    def __init__(self, packing: Packing, name: str, found: Quantised) -> None:
        self._packing, self._name, self._found = packing, name, found
        self._read: dict[str, list[Tensor]] = {}
        self._adopter: Adopter | None = None

    def take(self, window: RowWindow, raw_u8: Tensor) -> Iterator[Piece]:
        if window.part == CODES:
            yield CODES, raw_u8.clone()
        else:
            self.keep(window, raw_u8)

    def finish(self) -> Iterator[Piece]:
        yield from self.adopter.parts().items()

    def keep(self, window: RowWindow, raw_u8: Tensor) -> None:
        """Keep a window of a small part."""
        self._read.setdefault(window.part, []).append(raw_u8.clone())

    @property
    def adopter(self) -> Adopter:
        """The format's own, once all small parts are there."""
        if self._adopter is None:
            import torch

            stored = {
                part.part: torch.cat(self._read.pop(part.part)).view(torch_dtype(part.dtype))
                for part in self._found.parts
                if part.part != CODES
            }
            self._adopter = self._packing.adopter(self._name, self._found.form, stored)
        return self._adopter


class _Decode:
    """A matrix in 4 bits that the table wants plain: decoded as the library that wrote it does, then cast."""

    def __init__(self, fmt: Format, adopt: _Adopt) -> None:
        self._format, self._adopt = fmt, adopt

    def take(self, window: RowWindow, raw_u8: Tensor) -> Iterator[Piece]:
        if window.part != CODES:
            self._adopt.keep(window, raw_u8)
            return
        rows = self._adopt.adopter.decode(raw_u8, window.start)
        yield from _cast(self._format, rows)

    def finish(self) -> Iterator[Piece]:
        yield from ()
