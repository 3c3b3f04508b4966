"""A content-addressed cache of small tensor dictionaries: latents and embeddings.

The key is a digest of everything that shapes the value, so an entry is right or absent, never
stale, and there is no index that could disagree with the files. An entry is one safetensors file
with its own key and a digest of its tensors in the header. It is written to a temporary name,
fsynced and renamed, and verified whole whenever it is read: a torn or altered entry is StoreBroken,
never a value. Any number of processes may use one cache at once; writers of one key write the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.base.errors import StoreBroken
from outsize.base.files import TEMPORARY, json_digest, parse_json, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

ENTRY_VERSION = 1  # raise it when the same inputs must lead to other entries
_SUFFIX = ".safetensors"
_STAMP = "outsize_entry"  # metadata: the entry's key and the digest of its tensors
_ABANDONED_S = 3600  # no put takes this long: an older temporary file belongs to a killed writer
_MAX_HEADER_BYTES = 1 << 20  # ours have a few hundred bytes; a torn length must not be obeyed


@dataclass(frozen=True, slots=True)
class ContentCache:
    """A folder of entries by key, in 256 sub-folders."""

    folder: Path

    def key(self, **inputs: Any) -> str:
        """The key of what these inputs lead to; all of them must be JSON values."""
        return json_digest({"entry": ENTRY_VERSION, "inputs": inputs})

    def path(self, key: str) -> Path:
        """The file that holds, or would hold, an entry."""
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The entry, on the CPU, verified; None when there is none.

        Raises: StoreBroken naming the file when it is torn or was altered; discard(key) makes it
        absent.
        """
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        return _unpack(content, key, path)

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Write an entry whole or not at all; it is on disk when this returns."""
        content = _pack(tensors, key)
        try:
            write_atomically(self.path(key), content)
        except PermissionError:
            # Windows refuses to replace a file that another process holds open. An entry of this
            # key has this value, so one that verifies is as good as ours.
            if self.get(key) is None:
                raise

    def discard(self, key: str) -> None:
        """Make an entry absent, so that the next caching writes it anew."""
        self.path(key).unlink(missing_ok=True)

    def missing(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Which of the keys have no entry, each once, in order; reads no contents."""
        return tuple(key for key in dict.fromkeys(keys) if not self.path(key).is_file())

    def broken(self, keys: Iterable[str]) -> dict[str, str]:
        """What is wrong with those of the keys whose entries cannot be used, absent ones aside.

        Header and file length are compared, which finds what a crash or a full disk leaves behind;
        contents are verified when they are read.
        """
        faults = {}
        for key in dict.fromkeys(keys):
            try:
                _check_length(self.path(key), key)
            except StoreBroken as error:
                faults[key] = str(error)
        return faults

    def sweep(self) -> int:
        """Delete temporary files of writers killed over an hour ago; their number."""
        count = 0
        for path in self.folder.glob(f"??/{TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):  # another process may sweep as well
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()
                    count += 1
        return count


def _raw(tensor: Tensor) -> bytes:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _digest(tensors: Mapping[str, Tensor], key: str) -> str:
    """SHA-256 over the key and every tensor's name, dtype, shape and bytes, by name."""
    total = hashlib.sha256(key.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        raw = _raw(tensor)
        facts = [name, str(tensor.dtype), list(tensor.shape), len(raw)]
        total.update(json.dumps(facts).encode())
        total.update(raw)
    return total.hexdigest()


def _pack(tensors: Mapping[str, Tensor], key: str) -> bytes:
    from safetensors.torch import save

    # A copy of its own for each: safetensors refuses tensors that share memory.
    owned = {
        name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in tensors.items()
    }
    # One value and not two: safetensors writes metadata in random order, and an entry's file should
    # be the same whoever writes it.
    return save(owned, metadata={_STAMP: f"{key} {_digest(owned, key)}"})


def _stamp(header: Mapping[str, Any]) -> tuple[str, str]:
    """Key and digest that an entry was stored with; "" where it has none."""
    key, _, digest = str(header["__metadata__"].get(_STAMP, "")).partition(" ")
    return key, digest


def _unpack(content: bytes, key: str, path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    stored_key, stored_digest = _stamp(_header(content[:8], content[8:], len(content), path))
    if stored_key != key:
        raise _broken(path, f"it holds the entry {stored_key!a:.100}")
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise _broken(
            path, f"it is not valid safetensors: {ascii(str(error))[1:-1]:.200}"
        ) from error
    if _digest(tensors, key) != stored_digest:
        raise _broken(path, "its tensors do not have the digest they were stored with")
    return tensors


def _check_length(path: Path, key: str) -> None:
    """Compare the header's offsets and key with the file. Raises: StoreBroken."""
    try:
        with path.open("rb") as file:
            first = file.read(8)
            rest = file.read(_header_length(first, path))
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        return
    stored_key, _ = _stamp(_header(first, rest, num_bytes, path))
    if stored_key != key:
        raise _broken(path, f"it holds the entry {stored_key!a:.100}")


def _header(first: bytes, rest: bytes, num_bytes: int, path: Path) -> dict[str, Any]:
    """The header, its metadata a dictionary, of a file that ends where it says.

    Raises: StoreBroken.
    """
    length = _header_length(first, path)
    try:
        header: dict[str, Any] = parse_json(rest[:length])
        header["__metadata__"] = dict(header.get("__metadata__") or {})
        ends = [
            int(entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
    ) as error:
        raise _broken(path, f"its header cannot be read: {ascii(str(error))[1:-1]:.200}") from error
    stated = 8 + length + max(ends, default=0)
    if num_bytes != stated:
        raise _broken(path, f"it has {num_bytes} bytes where its header says {stated}")
    return header


def _header_length(first: bytes, path: Path) -> int:
    length = int.from_bytes(first, "little")
    if len(first) != 8 or not 0 < length <= _MAX_HEADER_BYTES:
        raise _broken(path, "it does not begin as a safetensors file")
    return length


def _broken(path: Path, what: str) -> StoreBroken:
    return StoreBroken(f"the cache entry {path} is broken: {what}")
