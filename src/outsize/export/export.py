"""Give an adapter to another program, and prove that what lies on disk is that adapter.

The files are written under a temporary name, read back from there through the dialect's own reader, compared with the
adapter delta by delta, and only then renamed to their place. An adapter that cannot work is refused beforehand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from outsize import __version__
from outsize.base.errors import AdapterError, SourceError
from outsize.base.files import (
    commit_file,
    folder_committed_to,
    make_folder,
    parse_json,
    temporary_beside,
)
from outsize.base.layout import Layout
from outsize.dialects.protocol import (
    DIALECTS,
    AdapterFile,
    AdapterWeights,
    Dialect,
    JsonFile,
    LoraPair,
    TensorFile,
    as_text,
)
from outsize.weights.header import read_header

if TYPE_CHECKING:
    from torch import Tensor

METADATA_KEYS = (
    "base",
    "source",
    "recipe",
    "task",
    "base_key",
    "data",
    "step",
    "subjects",
    "provenance",
)
_CHUNK_ELEMENTS = 2**22  # of a delta compared at a time: 32 MB in float64
# A hub id, a name with a variant, a digest: at most one slash inside, and nothing that could lead into a file system.
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)?")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote and proved.

    silent: modules whose delta is exactly zero. max_difference: the largest absolute difference of any element of any
    delta between the adapter and the files read back.
    """

    files: tuple[Path, ...]
    num_bytes: int
    num_modules: int
    silent: tuple[str, ...]
    max_difference: float


def export_adapter(
    adapter: AdapterWeights,
    dialect_name: str,
    layouts: Sequence[Layout],
    target: Path,
    metadata: Mapping[str, str],
    *,
    release: Callable[[Path], None] | None = None,
) -> Exported:
    """Write an adapter in a dialect, whole or not at all, and prove that it reads back with the same deltas.

    target: a .safetensors file (replaced if it is there), or for a dialect of folders a folder that is not there yet.
    metadata: "base" (family.variant) and, where known, "source" (hub id of the base), "base_key" (digest of what it was
    prepared from, and how), "recipe" and "data" (their digests), "step" (updates) and "task" (PEFT's word for what the base
    is used for), "subjects" (pseudonyms of those whom it shows), "provenance" (digest of what is stated of the data); names only, never a path. release: called with what was
    written and proved, under its temporary name; what it raises keeps the adapter from its place. Tensors keep their dtype: cast before for a smaller file.
    Raises: AdapterError when a tensor is not finite, every delta is zero, a target or metadata value does not suit, the
    layouts do not cover a module, or the files do not read back as the adapter; RecipeError for an unknown dialect.
    """
    dialect = cast("Dialect", DIALECTS.load(dialect_name))
    header = _header(adapter, dialect_name, metadata)
    _check_target(target, dialect)
    _refuse_not_finite(adapter.pairs, "the adapter")
    _refuse_odd_lengths(adapter.lengths)
    silent = tuple(module for module, pair in adapter.pairs.items() if _is_silent(pair))
    if len(silent) == len(adapter.pairs):
        raise AdapterError(
            f"all {len(silent)} modules of the adapter are zero: it changes nothing; it was not trained, or its "
            f"gradients never arrived"
        )
    files = dialect.write(adapter, layouts, header)
    place = folder_committed_to(target) if dialect.is_folder else _file_committed_to(target)
    with place as temporary:
        paths = [temporary / name for name in files] if dialect.is_folder else [temporary]
        for path, file in zip(paths, files.values(), strict=True):
            _write(path, file)
        difference = _proven(adapter, dialect, layouts, paths)
        if release is not None:
            release(temporary)
    written = tuple(target / name for name in files) if dialect.is_folder else (target,)
    num_bytes = sum(path.stat().st_size for path in written)
    return Exported(written, num_bytes, len(adapter.pairs), silent, difference)


def read_adapter_files(paths: Sequence[Path]) -> dict[str, AdapterFile]:
    """Read an adapter's files (.json, else safetensors) by name, without mapping them into memory.

    Raises: AdapterError when one is no such file.
    """
    return {path.name: _read(path) for path in paths}


def max_delta_difference(before: AdapterWeights, after: AdapterWeights) -> float:
    """Largest absolute difference of any element of any delta; a module that is not there counts as zero.

    Exactly 0.0 where the factors are the same numbers, without multiplying them; else B @ A in float64, by row windows
    of at most 32 MB.
    """
    return max(
        _pair_difference(
            before.pairs.get(module), before.scale, after.pairs.get(module), after.scale
        )
        for module in {**before.pairs, **after.pairs}
    )


def _header(
    adapter: AdapterWeights, dialect_name: str, metadata: Mapping[str, str]
) -> dict[str, str]:
    unknown = sorted(set(metadata) - set(METADATA_KEYS))
    unfit = sorted(
        f"{key}={value!r}" for key, value in metadata.items() if not _NAME.fullmatch(value)
    )
    if unknown or unfit or "base" not in metadata:
        raise AdapterError(
            f"an exported file states 'base' and may state {', '.join(METADATA_KEYS[1:])}, each a plain name, since it is "
            f"given to others: unknown {unknown}, not a name {unfit}"
        )
    facts = {key: metadata[key] for key in METADATA_KEYS if key in metadata} | {
        "dialect": dialect_name,
        "rank": str(adapter.rank),
        "alpha": as_text(adapter.alpha),
        "version": __version__,
    }
    # "format": transformers and older clients want to know which framework's tensors these are.
    return {"format": "pt"} | {f"outsize.{key}": value for key, value in sorted(facts.items())}


def _check_target(target: Path, dialect: Dialect) -> None:
    if dialect.is_folder and target.exists():
        raise AdapterError(
            f"{target} is already there; export to a folder of another name, or remove it first"
        )
    if not dialect.is_folder and (target.suffix != ".safetensors" or target.is_dir()):
        raise AdapterError(
            f"this dialect is one file, so the target must end in .safetensors: {target}"
        )


def _refuse_not_finite(pairs: Mapping[str, LoraPair], whose: str) -> None:
    bad = [
        module for module, pair in pairs.items() if not (_is_finite(pair.A) and _is_finite(pair.B))
    ]
    if bad:
        raise AdapterError(
            f"{len(bad)} of {len(pairs)} modules of {whose} hold inf or nan: {', '.join(bad)}"
        )


def _refuse_odd_lengths(lengths: Mapping[str, Tensor]) -> None:
    bad = [
        module for module, one in lengths.items() if not bool((one.isfinite() & (one != 0)).all())
    ]
    if bad:
        raise AdapterError(
            f"lengths of rows of {len(bad)} of {len(lengths)} modules are 0, inf or nan: {', '.join(bad)}"
        )


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _is_silent(pair: LoraPair) -> bool:
    return not bool(pair.A.any()) or not bool(pair.B.any())


@contextmanager
def _file_committed_to(target: Path) -> Iterator[Path]:
    """Give a temporary name to write; when the block ends the file becomes `target`, and on an error it is deleted."""
    make_folder(target.parent)
    temporary = temporary_beside(target)
    try:
        yield temporary
        commit_file(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, file: AdapterFile) -> None:
    from safetensors.torch import save_file

    if isinstance(file, JsonFile):
        path.write_text(json.dumps(file.value, indent=2) + "\n", encoding="utf-8")
    else:
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in file.tensors.items()}
        save_file(tensors, path, metadata=dict(file.metadata))


def _read(path: Path) -> AdapterFile:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        if path.suffix == ".json":
            return JsonFile(parse_json(path.read_bytes()))
        header = read_header(path)
        # Read, not mapped: Windows would refuse to rename the file under the map.
        tensors = load(path.read_bytes())
    except (SourceError, SafetensorError, ValueError, KeyError) as error:
        raise AdapterError(f"{path} is torn or no adapter file: {error}") from error
    return TensorFile(tensors, header.metadata)


def _proven(
    adapter: AdapterWeights, dialect: Dialect, layouts: Sequence[Layout], paths: Sequence[Path]
) -> float:
    """The largest difference of the deltas after reading back, which must be no more than rounding."""
    after = dialect.read(read_adapter_files(paths), layouts)
    changed = [
        name for name, one in adapter.lengths.items() if not _is_same(one, after.lengths.get(name))
    ]
    if changed or len(after.lengths) != len(adapter.lengths):
        raise AdapterError(
            f"the written adapter has other lengths of rows than the trained one, in {', '.join(changed) or 'more modules'}; "
            "nothing was exported"
        )
    _refuse_not_finite(after.pairs, "the written file (a scale overflowed its dtype?)")
    difference = max_delta_difference(adapter, after)
    allowed = max(_rounding(pair, adapter.scale) for pair in adapter.pairs.values())
    if difference > allowed:
        raise AdapterError(
            f"the written adapter differs from the trained one by {difference:.3g} where rounding explains at most "
            f"{allowed:.3g}; nothing was exported"
        )
    return difference


def _is_same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and bool((one == other).all())


def _rounding(pair: LoraPair, scale: float) -> float:
    """How much one rounding of each scaled element of B may change in an element of the delta.

    r products, each off by at most a unit in the last place (eps), or by one of the smallest steps near zero.
    """
    import torch

    info = torch.finfo(pair.B.dtype)
    largest = float(pair.B.abs().amax()) * abs(scale)
    step = max(largest * info.eps, info.smallest_normal * info.eps)
    return pair.rank * step * float(pair.A.abs().amax())


def _pair_difference(
    before: LoraPair | None, before_scale: float, after: LoraPair | None, after_scale: float
) -> float:
    import torch

    if before is None or after is None:
        alone, scale = (before, before_scale) if before is not None else (after, after_scale)
        assert alone is not None
        return (
            0.0
            if _is_silent(alone)
            else _largest_element(alone.B.double() * scale, alone.A.double())
        )
    B, B_after = before.B.double() * before_scale, after.B.double() * after_scale
    A, A_after = before.A.double(), after.A.double()
    if B.shape[0] != B_after.shape[0] or A.shape[1] != A_after.shape[1]:
        raise AdapterError(
            f"a module came back as {tuple(B_after.shape)} x {tuple(A_after.shape)}, not {tuple(B.shape)} x "
            f"{tuple(A.shape)}"
        )
    if torch.equal(A, A_after):
        return _largest_element(B - B_after, A) if not torch.equal(B, B_after) else 0.0
    return _largest_element(torch.cat([B, -B_after], dim=1), torch.cat([A, A_after]))


def _largest_element(B: Tensor, A: Tensor) -> float:
    """Give max |B @ A|, by row windows."""
    import torch

    rows = max(1, _CHUNK_ELEMENTS // A.shape[1])
    return max(float((window @ A).abs().amax()) for window in torch.split(B, rows))
