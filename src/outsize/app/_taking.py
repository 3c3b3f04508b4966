"""One tensor on its way from the source into a packet: encoded, cast row by row, or taken in the 4 bits that it has.

What leads a tensor's windows to `Taking.take` is app/_encoding.py; each way gives values for the packet's entries, in the
order in which they lie there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from outsize.base.quantised import CODES
from outsize.formats._packing import Packing
from outsize.weights.budget import is_stored_as_itself
from outsize.weights.dtypes import torch_dtype
from outsize.weights.mapping import MappedSource
from outsize.weights.pieces import RowWindow

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.formats.protocol import Adopter, Encoder, Format
    from outsize.weights.quantised import Quantised

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
        return _Cast(fmt, shape, dtype) if is_itself else _Encode(fmt, shape, dtype)
    adopt = _Adopt(packing, name, found)
    return adopt if fmt is packing.packed else _Decode(fmt, adopt)


def _rows(raw_u8: Tensor, window: RowWindow, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    row_shape = (window.stop - window.start, *shape[1:]) if shape else ()
    return raw_u8.view(dtype).view(row_shape)


class _Encode:
    """Rows into a format, which gives its parts when it has seen all."""

    def __init__(self, fmt: Format, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._encoder, self._shape, self._dtype = fmt.encoder(shape), shape, dtype

    def take(self, window: RowWindow, raw_u8: Tensor) -> Iterator[Piece]:
        self._encoder.push(_rows(raw_u8, window, self._shape, self._dtype))
        yield from ()

    def finish(self) -> Iterator[Piece]:
        yield from self._encoder.finish().items()


class _Cast:
    """Rows that are stored as themselves, and written as they come."""

    def __init__(self, fmt: Format, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._format, self._shape, self._dtype = fmt, shape, dtype

    def take(self, window: RowWindow, raw_u8: Tensor) -> Iterator[Piece]:
        yield from _cast(self._format, _rows(raw_u8, window, self._shape, self._dtype))

    def finish(self) -> Iterator[Piece]:
        yield from ()


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
