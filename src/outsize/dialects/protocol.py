"""What a dialect is: how one kind of client names, fuses and scales an adapter's tensors in its files.

An adapter in memory is a low-rank pair per module, under our (upstream's) module paths, with one scale for all: the
weight W of a module becomes W + scale * B @ A. A dialect turns that into files and back and knows no family: what a
client calls a module, and which modules it fuses, comes from the family's layouts. Modules here import without torch.

Dimensions: r rank, N out_features, K in_features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from outsize.base.catalogue import Catalogue
from outsize.base.errors import AdapterError
from outsize.base.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

DIALECTS = Catalogue("outsize.dialects", "dialect")


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The two factors of one module's delta.

    Shapes: A (r, K), B (N, r).
    Raises: AdapterError when they do not fit each other.
    """

    A: Tensor
    B: Tensor

    def __post_init__(self) -> None:
        if self.A.ndim != 2 or self.B.ndim != 2 or self.A.shape[0] != self.B.shape[1]:
            raise AdapterError(
                f"A {tuple(self.A.shape)} and B {tuple(self.B.shape)} are not the factors (r, K) and "
                f"(N, r) of a matrix"
            )

    @property
    def rank(self) -> int:
        """The inner dimension r."""
        return self.A.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A low-rank adapter by module path.

    rank, alpha: as the recipe states them; their quotient is the scale of every pair, whatever a pair's own rank is.
    lengths: of DoRA: to what each row of W + scale * B @ A is brought, (N) for every module; empty: rows stay as they are.
    subjects: ids of the people whom it shows, wherever it goes.
    Raises: AdapterError when there is no pair, the rank is not positive, alpha is zero or no number, or lengths are not
    those of the modules.
    """

    pairs: Mapping[str, LoraPair]
    rank: int
    alpha: float
    lengths: Mapping[str, Tensor] = field(default_factory=dict)
    subjects: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.pairs:
            raise AdapterError("the adapter holds no module; nothing was matched or trained")
        if self.rank < 1:
            raise AdapterError(f"the adapter's rank is {self.rank}; it must be at least 1")
        if not math.isfinite(self.alpha) or self.alpha == 0:
            raise AdapterError(
                f"the adapter's alpha is {self.alpha}; with it the adapter does nothing"
            )
        odd = sorted(
            module
            for module in {*self.lengths, *(self.pairs if self.lengths else ())}
            if module not in self.lengths
            or module not in self.pairs
            or self.lengths[module].shape != self.pairs[module].B.shape[:1]
        )
        if odd:
            raise AdapterError(f"lengths of rows (DoRA) do not fit {', '.join(odd)}")

    @property
    def scale(self) -> float:
        """What B @ A is multiplied with."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, eq=False)
class TensorFile:
    """The content of one safetensors file: tensors by key, and its metadata (string to string)."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class JsonFile:
    """The content of one JSON file."""

    value: Any  # any JSON value


AdapterFile = TensorFile | JsonFile


class Dialect(Protocol):
    """Files of one kind of client."""

    @property
    def is_folder(self) -> bool:
        """Whether clients are given a folder of named files; if not, one file whose name is free."""

    def write(
        self, adapter: AdapterWeights, layouts: Sequence[Layout], metadata: Mapping[str, str]
    ) -> dict[str, AdapterFile]:
        """Give the files by name; exactly one when the dialect is no folder.

        metadata: goes into the safetensors headers; "outsize.source", when given, names the base for clients, and
        "outsize.task" what PEFT takes it for.
        Raises: AdapterError naming all modules that the layouts do not cover or that cannot be fused.
        """

    def read(self, files: Mapping[str, AdapterFile], layouts: Sequence[Layout]) -> AdapterWeights:
        """Give the adapter that `write` made these files of, or one with the same deltas.

        Raises: AdapterError naming all keys that are unknown, missing or misshapen.
        """


def plain_pairs(adapter: AdapterWeights, why: str) -> Mapping[str, LoraPair]:
    """The pairs of an adapter that is nothing else. why: what cannot be done with lengths of rows.

    Raises: AdapterError when the adapter is DoRA.
    """
    if adapter.lengths:
        raise AdapterError(
            f"this adapter also learned the lengths of {len(adapter.lengths)} modules' rows (adapter.kind: dora): {why}"
        )
    return adapter.pairs


def as_text(alpha: float) -> str:
    """Alpha as a header states it: to the last bit, whole numbers without a point."""
    return repr(float(alpha)).removesuffix(".0")


class Claiming(Protocol):
    """A dialect whose files can be told by their keys, so that nobody has to say which it is; the others are asked for."""

    def claims(self, keys: Sequence[str]) -> int:
        """How many of the keys of a file's tensors are of its kind."""


def dialect_of(keys: Sequence[str]) -> str:
    """The dialect that most keys of a file are of; where several read the same files, the first by name.

    Raises: AdapterError showing some keys, when no dialect knows any.
    """
    counts = {}
    for name in DIALECTS.names():
        claims = getattr(DIALECTS.load(name), "claims", None)
        counts[name] = 0 if claims is None else claims(keys)
    best = max(counts, key=lambda name: counts[name])
    if not counts[best]:
        shown = ", ".join(sorted(keys)[:3]) or "none"
        raise AdapterError(
            f"no dialect ({', '.join(counts)}) knows the keys of this file, as in {shown}; low-rank pairs are read, "
            "LoKr, LoHa and whole weights are not"
        )
    return best
