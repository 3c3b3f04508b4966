"""Matrices that a checkpoint holds in 4 bits, as bitsandbytes writes them: where their parts lie, and what is wrong.

Beside the packed bytes under the matrix's own name lie its state: `.absmax` (a scale for each group), `.quant_map` (the
values of the codes), `.quant_state.bitsandbytes__TYPE` (JSON as bytes), and with double quantisation `.nested_absmax` and
`.nested_quant_map`, where the scales are bytes themselves. Nothing is decoded here, and no more than the JSON and the
values of the codes is read. Source: bitsandbytes.functional.QuantState.as_dict(packed=True).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from outsize.base.files import parse_json
from outsize.base.parts import DTYPE_BYTES
from outsize.base.quantised import CODES, StoredForm
from outsize.weights.header import TensorInfo

_KEY = re.compile(
    r"(?P<weight>.+)\.(?P<part>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)
_STATE = "quant_state.bitsandbytes__"
_NESTED = ("nested_absmax", "nested_quant_map")
_NUM_VALUES = 16
_MAX_STATE_BYTES = 10_000  # it holds about 170


class Reader(Protocol):
    """What this module needs of a source."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read_into(self, name: str, start: int, stop: int, target: memoryview) -> int: ...


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of a matrix as it lies in a tensor of the file.

    part: its name in our formats. num_rows, row_bytes: of the whole, in our rows. step: rows of the file for one of ours.
    """

    part: str
    tensor: str
    dtype: str
    num_rows: int
    row_bytes: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Quantised:
    """One matrix in 4 bits.

    state: the file's JSON, which the form was read from. parts: the small ones first, the codes, by rows of the matrix, last.
    """

    form: StoredForm
    state: str
    parts: tuple[StoredPart, ...]


def holds_states(names: Iterable[str]) -> bool:
    """Whether any of these names of tensors is that of a state's part."""
    return any(name.endswith(".absmax") for name in names)


class States:
    """The quantisation states in a source's files, by the name of the weight that they belong to."""

    def __init__(self, source: Reader) -> None:
        self._source = source
        self._keys: dict[str, dict[str, str]] = {}
        for name in source.tensors:
            match = _KEY.fullmatch(name)
            if match is not None:
                self._keys.setdefault(match["weight"], {})[match["part"]] = name

    def weight_of(self, name: str) -> str:
        """The weight that a tensor of the files is, or whose state it belongs to."""
        match = _KEY.fullmatch(name)
        return name if match is None else match["weight"]

    def find(self, weight: str, shape: tuple[int, ...]) -> tuple[Quantised | None, tuple[str, ...]]:
        """A matrix of that shape, or everything that is wrong with it; (None, ()) where nothing says it is quantised.

        shape: (N, K) of the matrix.
        """
        keys = self._keys.get(weight, {})
        info = self._source.tensors.get(weight)
        if info is None:
            return None, (f"is not there, {_listed(keys)} of it are",) if keys else ()
        if not keys:
            is_bare = info.dtype == "U8" and 2 * info.num_bytes == math.prod(shape)
            return None, ("is 4-bit bytes without a quantisation state",) if is_bare else ()
        if info.shape == shape and info.dtype != "U8":
            return None, (f"is {info.dtype} and not packed, yet {_listed(keys)} lie beside it",)
        faults = tuple(_missing(keys))
        if faults:
            return None, faults
        return self._checked(info, keys, weight, shape)

    def _checked(
        self, info: TensorInfo, keys: Mapping[str, str], weight: str, shape: tuple[int, ...]
    ) -> tuple[Quantised | None, tuple[str, ...]]:
        """A matrix whose parts are all there, if they fit each other."""
        state_key = next(key for key in keys if key.startswith(_STATE))
        try:
            text = self._read(keys[state_key], _MAX_STATE_BYTES).decode()
            state = parse_json(text)
            form = _form(state)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            return None, (f"has a {state_key} that cannot be read ({error!r})",)
        faults = list(_unfit(state, form, keys, shape))
        small = _small_parts(form, keys, shape)
        for one, dtype in small:
            there = self._source.tensors[one.tensor]
            if there.dtype != dtype or math.prod(there.shape) != one.num_rows:
                count = math.prod(there.shape)
                faults.append(
                    f"has {count} {there.dtype} in {one.tensor.removeprefix(weight)}, expected {one.num_rows} {dtype}"
                )
        codes = _codes(info, weight, shape)
        if codes is None:
            faults.append(
                f"has shape {list(info.shape)} in {info.dtype}, expected the 4-bit codes of {list(shape)}"
            )
        if faults or codes is None:
            return None, tuple(faults)
        raw = self._read(keys["quant_map"], _NUM_VALUES * 4)
        form = replace(form, values=struct.unpack(f"<{_NUM_VALUES}f", raw))
        stored = [one for one, _ in small if one.part]
        return Quantised(form, text, (*stored, codes)), ()

    def _read(self, name: str, limit: int) -> bytes:
        """A small tensor.

        Raises: ValueError for one of more than `limit` bytes.
        """
        info = self._source.tensors[name]
        if info.num_bytes > limit:
            raise ValueError(f"{info.num_bytes} bytes")
        raw = bytearray(info.num_bytes)
        self._source.read_into(name, 0, info.shape[0] if info.shape else 1, memoryview(raw))
        return bytes(raw)


def _missing(keys: Mapping[str, str]) -> list[str]:
    """Parts that a state lacks, of the two kinds that there are."""
    states = [key for key in keys if key.startswith(_STATE)]
    lacks = [part for part in ("absmax", "quant_map") if part not in keys]
    if not states:
        lacks.append(f"{_STATE}*")
    nested = [part for part in _NESTED if part in keys]
    lacks += [part for part in _NESTED if nested and part not in keys]
    faults = [f"lacks {', '.join(lacks)}"] if lacks else []
    if len(states) > 1:
        faults.append(f"has several states ({', '.join(sorted(states))})")
    return faults


def _form(state: Mapping[str, Any]) -> StoredForm:
    """What the JSON says, without the values of the codes.

    Raises: KeyError, TypeError or ValueError when it says something else.
    """
    is_nested = "nested_blocksize" in state
    form = StoredForm(
        quant_type=str(state["quant_type"]),
        group=_count(state["blocksize"]),
        dtype=str(state["dtype"]),
        values=(),
        nested_group=_count(state["nested_blocksize"]) if is_nested else None,
        offset=float(state["nested_offset"]) if is_nested else 0.0,
    )
    if not math.isfinite(form.offset):
        raise ValueError(f"offset {form.offset}")
    return form


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is no count")
    return value


def _unfit(
    state: Mapping[str, Any], form: StoredForm, keys: Mapping[str, str], shape: tuple[int, ...]
) -> list[str]:
    """How the JSON contradicts the names of the parts, or the matrix."""
    faults = []
    if f"{_STATE}{form.quant_type}" not in keys:
        named = next(key for key in keys if key.startswith(_STATE)).removeprefix(_STATE)
        faults.append(f"is {form.quant_type} in its state, {named} in the state's name")
    if state.get("shape") != list(shape):
        faults.append(f"has shape {state.get('shape')} in its state, expected {list(shape)}")
    has_nested = [part for part in _NESTED if part in keys]
    if form.nested_group is None and has_nested:
        faults.append(f"has {_listed(has_nested)}, of which its state says nothing")
    if form.nested_group is not None and not has_nested:
        faults.append(f"lacks {', '.join(_NESTED)}, of which its state speaks")
    if form.nested_group is not None and state.get("nested_dtype") != "float32":
        faults.append(f"has scales of scales in {state.get('nested_dtype')}, expected float32")
    return faults


def _small_parts(
    form: StoredForm, keys: Mapping[str, str], shape: tuple[int, ...]
) -> list[tuple[StoredPart, str]]:
    """The parts beside the codes with the dtype each must have; those that no store keeps have no part's name."""

    def part(name: str, key: str, dtype: str, count: int) -> tuple[StoredPart, str]:
        return StoredPart(name, keys[key], dtype, count, DTYPE_BYTES[dtype]), dtype

    num_groups = -(-math.prod(shape) // form.group)
    values = part("", "quant_map", "F32", _NUM_VALUES)
    if form.nested_group is None or any(name not in keys for name in _NESTED):
        scales = "F32" if form.nested_group is None else "U8"
        return [values, part("scales", "absmax", scales, num_groups)]
    return [
        values,
        part("scales", "absmax", "U8", num_groups),
        part("nested_scales", "nested_absmax", "F32", -(-num_groups // form.nested_group)),
        part("nested_table", "nested_quant_map", "F32", 256),
    ]


def _codes(info: TensorInfo, weight: str, shape: tuple[int, ...]) -> StoredPart | None:
    """The codes by rows of the matrix; they may be stored as numbers of any type (bnb_4bit_quant_storage)."""
    num_rows = info.shape[0] if info.shape else 0
    if len(shape) != 2 or 2 * info.num_bytes != math.prod(shape) or not num_rows:
        return None
    row_bytes, file_row_bytes = shape[1] // 2, info.num_bytes // num_rows
    if shape[1] % 2 or row_bytes % file_row_bytes:
        return None
    return StoredPart(CODES, weight, "U8", shape[0], row_bytes, row_bytes // file_row_bytes)


def _listed(keys: Mapping[str, str] | list[str]) -> str:
    return ", ".join(sorted(keys))
