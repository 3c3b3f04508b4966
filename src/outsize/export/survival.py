"""How much of a delta survives being added to weights of few bits.

A merged weight is rounded to what its type or format can hold. Of the delta D there remains S, the difference that the
rounding lets through. Three figures tell of it: |S| / |D|; the cosine between both; and their product, the share of D that
S has along D. Rounding to few bits adds noise, which lowers the cosine; where D is smaller than half a step and the weights
lie on the grid already, S is nothing at all.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Survival:
    """Of one delta. norm: of D. num_elements: of the weight."""

    norm: float
    ratio: float
    cosine: float
    num_elements: int

    @property
    def share(self) -> float:
        """Of D along itself: 1 where nothing was lost on average."""
        return self.ratio * self.cosine


@dataclass
class _Sums:
    DD: float = 0.0
    SS: float = 0.0
    DS: float = 0.0
    count: int = 0

    def add(self, other: _Sums) -> None:
        self.DD += other.DD
        self.SS += other.SS
        self.DS += other.DS
        self.count += other.count

    def figures(self) -> Survival:
        if not self.DD:
            return Survival(0.0, 1.0, 1.0, self.count)
        cosine = self.DS / math.sqrt(self.DD * self.SS) if self.SS else 0.0
        return Survival(math.sqrt(self.DD), math.sqrt(self.SS / self.DD), cosine, self.count)


@dataclass
class Meter:
    """Adds up windows of many weights, from several threads; by way of merging and module."""

    _sums: dict[str, dict[str, _Sums]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, way: str, module: str, D: Tensor, S: Tensor) -> None:
        """A window of a weight; D and S of one shape."""
        D64, S64 = D.double().flatten(), S.double().flatten()
        found = _Sums(float(D64 @ D64), float(S64 @ S64), float(D64 @ S64), D64.numel())
        with self._lock:
            self._sums.setdefault(way, {}).setdefault(module, _Sums()).add(found)

    @property
    def ways(self) -> tuple[str, ...]:
        """Ways of merging that were measured."""
        return tuple(self._sums)

    def of_modules(self, way: str) -> dict[str, Survival]:
        """By module."""
        return {module: one.figures() for module, one in sorted(self._sums[way].items())}

    def overall(self, way: str) -> Survival:
        """Of all deltas together."""
        total = _Sums()
        for one in self._sums[way].values():
            total.add(one)
        return total.figures()
