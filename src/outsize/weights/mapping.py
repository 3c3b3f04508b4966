"""A family's tensors in a checkpoint's files: which layout names them, and where their rows lie.

A layout fits when every name is there and every shape and dtype is right (weights/layout_search.py). When none fits, the
error speaks of the nearest one (weights/mismatch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from outsize.base.errors import SourceError
from outsize.base.layout import Layout
from outsize.base.parts import DTYPE_BYTES
from outsize.base.table import ShapeTable, TensorSpec
from outsize.weights.dtypes import torch_dtype
from outsize.weights.foreign import foreign_fault
from outsize.weights.header import TensorInfo
from outsize.weights.layout_search import Adopts, Attempt, RowReader, Search
from outsize.weights.quantised import Quantised, States, StoredPart
from outsize.weights.scaled import FLOAT8, SCALE, Scaled, Scales

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """Rows [start, stop) of one tensor of the source."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class MappedSource:
    """A table's tensors as rows of a source's files.

    windows: of each tensor; of a matrix in 4 bits, its codes. quantised: those, by name. scaled: those in 8-bit floats with
    scales. extra: names in the files that the table does not use (layers beyond those read, output heads, vision towers).
    """

    source: RowReader
    table: ShapeTable
    layout: str
    prefix: str
    windows: dict[str, tuple[Window, ...]]
    quantised: dict[str, Quantised]
    scaled: dict[str, Scaled]
    extra: tuple[str, ...]

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        return self.table.by_name

    @cached_property
    def _parts(self) -> dict[tuple[str, str], StoredPart]:
        return {(name, part.part): part for name in self.windows for part in self.parts(name)}

    def info(self, name: str) -> TensorInfo:
        """The file tensor in which one of our tensors lies, or its codes."""
        return self.source.tensors[self.windows[name][0].tensor]

    def parts(self, name: str) -> tuple[StoredPart, ...]:
        """What is read of one of our tensors, in order: scales, if it has any, and itself; or what a matrix in 4 bits has."""
        if name in self.quantised:
            return self.quantised[name].parts
        info = self.info(name)
        num_rows = info.shape[0] if info.shape else 1
        row_bytes = info.num_bytes // num_rows if num_rows else 0
        shape = self._specs[name].shape
        itself = StoredPart("", "", info.dtype, shape[0] if shape else 1, row_bytes)
        return (itself,) if name not in self.scaled else (self._scale_part(name), itself)

    def _scale_part(self, name: str) -> StoredPart:
        """The scales of our rows."""
        scaled, shape = self.scaled[name], self._specs[name].shape
        size = DTYPE_BYTES[scaled.dtype]
        num_rows = shape[0] if scaled.per_row else 1
        return StoredPart(
            SCALE, scaled.tensor, scaled.dtype, num_rows, size * (scaled.per_row or 1)
        )

    def encoding(self, name: str) -> str:
        """How a tensor's bytes are to be understood: its dtype, and the state of a matrix in 4 bits, or what scales it has."""
        state = f" {self.quantised[name].state}" if name in self.quantised else ""
        scales = f" {self.scaled[name]}" if name in self.scaled else ""
        return self.info(name).dtype + state + scales

    def num_rows(self, name: str) -> int:
        """Rows of dimension 0; one for a tensor without dimensions."""
        return self.parts(name)[-1].num_rows

    def row_bytes(self, name: str) -> int:
        """Bytes of one row in the file, the codes' of a matrix in 4 bits; all of a tensor without dimensions."""
        return self.parts(name)[-1].row_bytes

    def widest_row_bytes(self) -> int:
        """Bytes of the longest row of all that is read."""
        rows = (part.row_bytes for name in self.windows for part in self.parts(name))
        return max(rows, default=0)

    def tensor_bytes(self, name: str) -> int:
        """Bytes that are read for one of our tensors."""
        return sum(part.num_rows * part.row_bytes for part in self.parts(name))

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that are read for the whole table."""
        return sum(self.tensor_bytes(name) for name in self.windows)

    def read_rows(self, name: str, start: int, stop: int, into: Tensor) -> Tensor:
        """Rows [start, stop) of one of our tensors, wherever its slabs lie; not for a matrix in 4 bits, or with scales.

        Arguments, result and errors as Source.read_rows; the shape is (stop - start, ...) of the table.
        """
        held_otherwise = self.quantised.keys() | self.scaled.keys()
        assert name not in held_otherwise, "its rows are not its numbers"
        num_bytes = self.read_into(name, start, stop, into.numpy().data)
        shape = self._specs[name].shape
        raw = into[:num_bytes].view(torch_dtype(self.info(name).dtype))
        return raw.view((stop - start, *shape[1:]) if shape else ())

    def read_into(
        self, name: str, start: int, stop: int, target: memoryview, part: str = ""
    ) -> int:
        """The bytes of rows [start, stop) of one of our tensors, in our order; arguments as Source.read_into.

        part: one of `parts`.
        """
        one = self._parts[name, part]
        if not 0 <= start <= stop <= one.num_rows:
            raise IndexError(f"rows {start}:{stop} of {name}, which has {one.num_rows}")
        if part not in ("", SCALE):
            self.source.read_into(one.tensor, start * one.step, stop * one.step, target)
            return (stop - start) * one.row_bytes
        begin = 0  # of the window, in our rows
        for window in self._windows_of(name, one):
            first = max(start, begin)
            last = min(stop, begin + window.stop - window.start)
            if first < last:
                shift = window.start - begin
                piece = target[(first - start) * one.row_bytes :]
                self.source.read_into(window.tensor, first + shift, last + shift, piece)
            begin += window.stop - window.start
        return (stop - start) * one.row_bytes

    def _windows_of(self, name: str, part: StoredPart) -> tuple[Window, ...]:
        """Where a tensor's own rows, or their scales, lie: in the same windows, or in one number."""
        if not part.part:
            return self.windows[name]
        if not self.scaled[name].per_row:
            return (Window(part.tensor, 0, 1),)
        return tuple(replace(one, tensor=part.tensor) for one in self.windows[name])


def map_source(
    source: RowReader,
    layouts: Sequence[Layout],
    table: ShapeTable,
    adopts: Adopts | None = None,
) -> MappedSource:
    """Find the first layout under which the source holds every tensor of the table.

    adopts: asked of every matrix in 4 bits; without it they are only looked at.
    Raises: SourceError listing all missing, misshapen and unusable tensors of the nearest layout.
    """
    search = Search(source, States(source), Scales(source), table, adopts)
    attempts = list(search.attempts(layouts))
    if not attempts:
        names = ", ".join(layout.name for layout in layouts) or "none"
        raise SourceError(f"no layout ({names}) has rules for every tensor of the shape table")
    best = min(attempts, key=lambda attempt: attempt.mismatch.num_faults)
    if best.mismatch.num_faults:
        foreign = foreign_fault(source.files, source.tensors)
        raise SourceError(foreign or best.mismatch.message(source.files, source.tensors))
    windows = {spec.name: _windows(source, best, spec) for spec in table}
    used = {window.tensor for several in windows.values() for window in several}
    scales = {scaled.tensor for scaled in best.scaled.values()}
    bare = (name for name in windows if name not in best.scaled)
    if any(source.tensors[windows[name][0].tensor].dtype in FLOAT8 for name in bare):
        foreign = foreign_fault(source.files, source.tensors)
        if foreign is not None:  # scales under names that are not known here would be left out
            raise SourceError(foreign)
    extra = tuple(
        name
        for name in source.tensors
        if search.states.weight_of(name) not in used and name not in scales
    )
    return MappedSource(
        source, table, best.layout.name, best.prefix, windows, best.quantised, best.scaled, extra
    )


def _windows(source: RowReader, attempt: Attempt, spec: TensorSpec) -> tuple[Window, ...]:
    windows = []
    if spec.name in attempt.quantised:
        codes = attempt.quantised[spec.name].parts[-1]
        return (Window(codes.tensor, 0, codes.num_rows * codes.step),)
    for slab in attempt.layout.slabs(spec.name):
        name = attempt.prefix + slab.tensor
        shape = source.tensors[name].shape
        windows.append(Window(name, *slab.rows(shape[0] if shape else 1)))
    return tuple(windows)
