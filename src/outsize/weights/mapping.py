"""A family's tensors in a checkpoint's files: which layout names them, and where their rows lie.

A layout fits when every name is there and every shape and dtype is right. When none fits, the error speaks of the
nearest one and lists everything that is wrong with it, numbered names drawn together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from outsize.base.errors import SourceError
from outsize.base.layout import Layout
from outsize.base.table import ShapeTable, TensorSpec
from outsize.weights.dtypes import torch_dtype
from outsize.weights.header import Header, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS = {"F64", "F32", "F16", "BF16"}
_BARE_FLOAT8 = {"F8_E4M3", "F8_E5M2"}  # a plain cast, if nothing beside it scales it
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "scale_weight")
_MAX_EXTRA = 12  # what the files hold besides is a hint, not a fault, and stays short


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

    extra: names in the files that the table does not use (layers beyond those read, output heads, vision towers).
    """

    source: RowReader
    table: ShapeTable
    layout: str
    prefix: str
    windows: dict[str, tuple[Window, ...]]
    extra: tuple[str, ...]

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        return self.table.by_name

    def info(self, name: str) -> TensorInfo:
        """The file tensor in which one of our tensors lies."""
        return self.source.tensors[self.windows[name][0].tensor]

    def num_rows(self, name: str) -> int:
        """Rows of dimension 0; one for a tensor without dimensions."""
        shape = self._specs[name].shape
        return shape[0] if shape else 1

    def row_bytes(self, name: str) -> int:
        """Bytes of one row in the file; all of a tensor without dimensions."""
        info = self.info(name)
        num_rows = info.shape[0] if info.shape else 1
        return info.num_bytes // num_rows if num_rows else 0

    def tensor_bytes(self, name: str) -> int:
        """Bytes that are read for one of our tensors."""
        return self.row_bytes(name) * self.num_rows(name)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that are read for the whole table."""
        return sum(self.tensor_bytes(name) for name in self.windows)

    def read_rows(self, name: str, start: int, stop: int, into: Tensor) -> Tensor:
        """Rows [start, stop) of one of our tensors, wherever its slabs lie.

        Arguments, result and errors as Source.read_rows; the shape is (stop - start, ...) of the table.
        """
        num_bytes = self.read_into(name, start, stop, into.numpy().data)
        shape = self._specs[name].shape
        raw = into[:num_bytes].view(torch_dtype(self.info(name).dtype))
        return raw.view((stop - start, *shape[1:]) if shape else ())

    def read_into(self, name: str, start: int, stop: int, target: memoryview) -> int:
        """The bytes of rows [start, stop) of one of our tensors, in our order; arguments as Source.read_into."""
        num_rows, row_bytes = self.num_rows(name), self.row_bytes(name)
        if not 0 <= start <= stop <= num_rows:
            raise IndexError(f"rows {start}:{stop} of {name}, which has {num_rows}")
        begin = 0  # of the window, in our rows
        for window in self.windows[name]:
            first = max(start, begin)
            last = min(stop, begin + window.stop - window.start)
            if first < last:
                shift = window.start - begin
                piece = target[(first - start) * row_bytes :]
                self.source.read_into(window.tensor, first + shift, last + shift, piece)
            begin += window.stop - window.start
        return (stop - start) * row_bytes


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How one layout under one prefix fares."""

    layout: Layout
    prefix: str
    missing: tuple[str, ...]
    wrong: tuple[tuple[str, str], ...]  # (name in the file, what is wrong with it)

    @property
    def num_faults(self) -> int:
        return len(self.missing) + len(self.wrong)


def map_source(source: RowReader, layouts: Sequence[Layout], table: ShapeTable) -> MappedSource:
    """Find the first layout under which the source holds every tensor of the table.

    Raises: SourceError listing all missing, misshapen and unusable tensors of the nearest layout.
    """
    attempts = list(_attempts(source, layouts, table))
    if not attempts:
        names = ", ".join(layout.name for layout in layouts) or "none"
        raise SourceError(f"no layout ({names}) has rules for every tensor of the shape table")
    best = min(attempts, key=lambda attempt: attempt.num_faults)
    if best.num_faults:
        raise SourceError(_message(source, best, table))
    windows = {spec.name: _windows(source, best, spec) for spec in table}
    used = {window.tensor for several in windows.values() for window in several}
    extra = tuple(name for name in source.tensors if name not in used)
    return MappedSource(source, table, best.layout.name, best.prefix, windows, extra)


def _attempts(
    source: RowReader, layouts: Sequence[Layout], table: ShapeTable
) -> Iterator[_Attempt]:
    for layout in layouts:
        try:
            for spec in table:
                layout.rule_of(spec.name)
        except KeyError:
            continue
        for prefix in layout.prefixes:
            yield _try(source, layout, prefix, table)


def _try(source: RowReader, layout: Layout, prefix: str, table: ShapeTable) -> _Attempt:
    missing: dict[str, None] = {}
    wrong: dict[tuple[str, str], None] = {}
    for spec in table:
        rule, theirs = layout.rule_of(spec.name)
        info = source.tensors.get(prefix + theirs)
        if info is None:
            missing[prefix + theirs] = None
            continue
        num_rows = [extent * rule.part[1] // rule.span for extent in spec.shape[:1]]
        expected = (*num_rows, *spec.shape[1:], *[1] * rule.ones)
        if _core(info.shape) != _core(expected):
            fault = f"has shape {list(info.shape)}, expected {list(expected)}"
            wrong[(prefix + theirs, fault)] = None
        elif (unusable := _dtype_fault(source, prefix + theirs, spec)) is not None:
            wrong[(prefix + theirs, unusable)] = None
    return _Attempt(layout, prefix, tuple(missing), tuple(wrong))


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
    for slab in attempt.layout.slabs(spec.name):
        name = attempt.prefix + slab.tensor
        shape = source.tensors[name].shape
        windows.append(Window(name, *slab.rows(shape[0] if shape else 1)))
    return tuple(windows)


def _message(source: RowReader, attempt: _Attempt, table: ShapeTable) -> str:
    rules = [attempt.layout.rule_of(spec.name)[1] for spec in table]
    needed = {attempt.prefix + name for name in rules}
    extra = [name for name in source.tensors if name not in needed]
    where = ", ".join(str(file) for file in source.files[:3])
    more = f" and {len(source.files) - 3} files more" if len(source.files) > 3 else ""
    lines = [f"{where}{more} do not hold the model; nearest is layout {attempt.layout.name!r}"]
    if attempt.missing:
        lines.append(f"missing ({len(attempt.missing)} of {len(needed)}):")
        lines += [f"  {text}" for text in draw_together((name, "") for name in attempt.missing)]
    if attempt.wrong:
        lines.append(f"not as expected ({len(attempt.wrong)}):")
        lines += [f"  {text}" for text in draw_together(attempt.wrong)]
    if extra and attempt.missing:
        drawn = draw_together((name, "") for name in extra)
        lines.append(f"in the files, but of no use ({len(extra)}):")
        lines += [f"  {text}" for text in drawn[:_MAX_EXTRA]]
        if len(drawn) > _MAX_EXTRA:
            lines.append(f"  and {len(drawn) - _MAX_EXTRA} groups of names more")
    lines.append(_remedy(attempt, len(needed)))
    return "\n".join(lines)


def _remedy(attempt: _Attempt, num_needed: int) -> str:
    if len(attempt.missing) == num_needed:
        return "This looks like another model: check the path, and `family` in the recipe."
    if attempt.wrong and not attempt.missing:
        return "The names fit and the tensors do not: check `variant` in the recipe."
    return (
        "If shards were left out (no index beside the files), download them; "
        "else check `family` and `variant` in the recipe."
    )


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def draw_together(names: Iterable[tuple[str, str]]) -> list[str]:
    """Names with remarks as lines, those that differ in their numbers only as one: "blocks.{0..7}.w (8)"."""
    groups: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for name, remark in names:
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        groups.setdefault((_NUMBER.sub("\0", name), remark), []).append(numbers)
    lines = []
    for (pattern, remark), rows in groups.items():
        columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
        pieces = pattern.split("\0")
        text = pieces[0] + "".join(
            _ranges(column) + piece for column, piece in zip(columns, pieces[1:], strict=True)
        )
        count = f" ({len(rows)})" if len(rows) > 1 else ""
        lines.append(f"{text}{count}{' ' if remark else ''}{remark}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as text: "3", "{0..7}", "{0..2,5}"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
    return text if len(numbers) == 1 else "{" + text + "}"
