"""How each layout of a family fares in a source's files: what is there, what is missing, and what cannot be used.

A tensor may lie there as itself, as a matrix in 4 bits with its state (weights/quantised.py), or in 8-bit floats with scales
beside it (weights/scaled.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from outsize.base.layout import Layout, Rule
from outsize.base.quantised import StoredForm
from outsize.base.table import ShapeTable, TensorSpec
from outsize.weights.header import Header, TensorInfo
from outsize.weights.mismatch import Mismatch
from outsize.weights.quantised import Quantised, States
from outsize.weights.scaled import FLOAT8, Scaled, Scales

_FLOATS = {"F64", "F32", "F16", "BF16", *FLOAT8}

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
class Attempt:
    """How one layout under one prefix fares."""

    layout: Layout
    prefix: str
    quantised: dict[str, Quantised]
    scaled: dict[str, Scaled]
    mismatch: Mismatch


@dataclass(slots=True)
class _Found:
    """What one layout has come to so far; see Mismatch."""

    needed: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    quantised: dict[str, Quantised] = field(default_factory=dict)
    scaled: dict[str, Scaled] = field(default_factory=dict)
    wrong: dict[tuple[str, str], None] = field(default_factory=dict)
    unfit: dict[tuple[str, str], None] = field(default_factory=dict)
    unread: dict[tuple[str, str], None] = field(default_factory=dict)
    is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class Search:
    """A table looked for in a source."""

    source: RowReader
    states: States
    scales: Scales
    table: ShapeTable
    adopts: Adopts | None

    def attempts(self, layouts: Sequence[Layout]) -> Iterator[Attempt]:
        """One for each layout that knows the table, under each of its prefixes."""
        for layout in layouts:
            try:
                for spec in self.table:
                    layout.rule_of(spec.name)
            except KeyError:
                continue
            for prefix in layout.prefixes:
                yield self._try(layout, prefix)

    def _try(self, layout: Layout, prefix: str) -> Attempt:
        found = _Found()
        for spec in self.table:
            rule, theirs = layout.rule_of(spec.name)
            self._look(found, spec, rule, prefix, theirs)
        for name in found.needed & self.source.tensors.keys():
            strangers = self.scales.strangers(name, found.needed)
            found.unread |= dict.fromkeys((name, fault) for fault in strangers)
        mismatch = Mismatch(
            layout.name,
            frozenset(found.needed),
            tuple(found.missing),
            tuple(found.wrong),
            tuple(found.unfit),
            found.is_damaged,
            tuple(found.unread),
        )
        return Attempt(layout, prefix, found.quantised, found.scaled, mismatch)

    def _look(self, found: _Found, spec: TensorSpec, rule: Rule, prefix: str, theirs: str) -> None:
        """Look for one tensor of the table; theirs: the name of that in which it lies, without prefix."""
        name = prefix + theirs
        num_rows = [extent * rule.part[1] // rule.span for extent in spec.shape[:1]]
        expected = (*num_rows, *spec.shape[1:], *[1] * rule.ones)
        quantised, faults = self.states.find(name, expected)
        if quantised is not None:
            found.quantised[spec.name] = quantised
            faults = tuple(self._unadopted(quantised, spec, rule))
        found.is_damaged |= quantised is None and bool(faults)
        found.unfit |= dict.fromkeys((name, fault) for fault in faults)
        if quantised is None and not faults:
            if name not in self.source.tensors:
                found.missing += [name] if name not in found.needed else []
            else:
                self._look_at(found, spec, prefix, name, expected)
        found.needed.add(name)

    def _look_at(
        self, found: _Found, spec: TensorSpec, prefix: str, name: str, expected: tuple[int, ...]
    ) -> None:
        """One that is there, and not in 4 bits."""
        info = self.source.tensors[name]
        if _core(info.shape) != _core(expected):
            fault = f"has shape {list(info.shape)}, expected {list(expected)}"
            found.wrong[name, fault] = None
        elif spec.role != "buffer" and info.dtype not in _FLOATS:
            fault = f"is stored as {info.dtype}: these weights are already quantised; take the bf16 files"
            found.wrong[name, fault] = None
        elif spec.role != "buffer":
            scaled, faults = self.scales.find(name, spec, prefix)
            if scaled is not None:
                found.scaled[spec.name] = scaled
            found.unread |= dict.fromkeys((name, fault) for fault in faults)

    def _unadopted(self, found: Quantised, spec: TensorSpec, rule: Rule) -> Iterator[str]:
        """Why a matrix in 4 bits cannot be taken."""
        if rule.part != (0, 1) or rule.is_swapped:
            yield "is in 4 bits together with others, which cannot be cut apart"
            return
        fault = None if self.adopts is None else self.adopts(found.form, spec.shape)
        if fault is not None:
            yield fault


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without trailing ones: a 1x1 convolution holds the same numbers as a linear."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
