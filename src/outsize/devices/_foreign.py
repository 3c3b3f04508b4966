"""Which other programs compute on a card: by NVML or nvidia-smi for NVIDIA, by KFD for AMD on Linux.

Asked before this process has a context of its own, so that whatever is listed is somebody else's. None: nobody tells. Not
verified on AMD cards; nothing is asked on Windows with one.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from outsize.devices._amdgpu import parse_kfd_place
from outsize.devices._nvml import compute_processes
from outsize.devices._sensors import CardId


@dataclass(frozen=True, slots=True)
class Foreign:
    """One process on a card. num_bytes: None where it is not told; name: "" where its process cannot be seen."""

    pid: int
    num_bytes: int | None
    name: str = ""


def foreign_programs(card: CardId, *, root: Path = Path("/")) -> list[Foreign] | None:
    """Processes with a compute context on a card, but for this one. root: of the kernel's files, for tests."""
    if card.vendor == "nvidia":
        found = compute_processes(card)
    else:
        found = kfd_processes(root, card) if platform.system() == "Linux" else None
    if found is None:
        return None
    return [Foreign(pid, used, _name(pid)) for pid, used in found if pid != os.getpid()]


def kfd_processes(root: Path, card: CardId) -> list[tuple[int, int | None]] | None:
    """(pid, bytes) of processes that hold memory on an AMD card, as the compute driver lists them; None without it."""
    kfd = root / "sys/class/kfd/kfd"
    gpu_ids = [
        text
        for node in sorted((kfd / "topology/nodes").glob("*"))
        if (text := _text(node / "gpu_id")) not in {"", "0"}
        and card.pci in {"", parse_kfd_place(_text(node / "properties"))}
    ]
    if len(gpu_ids) != 1:
        return None
    rows: list[tuple[int, int | None]] = []
    for process in sorted((kfd / "proc").glob("*")):
        used = _text(process / f"vram_{gpu_ids[0]}")
        if process.name.isdigit() and used.isdigit() and int(used):
            rows.append((int(process.name), int(used)))
    return rows


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
