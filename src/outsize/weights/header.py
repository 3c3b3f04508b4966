"""Headers of safetensors files: read, checked to the last byte, and written.

A file is eight bytes of length, that many bytes of JSON, and the data. The reader is strict because everything after it
reads data by offset: a wrong offset must be an error here and not a wrong weight later. All faults of a file are named
at once. The writer pads the JSON with spaces, so that data begin at a multiple of the alignment asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.base.errors import SourceError
from outsize.base.parts import DTYPE_BYTES
from outsize.base.units import format_bytes

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the cap of the safetensors library
MAX_FAULTS = 20  # a file of noise would otherwise fill the screen
MAX_NAME = 500  # characters; the longest names that are published have about a hundred
MAX_RANK = 64  # of tensors in torch
MAX_COUNT = 2**63 - 1  # of elements and of bytes in torch, and in files of every system
METADATA = "__metadata__"

_BITS = {code: 8 * size for code, size in DTYPE_BYTES.items()} | {
    "U16": 16,
    "U32": 32,
    "U64": 64,
    "C64": 64,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: bytes [begin, end) counted from the start of its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. digest: SHA-256 of the length and the JSON, hexadecimal."""

    file: Path
    file_bytes: int
    data_begin: int
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    digest: str


def read_header(file: Path) -> Header:
    """Read and check one file's header; the data are not read.

    Raises: SourceError naming the file and every fault found in it.
    """
    size, raw = _read_raw(file)
    values = _parse(file, raw)
    metadata = values.pop(METADATA, {})
    data_begin = LENGTH_BYTES + len(raw)
    faults: list[str] = []
    if not (
        isinstance(metadata, dict)
        and all(isinstance(text, str) and _is_unicode(key + text) for key, text in metadata.items())
    ):
        faults.append(f"{METADATA} must hold texts only")
    tensors = {}
    for name, value in values.items():
        info = _tensor(file, name, value, data_begin, faults)
        if info is not None:
            tensors[name] = info
    if not faults:
        _check_extents(tensors, data_begin, size, faults)
    if faults:
        raise SourceError(_message(file, faults))
    digest = hashlib.sha256(struct.pack("<Q", len(raw)) + raw).hexdigest()
    return Header(file, size, data_begin, tensors, metadata, digest)


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int, int]],
    metadata: Mapping[str, str],
    *,
    alignment: int,
) -> bytes:
    """Bytes that precede the data, their count a multiple of `alignment`.

    tensors: (name, dtype, shape, begin, end), offsets counted from the start of the data.
    """
    values: dict[str, Any] = {METADATA: dict(metadata)}
    for name, dtype, shape, begin, end in tensors:
        values[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    num_bytes = -(-(LENGTH_BYTES + len(text)) // alignment) * alignment
    return struct.pack("<Q", num_bytes - LENGTH_BYTES) + text.ljust(num_bytes - LENGTH_BYTES)


def _read_raw(file: Path) -> tuple[int, bytes]:
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            start = opened.read(LENGTH_BYTES)
            if start == b"version ":
                raise SourceError(
                    f"{file} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"
                )
            if len(start) < LENGTH_BYTES:
                raise SourceError(
                    f"{file} has {size} bytes, too few for a safetensors file; download it again"
                )
            (length,) = struct.unpack("<Q", start)
            if length > MAX_HEADER_BYTES:
                raise SourceError(
                    f"{file} states a header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed; "
                    "it is not a safetensors file, or it is torn: download it again"
                )
            if LENGTH_BYTES + length > size:
                raise SourceError(
                    f"{file} states a header of {length} bytes, but the file ends after {size} bytes; "
                    "download it again"
                )
            return size, opened.read(length)
    except OSError as error:
        raise SourceError(f"{file} cannot be read: {error.strerror or error}") from error


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = sorted(_shown(name) for name, count in counts.items() if count > 1)
            raise SourceError(_message(file, [f"{name} is named twice" for name in twice]))
        return values

    if not raw.startswith(b"{"):
        raise SourceError(_message(file, ["the header does not begin with '{'"]))
    try:
        values = json.loads(raw.decode(), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise SourceError(_message(file, [f"the header is no JSON ({error})"])) from error
    assert isinstance(values, dict), "JSON that begins with '{' is an object"
    return values


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a pair of letters, which JSON can spell and no file can hold."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _shown(name: str) -> str:
    """A name from a file as it may stand in a message: short, and nothing that steers a terminal."""
    return name if len(name) <= MAX_NAME and name.isprintable() else _quoted(name)


def _quoted(value: object) -> str:
    """A value from a file as it may stand in a message."""
    try:
        text = ascii(value)
    except RecursionError:  # as deep as the JSON's reader goes, and a few calls more
        return "something nested deeply"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _tensor(
    file: Path, name: str, value: object, data_begin: int, faults: list[str]
) -> TensorInfo | None:
    """One entry as TensorInfo, or None after its fault has been added."""
    fault = _fault(name, value)
    if fault is not None or not isinstance(value, dict):
        faults.append(f"{_shown(name)}: {fault}")
        return None
    begin, end = value["data_offsets"]
    return TensorInfo(
        file, value["dtype"], tuple(value["shape"]), data_begin + begin, data_begin + end
    )


def _fault(name: str, value: object) -> str | None:
    """The first thing that is wrong with one entry."""
    if name != _shown(name):
        return f"a name must be printable text of at most {MAX_NAME} characters"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        return f"expected dtype, shape and data_offsets, found {_quoted(value)}"
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        return f"dtype {_quoted(dtype)} is unknown"
    if not isinstance(shape, list) or not all(_is_count(extent) for extent in shape):
        return f"shape {_quoted(shape)} is not a list of counts"
    is_pair = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))
    if not is_pair or offsets[0] > offsets[1]:
        return f"data_offsets {_quoted(offsets)} are not a rising pair of counts"
    return _size_fault(dtype, shape, offsets)


def _size_fault(dtype: str, shape: list[int], offsets: list[int]) -> str | None:
    if len(shape) > MAX_RANK:
        return f"its shape has {len(shape)} dimensions, more than {MAX_RANK}"
    num_bits = math.prod(shape) * _BITS[dtype]
    if num_bits == 8 * (offsets[1] - offsets[0]):
        return None
    whole, rest = divmod(num_bits, 8)
    needed = f"{num_bits / 8:g}" if rest and whole <= MAX_COUNT else str(whole)
    if whole > MAX_COUNT:
        needed = f"more than {MAX_COUNT}"
    return (
        f"{dtype} of shape {_quoted(shape)} takes {needed} bytes, "
        f"data_offsets {offsets} hold {offsets[1] - offsets[0]}"
    )


def _check_extents(
    tensors: Mapping[str, TensorInfo], data_begin: int, size: int, faults: list[str]
) -> None:
    """Tensors must cover the data exactly: no overlap, no hole, nothing after the last."""
    position, last = data_begin, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            kind = "overlaps with" if info.begin < position else "leaves a hole after"
            faults.append(
                f"{name}: begins at byte {info.begin} and {kind} {last}, which ends at {position}"
            )
        position, last = max(position, info.end), name
    if position > size:
        faults.append(
            f"the file has {size} bytes, its header speaks of {position} "
            f"({format_bytes(position - size)} are missing): the download or copy was cut short"
        )
    elif position < size:
        faults.append(f"{size - position} bytes follow the last tensor, {last}")


def _message(file: Path, faults: list[str]) -> str:
    shown = faults[:MAX_FAULTS]
    if len(faults) > len(shown):
        shown.append(f"and {len(faults) - len(shown)} faults more")
    listed = "\n  ".join(shown)
    return f"{file} is not a sound safetensors file; download it again:\n  {listed}"
