"""Weights and deltas by windows of rows, under the names of the files they come from or under ours.

A merged checkpoint keeps the names of its source where it can: each tensor of a file is patched with the rows of the
deltas that lie in it, so fused matrices stay fused and what no delta touches is copied byte for byte. A matrix in 4 bits,
and a merged base that is to be one, is taken by our names instead.

Dimensions: R rows of one window, K columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from outsize.base.errors import SourceError
from outsize.base.quantised import CODES
from outsize.weights.checkpoint_writer import NewTensor
from outsize.weights.dtypes import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.base.layout import Layout
    from outsize.base.table import ShapeTable
    from outsize.dialects.protocol import AdapterWeights
    from outsize.formats._packing import Packing
    from outsize.formats.protocol import Adopter
    from outsize.weights.mapping import MappedSource
    from outsize.weights.source import Source

_WEIGHT = ".weight"
_ROUNDED = {"F16", "BF16", "F32", "F64"}  # types that weights are added in and rounded back to


@dataclass(frozen=True, slots=True)
class Patch:
    """Rows [start, stop) of a tensor of the files get the rows of a module's delta from `first` on."""

    start: int
    stop: int
    module: str
    first: int


class Deltas:
    """Rows of every module's delta, fp32; the factors are kept in fp32 with the scale in B."""

    def __init__(self, adapter: AdapterWeights) -> None:
        self._A = {name: one.A.float() for name, one in adapter.pairs.items()}
        self._B = {
            name: (one.B.double() * adapter.scale).float() for name, one in adapter.pairs.items()
        }

    @property
    def modules(self) -> tuple[str, ...]:
        """All that have one."""
        return tuple(self._A)

    def rows(self, module: str, start: int, stop: int) -> Tensor:
        """(R, K)."""
        return self._B[module][start:stop] @ self._A[module]


class Rows(Protocol):
    """What is to be written: tensors by name, and windows of what they are made of."""

    def tensors(self) -> tuple[NewTensor, ...]:
        """In the order in which they are written."""

    def module_of(self, name: str) -> str | None:
        """What a tensor's delta is counted under; None when nothing is added to it."""

    def raw(self, name: str, start: int, stop: int, into: memoryview) -> None:
        """The bytes of whole rows of a tensor that nothing is added to."""

    def window(self, name: str, start: int, stop: int, deltas: Deltas) -> tuple[Tensor, Tensor]:
        """Rows of a weight as stored, and of the delta (fp32)."""


class FileRows:
    """Every tensor of the source's files, as it is named and fused there."""

    def __init__(self, source: Source, mapped: MappedSource, deltas: Deltas) -> None:
        self._source = source
        self._patches: dict[str, list[Patch]] = {}
        for module in deltas.modules:
            first = 0
            for window in mapped.windows[module + _WEIGHT]:
                patch = Patch(window.start, window.stop, module, first)
                self._patches.setdefault(window.tensor, []).append(patch)
                first += window.stop - window.start
        refuse_unrounded({name: source.tensors[name].dtype for name in self._patches})

    def tensors(self) -> tuple[NewTensor, ...]:
        return tuple(
            NewTensor(name, info.dtype, info.shape) for name, info in self._source.tensors.items()
        )

    def module_of(self, name: str) -> str | None:
        return name.removesuffix(_WEIGHT) if name in self._patches else None

    def raw(self, name: str, start: int, stop: int, into: memoryview) -> None:
        self._source.read_into(name, start, stop, into)

    def window(self, name: str, start: int, stop: int, deltas: Deltas) -> tuple[Tensor, Tensor]:
        info = self._source.tensors[name]
        buffer = torch.empty((stop - start) * info.num_bytes // info.shape[0], dtype=torch.uint8)
        weight = self._source.read_rows(name, start, stop, buffer)
        delta = torch.zeros(weight.shape, dtype=torch.float32)
        for patch in self._patches[name]:
            begin, end = max(start, patch.start), min(stop, patch.stop)
            if begin < end:
                shift = patch.first - patch.start
                delta[begin - start : end - start] = deltas.rows(
                    patch.module, begin + shift, end + shift
                )
        return weight, delta


class OurRows:
    """The table's tensors, each by itself, and what else goes along; matrices in 4 bits are decoded as bitsandbytes does.

    layout, prefix: how they are called. extra: names of the source's other tensors, copied as they are.
    """

    def __init__(
        self,
        mapped: MappedSource,
        packing: Packing,
        deltas: Deltas,
        *,
        layout: Layout,
        prefix: str,
        extra: Sequence[str],
    ) -> None:
        self._mapped, self._packing, self._extra = mapped, packing, tuple(extra)
        self._modules = set(deltas.modules)
        self._ours = {prefix + layout.rule_of(spec.name)[1]: spec for spec in mapped.table}
        self._adopters: tuple[str, Adopter | None] = ("", None)
        refuse_unrounded(
            {
                name: mapped.info(spec.name).dtype
                for name, spec in self._ours.items()
                if (self.module_of(name) is not None and spec.name not in mapped.quantised)
                or spec.name in mapped.scaled  # its codes alone would be another matrix
            }
        )

    @property
    def table(self) -> ShapeTable:
        """What is there."""
        return self._mapped.table

    @property
    def is_decoding(self) -> bool:
        """Whether windows are decoded, which is one thread's work at a time."""
        return bool(self._mapped.quantised)

    def our_names(self) -> list[tuple[str, str]]:
        """Names as they are written, each with ours."""
        return [(name, spec.name) for name, spec in self._ours.items()]

    def decoded_dtype(self) -> str:
        """Torch's name of the type that matrices have, or are decoded to."""
        found = Counter(self._dtype(spec.name) for spec in self._ours.values() if spec.is_linear)
        return str(torch_dtype(found.most_common(1)[0][0])).removeprefix("torch.")

    def tensors(self) -> tuple[NewTensor, ...]:
        ours = [
            NewTensor(name, self._dtype(spec.name), spec.shape) for name, spec in self._ours.items()
        ]
        infos = self._mapped.source.tensors
        return (*ours, *(NewTensor(one, infos[one].dtype, infos[one].shape) for one in self._extra))

    def module_of(self, name: str) -> str | None:
        if name not in self._ours:
            return None
        module = self._ours[name].module
        return module if module in self._modules and name.endswith(_WEIGHT) else None

    def raw(self, name: str, start: int, stop: int, into: memoryview) -> None:
        if name not in self._ours:
            self._mapped.source.read_into(name, start, stop, into)
            return
        ours = self._ours[name].name
        if ours not in self._mapped.quantised:
            self._mapped.read_into(ours, start, stop, into)
            return
        decoded = self._decoded(ours, start, stop).contiguous().view(torch.uint8).flatten()
        into[: decoded.numel()] = decoded.numpy().data

    def window(self, name: str, start: int, stop: int, deltas: Deltas) -> tuple[Tensor, Tensor]:
        weight = self.weight(name, start, stop)
        module = self.module_of(name)
        assert module is not None, "asked for where something is added"
        return weight, deltas.rows(module, start, stop)

    def weight(self, name: str, start: int, stop: int) -> Tensor:
        """Rows (R, K) as stored, or as decoded."""
        ours = self._ours[name].name
        if ours in self._mapped.quantised:
            return self._decoded(ours, start, stop)
        num_bytes = (stop - start) * self._mapped.row_bytes(ours)
        return self._mapped.read_rows(ours, start, stop, torch.empty(num_bytes, dtype=torch.uint8))

    def _dtype(self, ours: str) -> str:
        if ours in self._mapped.quantised:
            return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[
                self._mapped.quantised[ours].form.dtype
            ]
        return self._mapped.info(ours).dtype

    def _decoded(self, ours: str, start: int, stop: int) -> Tensor:
        codes = self._read(ours, CODES, start, stop)
        return self._adopter(ours).decode(codes, start)

    def _adopter(self, ours: str) -> Adopter:
        """Kept for the matrix that is being read, as its scales are needed for every window."""
        kept, adopter = self._adopters
        if kept != ours:
            found = self._mapped.quantised[ours]
            stored = {
                part.part: self._read(ours, part.part, 0, part.num_rows).view(
                    torch_dtype(part.dtype)
                )
                for part in found.parts
                if part.part != CODES
            }
            adopter = self._packing.adopter(ours, found.form, stored)
            self._adopters = (ours, adopter)
        assert adopter is not None, "it was just made"
        return adopter

    def _read(self, ours: str, part: str, start: int, stop: int) -> Tensor:
        row_bytes = next(one.row_bytes for one in self._mapped.parts(ours) if one.part == part)
        raw = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        self._mapped.read_into(ours, start, stop, raw.numpy().data, part)
        return raw


def refuse_unrounded(dtypes: Mapping[str, str]) -> None:
    """Raise SourceError naming every tensor of a type that a delta cannot be added to and rounded back."""
    wrong = [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in _ROUNDED]
    if wrong:
        listed = "\n  ".join(wrong)
        raise SourceError(
            f"{len(wrong)} weights to merge into are neither in 16 nor 32 bits; name the bf16 files as base.source:\n  {listed}"
        )
