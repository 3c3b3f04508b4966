"""From what a recipe says to files: a diffusers folder, a folder of shards, one file, or a hub id.

What is local is read where it lies. A hub repository is looked for in the hub's cache first; only what is missing is
downloaded (resumable), and only the files that are needed. Offline (`offline=True` or HF_HUB_OFFLINE) nothing is asked of
the network: what is missing is named, with the command that gets it.
"""

from __future__ import annotations

import re
from pathlib import Path

from outsize.base.errors import SourceError
from outsize.weights.choice import (
    INDEX_END,
    HubId,
    refuse_pickle,
    weights_in_folder,
    weights_of_index,
)
from outsize.weights.foreign import GGUF_END, refusal
from outsize.weights.hub import hub_folder, hub_weights

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>.+\.safetensors))?"
)
# What a tokenizer or scheduler folder holds; weights stay where they are.
_TOKENIZERS = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tekken.json",
    "spiece.model",
    "vocab.json",
)
_FOLDER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")


def parse_hub_id(source: str) -> HubId | None:
    """Read "owner/name", "owner/name@revision" or "owner/name/file.safetensors"; None when it is neither."""
    match = _HUB_ID.fullmatch(source)
    if match is None or ".." in source:
        return None
    return HubId(match["repo"], match["revision"] or "main", match["file"])


def locate_weights(
    source: str, *, sub_folder: str = "", offline: bool = False, cache_dir: Path | None = None
) -> tuple[Path, ...]:
    """The safetensors files of one model.

    sub_folder: its folder in a diffusers repository ("transformer", "vae"); not looked into when the source is one file
    or a folder of shards. cache_dir: of the hub; its own default when None.
    Raises: SourceError saying what is missing and how to get it.
    """
    path = Path(source).expanduser()
    if path.exists():
        return _local_files(path, sub_folder)
    hub_id = parse_hub_id(source)
    if hub_id is None and path.suffix == GGUF_END:
        raise SourceError(refusal(source, "GGUF"))
    if hub_id is None:
        raise SourceError(
            f"{source} does not exist; name a folder, a safetensors file, or a hub id as owner/name"
        )
    return hub_weights(hub_id, sub_folder, offline=offline, cache_dir=cache_dir)


def locate_folder(
    source: str, sub_folder: str, *, offline: bool = False, cache_dir: Path | None = None
) -> Path:
    """The folder of a tokenizer, scheduler or configuration beside the weights, on this machine; "" is where they lie.

    A local source may be that folder itself, when it holds a tokenizer and no sub-folder of that name.
    Raises: SourceError saying what is missing and how to get it.
    """
    path = Path(source).expanduser()
    if path.exists():
        base = path if path.is_dir() else path.parent
        folder = base / sub_folder
        if (
            path.is_dir()
            and not folder.exists()
            and any((base / one).is_file() for one in _TOKENIZERS)
        ):
            return base
        if not folder.is_dir() or not any(folder.iterdir()):
            raise SourceError(
                f"{base} has no folder {sub_folder!r} with files in it; copy it there from the published "
                "repository, or name another source for it in the recipe (`tokenizer` of a component)"
            )
        return folder
    hub_id = parse_hub_id(source)
    if hub_id is None:
        raise SourceError(f"{source} does not exist; name a folder, or a hub id as owner/name")
    patterns = tuple(f"{sub_folder}/{one}" if sub_folder else one for one in _FOLDER_FILES)
    return hub_folder(hub_id, sub_folder, patterns, offline=offline, cache_dir=cache_dir)


def _local_files(path: Path, sub_folder: str) -> tuple[Path, ...]:
    if path.is_file():
        return _from_file(path)
    is_pipeline = (path / "model_index.json").exists()
    if sub_folder and (path / sub_folder).is_dir():
        return weights_in_folder(path / sub_folder)
    if sub_folder and is_pipeline:
        raise SourceError(f"{path} is a diffusers folder without the sub-folder {sub_folder!r}")
    return weights_in_folder(path)


def _from_file(path: Path) -> tuple[Path, ...]:
    refuse_pickle(path.name)
    if path.name.endswith(INDEX_END):
        return weights_of_index(path)
    if path.suffix == GGUF_END:
        raise SourceError(refusal(str(path), "GGUF"))
    if path.suffix != ".safetensors":
        raise SourceError(
            f"{path} is no safetensors file; name one, its index, or the folder that holds them"
        )
    return (path,)
