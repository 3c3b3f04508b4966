"""Tensors in 8-bit floats whose scales lie beside them, as ComfyUI, Black Forest Labs and trainers write them.

Beside `X.weight` in e4m3 or e5m2 lies `X.scale_weight` or `X.weight_scale`: one number, one for each row, or one for each
group along a row. The weight is their product with the 8-bit numbers. Scales of activations (`scale_input`, `input_scale`)
and ComfyUI's marks (`scaled_fp8`, `comfy_quant`, `_quantization_metadata`) are known and change no weight; whatever else lies
beside such a tensor is named as a fault, since a scale left out is a model a thousand times too large.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from outsize.base.errors import SourceError
from outsize.base.files import parse_json
from outsize.base.table import TensorSpec
from outsize.weights.header import Header, TensorInfo

SCALE = "scale"  # what the part is called in which a tensor's scales are read
FLOAT8 = ("F8_E4M3", "F8_E5M2")
_OF_WEIGHTS = ("scale_weight", "weight_scale")
_OF_ACTIVATIONS = ("scale_input", "input_scale")
_MARK = "comfy_quant"
_KNOWN = frozenset({"weight", "bias", *_OF_WEIGHTS, *_OF_ACTIVATIONS, _MARK})
_SCALE_DTYPES = ("F32", "BF16", "F16")
_MARKED_DTYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_HOW_TO_MULTIPLY = "full_precision_matrix_mult"  # says nothing of the weight
_METADATA = "_quantization_metadata"
_MAX_MARK_BYTES = 10_000  # it holds about 30


class Reader(Protocol):
    """What this module needs of a source."""

    @property
    def headers(self) -> tuple[Header, ...]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read_into(self, name: str, start: int, stop: int, target: memoryview) -> int: ...


@dataclass(frozen=True, slots=True)
class Scaled:
    """Where the scales of one tensor of the files lie.

    per_row: scales for each of its rows; 0: one for all.
    """

    tensor: str
    dtype: str
    per_row: int

    def __str__(self) -> str:
        return f"scaled {self.dtype} x {self.per_row}"


def holds_float8(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether any tensor is in 8-bit floats."""
    return any(info.dtype in FLOAT8 for info in tensors.values())


class Scales:
    """The scales in a source's files, by the tensor to which they belong."""

    def __init__(self, source: Reader) -> None:
        self._source = source
        self._marks: dict[str, tuple[str, ...]] = {}
        self._counts: dict[str, int] = {}

    def find(
        self, name: str, spec: TensorSpec, prefix: str
    ) -> tuple[Scaled | None, tuple[str, ...]]:
        """The scales of a tensor that is there, or what is wrong with it; (None, ()) for one that has none.

        prefix: of all names of its model, beside which the file may hold others.
        """
        info = self._source.tensors[name]
        module, _, leaf = name.rpartition(".")
        names = [f"{module}.{end}" for end in _OF_WEIGHTS] if leaf == "weight" and module else []
        there = [one for one in names if one in self._source.tensors]
        if info.dtype not in FLOAT8:
            return None, (f"is {info.dtype}, yet {there[0]} lies beside it",) if there else ()
        faults = [*self._mark_faults(name)]
        if len(there) > 1:
            faults.append(f"has scales twice: {', '.join(there)}")
        elif there:
            faults += _misfit(info, there[0], self._source.tensors[there[0]])
        elif spec.is_linear and self._num_scales(prefix):  # norms and embeddings may be cast
            count = self._num_scales(prefix)
            faults.append(f"is {info.dtype} without a scale, where {count} others have one")
        is_scaled = bool(there) and not faults
        return self._scaled(info, there[0]) if is_scaled else None, tuple(faults)

    def strangers(self, name: str, needed: Collection[str]) -> Iterator[str]:
        """What lies beside a tensor in 8-bit floats that neither the model needs nor anybody knows."""
        module = name.rpartition(".")[0]
        if not module or self._source.tensors[name].dtype not in FLOAT8:
            return
        for one in (*self._by_module.get(module, ()), *self._by_module.get(name, ())):
            leaf = one.rpartition(".")[2]
            is_known = leaf in _KNOWN and one == f"{module}.{leaf}"
            if not is_known and one not in needed:
                yield f"has {one} beside it, and what that does to it is not known"

    @cached_property
    def _by_module(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._source.tensors:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    def _num_scales(self, prefix: str) -> int:
        if prefix not in self._counts:
            self._counts[prefix] = sum(
                name.startswith(prefix) and name.rpartition(".")[2] in _OF_WEIGHTS
                for name in self._source.tensors
            )
        return self._counts[prefix]

    def _scaled(self, info: TensorInfo, scale: str) -> Scaled:
        there = self._source.tensors[scale]
        count = math.prod(there.shape)
        return Scaled(scale, there.dtype, 0 if count == 1 else count // info.shape[0])

    def _mark_faults(self, name: str) -> tuple[str, ...]:
        """What ComfyUI's marks say of a tensor that is not understood."""
        if name not in self._marks:
            self._marks[name] = tuple(self._read_marks(name))
        return self._marks[name]

    def _read_marks(self, name: str) -> Iterator[str]:
        module = name.rpartition(".")[0]
        dtype = self._source.tensors[name].dtype
        if f"{module}.{_MARK}" in self._source.tensors:
            yield from _unknown_words(self._mark(f"{module}.{_MARK}"), _MARK, dtype)
        for layer, value in self._layers.items():
            if module == layer or module.endswith(f".{layer}"):
                yield from _unknown_words(value, _METADATA, dtype)

    def _mark(self, name: str) -> Any:
        """What a mark says; None when it cannot be read."""
        info = self._source.tensors[name]
        if len(info.shape) != 1 or info.num_bytes > _MAX_MARK_BYTES:
            return None
        raw = bytearray(info.num_bytes)
        self._source.read_into(name, 0, info.shape[0], memoryview(raw))
        try:
            return parse_json(raw)
        except ValueError:
            return None

    @cached_property
    def _layers(self) -> dict[str, Any]:
        """What the headers say of modules, by name, with the model's prefix or without.

        Raises: SourceError when that cannot be read.
        """
        found: dict[str, Any] = {}
        for header in self._source.headers:
            try:
                found |= parse_json(header.metadata.get(_METADATA, "{}")).get("layers", {})
            except (ValueError, AttributeError, TypeError) as error:
                raise SourceError(
                    f"{header.file} says in {_METADATA} how it is quantised, which cannot be read ({error!r}); "
                    "take the model's bf16 files"
                ) from error
        return found


def _unknown_words(mark: Any, where: str, dtype: str) -> Iterator[str]:
    """What a mark says that is not understood; it is a mapping with a `format`."""
    if not isinstance(mark, dict):
        yield f"has a {where} that cannot be read"
        return
    kind = mark.get("format")
    if _MARKED_DTYPES.get(str(kind)) != dtype:
        yield f"is {dtype}, but {kind} in {where}"
    for word, value in mark.items():
        if value and word not in ("format", _HOW_TO_MULTIPLY):
            yield f"says {word}: {value} in {where}, and what that does to it is not known"


def _misfit(info: TensorInfo, name: str, scale: TensorInfo) -> Iterator[str]:
    """Why scales are not those of a tensor's rows."""
    if scale.dtype not in _SCALE_DTYPES:
        yield f"is scaled by {name}, which is {scale.dtype}, expected one of {', '.join(_SCALE_DTYPES)}"
    count, num_rows = math.prod(scale.shape), info.shape[0] if info.shape else 1
    if count == 1:
        return
    num_columns = math.prod(info.shape[1:])
    is_by_row = scale.shape[0] == num_rows and count % num_rows == 0
    if not (is_by_row and count and num_columns % (count // num_rows) == 0):
        yield (
            f"has shape {list(info.shape)} and scales of shape {list(scale.shape)} in {name}: "
            "neither one, nor some for each row"
        )
