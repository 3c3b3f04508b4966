"""A family's tensors in a checkpoint's files: which layout names them, and where their rows lie.

A layout fits when every name is there and every shape and dtype is right; a matrix may also lie there in 4 bits, with
its state beside it (weights/quantised.py). When none fits, the error speaks of the nearest one (weights/mismatch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from outsize.base.errors import SourceError
from outsize.base.layout import Layout, Rule
from outsize.base.quantised import StoredForm
from outsize.base.table import ShapeTable, TensorSpec
from outsize.weights.dtypes import torch_dtype
from outsize.weights.foreign import foreign_fault
from outsize.weights.header import Header, TensorInfo
from outsize.weights.mismatch import Mismatch
from outsize.weights.quantised import Quantised, States, StoredPart

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS = {"F64", "F32", "F16", "BF16"}
_BARE_FLOAT8 = {"F8_E4M3", "F8_E5M2"}  # a plain cast, if nothing beside it scales it
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "scale_weight")

# Why a matrix of that form and shape cannot be taken as it is; None when it can.
Adopts = Callable[[StoredForm, tuple[int, ...]], str | None]


class RowReader(Protocol):
    """What this module needs of a source."""

    @property
    def files(self) -> tuple[Path, ...]: ...

    @property
    def headers(self) -> tuple[Header, ...]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read_into(self, name: str, start: int, stop: int, target: memoryview) -> int: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Rows [start, stop) of one tensor of the source."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class MappedSource:
    """A table's tensors as rows of a source's files.

    windows: of each tensor; of a matrix in 4 bits, its codes. quantised: those, by name. extra: names in the files that
    the table does not use (layers beyond those read, output heads, vision towers).
    """

    source: RowReader
    table: ShapeTable
    layout: str
    prefix: str
    windows: dict[str, tuple[Window, ...]]
    quantised: dict[str, Quantised]
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
        """What is read of one of our tensors, in order: itself, as the part "", or the parts of a matrix in 4 bits."""
        if name in self.quantised:
            return self.quantised[name].parts
        info = self.info(name)
        num_rows = info.shape[0] if info.shape else 1
        row_bytes = info.num_bytes // num_rows if num_rows else 0
        shape = self._specs[name].shape
        return (StoredPart("", "", info.dtype, shape[0] if shape else 1, row_bytes),)

    def encoding(self, name: str) -> str:
        """How a tensor's bytes are to be understood: its dtype, and the state of a matrix in 4 bits."""
        state = f" {self.quantised[name].state}" if name in self.quantised else ""
        return self.info(name).dtype + state

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
        """Rows [start, stop) of one of our tensors, wherever its slabs lie; not for a matrix in 4 bits.

        Arguments, result and errors as Source.read_rows; the shape is (stop - start, ...) of the table.
        """
        num_bytes = self.read_into(name, start, stop, into.numpy().data)
        shape = self._specs[name].shape
        raw = into[:num_bytes].view(torch_dtype(self.info(name).dtype))
        return raw.view((stop - start, *shape[1:]) if shape else ())

    def read_into(
        self, name: str, start: int, stop: int, target: memoryview, part: str = ""
    ) -> int:
        """The bytes of rows [start, stop) of one of our tensors, in our order; arguments as Source.read_into.

        part: of a matrix in 4 bits, one of `parts`.
        """
        one = self._parts[name, part]
        if not 0 <= start <= stop <= one.num_rows:
            raise IndexError(f"rows {start}:{stop} of {name}, which has {one.num_rows}")
        if part:
            self.source.read_into(one.tensor, start * one.step, stop * one.step, target)
            return (stop - start) * one.row_bytes
        begin = 0  # of the window, in our rows
        for window in self.windows[name]:
            first = max(start, begin)
            last = min(stop, begin + window.stop - window.start)
            if first < last:
                shift = window.start - begin
                piece = target[(first - start) * one.row_bytes :]
                self.source.read_into(window.tensor, first + shift, last + shift, piece)
            begin += window.stop - window.start
        return (stop - start) * one.row_bytes


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How one layout under one prefix fares."""

    layout: Layout
    prefix: str
    quantised: dict[str, Quantised]
    mismatch: Mismatch


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
    search = _Search(source, States(source), table, adopts)
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
    if any(source.tensors[name].dtype in _BARE_FLOAT8 for name in used):
        foreign = foreign_fault(source.files, source.tensors)
        if foreign is not None:  # scales under names that are not known here would be left out
            raise SourceError(foreign)
    extra = tuple(name for name in source.tensors if search.states.weight_of(name) not in used)
    return MappedSource(
        source, table, best.layout.name, best.prefix, windows, best.quantised, extra
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """A table looked for in a source."""

    source: RowReader
    states: States
    table: ShapeTable
    adopts: Adopts | None

    def attempts(self, layouts: Sequence[Layout]) -> Iterator[_Attempt]:
        """One for each layout that knows the table, under each of its prefixes."""
        for layout in layouts:
            try:
                for spec in self.table:
                    layout.rule_of(spec.name)
            except KeyError:
                continue
            for prefix in layout.prefixes:
                yield self._try(layout, prefix)

    def _try(self, layout: Layout, prefix: str) -> _Attempt:
        needed, missing, quantised = set(), [], {}
        wrong: dict[tuple[str, str], None] = {}
        unfit: dict[tuple[str, str], None] = {}
        is_damaged = False
        for spec in self.table:
            rule, theirs = layout.rule_of(spec.name)
            name = prefix + theirs
            num_rows = [extent * rule.part[1] // rule.span for extent in spec.shape[:1]]
            expected = (*num_rows, *spec.shape[1:], *[1] * rule.ones)
            found, faults = self.states.find(name, expected)
            if found is not None:
                quantised[spec.name] = found
                faults = tuple(self._unadopted(found, spec, rule))
            is_damaged |= found is None and bool(faults)
            unfit |= dict.fromkeys((name, fault) for fault in faults)
            if found is None and not faults:
                if name not in self.source.tensors:
                    missing += [name] if name not in needed else []
                elif (fault := self._fault(name, expected, spec)) is not None:
                    wrong[name, fault] = None
            needed.add(name)
        mismatch = Mismatch(
            layout.name, frozenset(needed), tuple(missing), tuple(wrong), tuple(unfit), is_damaged
        )
        return _Attempt(layout, prefix, quantised, mismatch)

    def _unadopted(self, found: Quantised, spec: TensorSpec, rule: Rule) -> Iterator[str]:
        """Why a matrix in 4 bits cannot be taken."""
        if rule.part != (0, 1) or rule.is_swapped:
            yield "is in 4 bits together with others, which cannot be cut apart"
            return
        fault = None if self.adopts is None else self.adopts(found.form, spec.shape)
        if fault is not None:
            yield fault

    def _fault(self, name: str, expected: tuple[int, ...], spec: TensorSpec) -> str | None:
        """What is wrong with a tensor that is there, unpacked."""
        shape = self.source.tensors[name].shape
        if _core(shape) != _core(expected):
            return f"has shape {list(shape)}, expected {list(expected)}"
        return _dtype_fault(self.source, name, spec)


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without trailing ones: a 1x1 convolution holds the same numbers as a linear."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _dtype_fault(source: RowReader, name: str, spec: TensorSpec) -> str | None:
    dtype = source.tensors[name].dtype
    if dtype in _FLOATS or spec.role == "buffer":
        return None
    if dtype not in _BARE_FLOAT8:
        return f"is stored as {dtype}: these weights are already quantised; take the bf16 files"
    stem = name.removesuffix("weight")
    scale = next((stem + end for end in _SCALES if stem + end in source.tensors), None)
    if scale is not None:
        return f"is {dtype} scaled by {scale}, which is not read yet; take the bf16 files"
    return None


def _windows(source: RowReader, attempt: _Attempt, spec: TensorSpec) -> tuple[Window, ...]:
    windows = []
    if spec.name in attempt.quantised:
        codes = attempt.quantised[spec.name].parts[-1]
        return (Window(codes.tensor, 0, codes.num_rows * codes.step),)
    for slab in attempt.layout.slabs(spec.name):
        name = attempt.prefix + slab.tensor
        shape = source.tensors[name].shape
        windows.append(Window(name, *slab.rows(shape[0] if shape else 1)))
    return tuple(windows)
