"""Checkpoints: a folder that is there whole or not at all, and is believed only after its digests were checked.

checkpoints/00000250/: adapter.safetensors (fp32 masters), optimizer.safetensors, state.json. state.json is written last
inside the temporary folder and lists the digest of every other file; then all is fsynced and the folder renamed. Resume
takes the newest folder that verifies and says which ones did not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.base.errors import StoreBroken
from outsize.base.files import (
    file_digest,
    folder_committed_to,
    make_folder,
    parse_json,
    remove_temporaries,
    sync_folder,
    write_json_atomically,
)

if TYPE_CHECKING:
    from torch import Tensor

_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that the coming steps depend on, beside recipe, data and base.

    step: updates done. groups: named sets of tensors, one file each. values: JSON.
    """

    step: int
    groups: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(
    folder: Path, checkpoint: Checkpoint, may_commit: Callable[[], None] = lambda: None
) -> Path:
    """Write a checkpoint under `folder`; an equal step that is already there and verifies is kept.

    may_commit: called when all is written and nothing is named yet; what it raises leaves nothing behind.
    """
    from safetensors.torch import save_file

    target = folder / f"{checkpoint.step:08d}"
    if target.exists():
        if not faults_of(target):
            sync_folder(folder)  # who wrote it may have been killed before it was safe
            return target
        shutil.rmtree(target)
    make_folder(folder)
    remove_temporaries(folder)
    with folder_committed_to(target) as written:
        digests = {}
        for name, tensors in checkpoint.groups.items():
            path = written / f"{name}.safetensors"
            save_file(dict(tensors), path)
            digests[path.name] = file_digest(path)
        state = {"step": checkpoint.step, "digests": digests, "values": dict(checkpoint.values)}
        write_json_atomically(written / _STATE, state)
        may_commit()
    return target


def faults_of(path: Path) -> list[str]:
    """What is wrong with a checkpoint folder; empty when it can be believed."""
    try:
        state = parse_json((path / _STATE).read_text(encoding="utf-8"))
        digests: dict[str, str] = dict(state["digests"])
        int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        return [f"{path / _STATE}: {error}"]
    faults = []
    for name, digest in digests.items():
        file = path / Path(name).name
        if not file.is_file():
            faults.append(f"{file} is missing")
        elif file_digest(file) != digest:
            faults.append(f"{file} is not what was written")
    return faults


def read_values(path: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint folder that was found to verify; no tensor is read."""
    values: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))["values"]
    return values


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint folder.

    Raises: StoreBroken naming everything that is wrong with it.
    """
    from safetensors.torch import load

    faults = faults_of(path)
    if faults:
        raise StoreBroken("; ".join(faults))
    state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    # read, not mapped: a mapped file could not be replaced on Windows
    groups = {
        Path(name).stem: load((path / Path(name).name).read_bytes()) for name in state["digests"]
    }
    return Checkpoint(state["step"], groups, state["values"])


def all_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first, without looking inside."""
    if not folder.is_dir():
        return []
    return sorted((one for one in folder.iterdir() if one.name.isdigit()), reverse=True)


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest folder that verifies, and the faults of newer ones that do not."""
    faults: list[str] = []
    for path in all_checkpoints(folder):
        found = faults_of(path)
        if not found:
            return path, faults
        faults += found
    return None, faults


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` folders."""
    for path in all_checkpoints(folder)[keep:]:
        shutil.rmtree(path)
