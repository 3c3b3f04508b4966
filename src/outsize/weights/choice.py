"""Which files of a folder, or of a repository's listing, are the weights: a choice among names, no weights opened.

The order of preference is the libraries' own: one file of the usual name, an index, shards that count themselves, the
only safetensors file there is. Files of a variant ("model.fp16.safetensors") are never taken unless named, for they
hold other numbers. Pickled checkpoints are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from outsize.base.errors import SourceError
from outsize.base.files import parse_json
from outsize.weights.foreign import GGUF_END, refusal

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
INDEX_END = ".safetensors.index.json"
_USUAL = ("diffusion_pytorch_model.safetensors", "model.safetensors")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_VARIANT = re.compile(r"(?:diffusion_pytorch_model|model)\.(?!safetensors)\w+\.?.*", re.DOTALL)
_PICKLE_REASON = (
    "a pickled checkpoint runs code of its author when it is opened, so Outsize never opens one; "
    "take the repository's safetensors files, or convert it with safetensors' own tools"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Names chosen: either the weights themselves, or an index that names them."""

    files: tuple[str, ...]
    index: str | None = None


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the hub, a revision of it, and one file of it when only that is meant."""

    repo: str
    revision: str
    file: str | None = None


def choose(names: Sequence[str], where: str) -> Choice:
    """Choose among the names of one folder (no slashes in them).

    Raises: SourceError when there are none, when shards are missing, or when the choice is not plain.
    """
    tensors = sorted(name for name in names if name.endswith(".safetensors"))
    plain = [name for name in tensors if not _VARIANT.fullmatch(name) or name in _USUAL]
    for usual in _USUAL:
        if usual in plain:
            return Choice((usual,))
    indices = sorted(name for name in names if name.endswith(INDEX_END))
    plain_indices = [name for name in indices if not _is_variant_index(name)]
    if len(plain_indices) == 1:
        return Choice((), plain_indices[0])
    if len(plain_indices) > 1:
        raise SourceError(f"{where} holds several indices ({', '.join(plain_indices)}); name one")
    shards = [match for name in plain if (match := _SHARD.fullmatch(name)) is not None]
    if shards:
        return Choice(_complete_set(shards, where))
    if len(plain) == 1:
        return Choice((plain[0],))
    if plain:
        raise SourceError(
            f"{where} holds several checkpoints ({_few(plain)}) and no index; name one file"
        )
    if tensors:
        raise SourceError(
            f"{where} holds only files of a variant ({_few(tensors)}), with other numbers than the "
            "published weights; if they are wanted, name the file in the recipe"
        )
    raise SourceError(_nothing_to_read(names, where))


def _nothing_to_read(names: Sequence[str], where: str) -> str:
    pickled = sorted(name for name in names if name.endswith(PICKLED))
    if pickled:
        return f"{where} holds only {_few(pickled)}: {_PICKLE_REASON}"
    if any(name.endswith(GGUF_END) for name in names):
        return refusal(where, "GGUF")
    return f"{where} holds no safetensors file; name the folder or file that holds the weights"


def files_of_index(content: bytes, where: str) -> tuple[str, ...]:
    """Names of the shards that an index speaks of, sorted.

    Raises: SourceError when it is no index, or a path in it leaves the folder of the index.
    """
    try:
        values = parse_json(content)
        shards = sorted(set(values["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{where} is no index of safetensors files ({error!r})") from error
    bad = [name for name in shards if not (isinstance(name, str) and _stays_inside(name))]
    if bad or not shards:
        raise SourceError(
            f"{where} names {bad!a:.300}; every path must be a safetensors file inside its folder"
        )
    return tuple(shards)


def weights_in_folder(folder: Path) -> tuple[Path, ...]:
    """The weights of one folder.

    Raises: SourceError as `choose` does, or when files that an index names are missing.
    """
    # A link that leads nowhere counts as missing, not as a file.
    names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    choice = choose(names, str(folder))
    if choice.index is not None:
        return weights_of_index(folder / choice.index)
    return tuple(folder / name for name in choice.files)


def weights_of_index(index: Path) -> tuple[Path, ...]:
    """The shards of an index file.

    Raises: SourceError when it is no index, points outside its folder, or names files that are missing.
    """
    files = tuple(index.parent / name for name in files_of_index(index.read_bytes(), str(index)))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise SourceError(
            f"{index} names {len(files)} files, {len(missing)} are missing: {_few(missing)}; "
            "download them again, or copy them beside it"
        )
    return files


def refuse_pickle(name: str) -> None:
    """Raise SourceError with the reason when a name is that of a pickled checkpoint."""
    if name.endswith(PICKLED):
        raise SourceError(f"{name}: {_PICKLE_REASON}")


def _stays_inside(name: str) -> bool:
    """Whether a relative path stays in its folder on every system, judged by its letters alone."""
    windows, posix = PureWindowsPath(name), PurePosixPath(name)
    is_relative = not (windows.drive or windows.root or posix.root)
    # isprintable: no zero bytes, no halves of letters, nothing that steers a terminal
    return (
        is_relative
        and name.isprintable()
        and ".." not in windows.parts
        and name.endswith(".safetensors")
    )


def _is_variant_index(name: str) -> bool:
    # "x.safetensors.index.fp16.json" does not end like an index; "x.fp16.safetensors.index.json" does.
    return _VARIANT.fullmatch(name.removesuffix(".index.json")) is not None and (
        name.removesuffix(".index.json") not in _USUAL
    )


def _complete_set(shards: Sequence[re.Match[str]], where: str) -> tuple[str, ...]:
    kinds = {(match["stem"], match["count"]) for match in shards}
    if len(kinds) > 1:
        listed = ", ".join(f"{stem} (of {count})" for stem, count in sorted(kinds))
        raise SourceError(
            f"{where} holds several sets of shards ({listed}); name one folder or index"
        )
    ((stem, count),) = kinds
    there = {int(match["number"]) for match in shards}
    missing = [
        f"{stem}-{number:05d}-of-{count}.safetensors"
        for number in range(1, int(count) + 1)
        if number not in there
    ]
    if missing:
        raise SourceError(
            f"{where} lacks {len(missing)} of {int(count)} shards: {_few(missing)}; download what is missing"
        )
    return tuple(sorted(match.group() for match in shards))


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
