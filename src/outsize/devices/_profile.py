"""What a machine has, learned without torch: from the system, and from the vendor's own tool.

Plan must answer in a moment and touch no device, so memory is asked of `nvidia-smi`, `rocm-smi` or `amd-smi`, each a
child process with a time limit, started by argument list. Where none answers there is no GPU as far as a plan is
concerned; a GPU can always be stated. An underscore begins this file's name because every other file here is a device.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_TIMEOUT_S = 10  # a healthy tool answers in under one; a hung driver must not hang the plan
_MIB = 2**20
SYSTEM_RAM_BYTES = 2 << 30  # what the system and a desktop keep of the RAM of a stated machine


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card as its vendor's tool tells of it. Bytes are None where the tool gives none (memory shared with the CPU).

    compute_capability: of CUDA, as in 8.9; None where the tool gives none.
    """

    name: str
    total_bytes: int | None
    free_bytes: int | None
    index: str = "0"
    uuid: str = ""
    compute_capability: float | None = None


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Memory and names of one machine. vram_* are None where there is no GPU; disk_free_bytes where nobody asked.

    is_unified: GPU and CPU share the RAM. is_stated: told by the user, not read from this machine. compute_capability: of
    a CUDA card, as in 8.9; None where nobody told.
    """

    device: str
    vram_bytes: int | None
    vram_free_bytes: int | None
    ram_bytes: int
    ram_available_bytes: int
    disk_free_bytes: int | None
    num_cores: int
    os: str
    is_unified: bool = False
    is_stated: bool = False
    compute_capability: float | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether training would run on a GPU."""
        return self.vram_bytes is not None

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON values."""
        return asdict(self)


def read_machine(cache: Path | None = None) -> MachineProfile:
    """This machine, with the free space of the disk that holds `cache`."""
    import psutil

    memory = psutil.virtual_memory()
    ram_bytes, available_bytes = within_cgroup(
        memory.total, memory.available, Path("/sys/fs/cgroup")
    )
    gpu = visible_gpu(find_gpus(), os.environ)
    is_unified = platform.system() == "Darwin" or (gpu is not None and gpu.total_bytes is None)
    vram = None if gpu is None else (gpu.total_bytes or ram_bytes)
    free = None if gpu is None else (available_bytes if gpu.free_bytes is None else gpu.free_bytes)
    return MachineProfile(
        device=gpu.name if gpu is not None else f"CPU, {_num_cores()} cores",
        vram_bytes=vram,
        vram_free_bytes=free,
        ram_bytes=ram_bytes,
        ram_available_bytes=available_bytes,
        disk_free_bytes=None if cache is None else free_disk(cache),
        num_cores=_num_cores(),
        os=platform.system(),
        is_unified=is_unified,
        compute_capability=None if gpu is None else gpu.compute_capability,
    )


def limited(
    machine: MachineProfile, *, vram_bytes: int | None = None, ram_bytes: int | None = None
) -> MachineProfile:
    """The same machine with less: vram_bytes as a cap on the card, ram_bytes as the RAM that there is in truth.

    Of stated RAM what this process may take is all but the system's share: what is free now says nothing where the system
    grows its memory on demand.
    """
    if vram_bytes is not None and machine.vram_bytes is not None:
        free = machine.vram_bytes if machine.vram_free_bytes is None else machine.vram_free_bytes
        machine = replace(
            machine,
            vram_bytes=min(machine.vram_bytes, vram_bytes),
            vram_free_bytes=min(free, vram_bytes),
        )
    if ram_bytes is not None:
        available = max(0, ram_bytes - SYSTEM_RAM_BYTES)
        machine = replace(machine, ram_bytes=ram_bytes, ram_available_bytes=available)
    return machine


def stated(
    *, vram_bytes: int | None, ram_bytes: int | None, gpu: str | None, base: MachineProfile
) -> MachineProfile:
    """The machine a user speaks of; what is left open is taken from `base`. vram_bytes 0 means: no GPU.

    A stated size of RAM is the whole of it: the system's share is subtracted from what is available.
    """
    if vram_bytes is None:
        vram, free, name = base.vram_bytes, base.vram_free_bytes, base.device
    elif vram_bytes == 0:
        vram, free, name = None, None, f"CPU, {base.num_cores} cores"
    else:
        vram, free, name = vram_bytes, vram_bytes, "GPU"
    if ram_bytes is None:
        ram, available = base.ram_bytes, base.ram_available_bytes
    else:
        ram, available = ram_bytes, max(0, ram_bytes - SYSTEM_RAM_BYTES)
    return MachineProfile(
        device=gpu or name,
        vram_bytes=vram,
        vram_free_bytes=free,
        ram_bytes=ram,
        ram_available_bytes=available,
        disk_free_bytes=base.disk_free_bytes,
        num_cores=base.num_cores,
        os=base.os,
        is_unified=base.is_unified and vram_bytes is None,
        is_stated=True,
        compute_capability=base.compute_capability if vram_bytes is None and gpu is None else None,
    )


def find_gpus() -> list[Gpu]:
    """The cards that the first answering vendor's tool lists."""
    for command, parse in _TOOLS:
        output = ask_tool(command)
        gpus = [] if output is None else parse(output)
        if gpus:
            return gpus
    return []


def visible_gpu(gpus: list[Gpu], environment: Mapping[str, str]) -> Gpu | None:
    """The card torch would call cuda:0: the first one left visible, or the first."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        wanted = environment.get(variable)
        if wanted is None:
            continue
        first = wanted.split(",")[0].strip()
        named = (
            gpu for gpu in gpus if first and (gpu.index == first or gpu.uuid.startswith(first))
        )
        return next(named, None)
    return gpus[0] if gpus else None


def parse_nvidia_smi(output: str) -> list[Gpu]:
    """Read `index, uuid, name, memory.total, memory.free` in MiB; "[N/A]" where memory is the CPU's.

    A sixth column, compute_cap, is there where the driver knows it.
    """
    rows = [[cell.strip() for cell in row] for row in csv.reader(output.splitlines())]
    return [
        Gpu(
            row[2],
            _mebibytes(row[3]),
            _mebibytes(row[4]),
            index=row[0],
            uuid=row[1],
            compute_capability=_decimal(row[5]) if len(row) == 6 else None,
        )
        for row in rows
        if len(row) in {5, 6} and row[0].isdigit()
    ]


def parse_rocm_smi(output: str) -> list[Gpu]:
    """Read JSON of `rocm-smi --showproductname --showmeminfo vram`: bytes as text, by card."""
    cards = _json_after_warnings(output)
    gpus = []
    for card, values in cards.items() if isinstance(cards, dict) else ():
        if not card.startswith("card") or "VRAM Total Memory (B)" not in values:
            continue
        total = int(values["VRAM Total Memory (B)"])
        used = int(values.get("VRAM Total Used Memory (B)", 0))
        known = (
            values.get(key) for key in ("Card Series", "Card series", "Card Model", "Card model")
        )
        name = next((one for one in known if one and not one.startswith("0x")), "AMD GPU")
        gpus.append(Gpu(name, total, total - used, index=card.removeprefix("card")))
    return gpus


def parse_amd_smi(output: str) -> list[Gpu]:
    """Read JSON of `amd-smi metric --mem-usage`: a list, from ROCm 7 on inside {"gpu_data": [...]}; MB means MiB."""
    found = _json_after_warnings(output)
    rows = found.get("gpu_data", []) if isinstance(found, dict) else found
    gpus: list[Gpu] = []
    for row in rows if isinstance(rows, list) else ():
        usage = row.get("mem_usage", {})
        total, free = (
            _mebibytes(usage.get(key, {}).get("value")) for key in ("total_vram", "free_vram")
        )
        if total is not None:
            gpus.append(Gpu("AMD GPU", total, free, index=str(row.get("gpu", len(gpus)))))
    return gpus


def within_cgroup(total: int, available: int, root: Path) -> tuple[int, int]:
    """Total and available RAM, cut to what a container (Linux, cgroup 2) may use; page cache counts as available."""
    limit = _number_in(root / "memory.max")
    current = _number_in(root / "memory.current")
    if limit is None or current is None or limit >= total:
        return total, available
    lines = (root / "memory.stat").read_text().splitlines()
    cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return limit, max(0, min(available, limit - current + cached))


def free_disk(folder: Path) -> int:
    """Free bytes of the disk on which `folder` lies or would lie."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _nvidia_smi(*columns: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"]


_NVIDIA_COLUMNS = ("index", "uuid", "name", "memory.total", "memory.free")
_TOOLS: tuple[tuple[list[str], Callable[[str], list[Gpu]]], ...] = (
    (_nvidia_smi(*_NVIDIA_COLUMNS, "compute_cap"), parse_nvidia_smi),
    (_nvidia_smi(*_NVIDIA_COLUMNS), parse_nvidia_smi),  # drivers before 510 refuse compute_cap
    (["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"], parse_rocm_smi),
    (["amd-smi", "metric", "--mem-usage", "--json"], parse_amd_smi),
)


def ask_tool(command: list[str]) -> str | None:
    """Standard output of a vendor's tool; None where it is not installed, fails or hangs."""
    path = shutil.which(command[0])
    if path is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a fixed list, no shell
            [path, *command[1:]], capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _json_after_warnings(output: str) -> Any:
    """The JSON of a tool that may print warnings before it; an empty mapping when there is none."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.lstrip()[:1] in {"{", "["}), None)
    if start is None:
        return {}
    try:
        return json.loads("\n".join(lines[start:]))
    except json.JSONDecodeError:
        return {}


def _mebibytes(value: object) -> int | None:
    text = str(value)
    return int(text) * _MIB if text.isdigit() else None


def _decimal(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdigit() else None


def _number_in(path: Path) -> int | None:
    """The number a kernel file holds; None when there is no such file, or it says "max"."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def _num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
