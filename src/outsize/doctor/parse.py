"""From what systems and vendors' tools print to facts; each parser is a pure function of a text.

Every one is tested on recorded samples (tests/doctor_samples). A text that says nothing gives nothing, never an error:
tools differ from release to release, and a machine whose tool changed must still be judged.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass

NVIDIA_COLUMNS = ("name", "driver_version", "compute_cap", "memory.total", "driver_model.current")


@dataclass(frozen=True, slots=True)
class Card:
    """What a tool tells of one card; None where it tells nothing."""

    name: str
    arch: str | None = None
    vram_bytes: int | None = None
    driver: str | None = None
    driver_model: str | None = None
    is_integrated: bool | None = None


def parse_nvidia_query(text: str) -> list[Card]:
    """Rows of `nvidia-smi --query-gpu=` NVIDIA_COLUMNS, csv without heads and units; "[N/A]" is None."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    cards = []
    for row in rows:
        if len(row) != len(NVIDIA_COLUMNS) or not re.match(r"\d", row[1]):
            continue
        name, driver, capability, mebibytes, model = row
        is_number = re.fullmatch(r"\d+\.\d+", capability)
        cards.append(
            Card(
                name=name,
                arch="sm_" + capability.replace(".", "") if is_number else None,
                vram_bytes=int(mebibytes) << 20 if mebibytes.isdigit() else None,
                driver=driver,
                driver_model=model if model in {"WDDM", "TCC", "MCDM"} else None,
                is_integrated=not mebibytes.isdigit(),
            )
        )
    return cards


def parse_rocminfo(text: str) -> list[Card]:
    """The GPU agents of `rocminfo`."""
    cards = []
    for agent in re.split(r"^Agent \d+\s*$", text, flags=re.MULTILINE)[1:]:
        if _field(agent, "Device Type") != "GPU":
            continue
        arch = (_field(agent, "Name") or "").split(":")[0]
        pool = re.search(r"Segment:\s+GLOBAL[^\n]*\n\s+Size:\s+(\d+)\(", agent)
        properties = _field(agent, "Memory Properties") or ""
        cards.append(
            Card(
                name=_field(agent, "Marketing Name") or arch or "AMD GPU",
                arch=arch if arch.startswith("gfx") else None,
                vram_bytes=int(pool[1]) << 10 if pool else None,  # in KB, which are 1024 bytes
                is_integrated="APU" in properties if properties else None,
            )
        )
    return cards


def parse_hipinfo(text: str) -> list[Card]:
    """The cards of `hipInfo`, which the Windows SDK and its wheels have in place of rocminfo."""
    cards = []
    for part in re.split(r"^device#\s+\d+\s*$", text, flags=re.MULTILINE)[1:]:
        arch = (_field(part, "gcnArchName") or "").split(":")[0]
        size = re.match(r"([\d.]+) GB", _field(part, "totalGlobalMem") or "")
        integrated = _field(part, "isIntegrated")
        cards.append(
            Card(
                name=_field(part, "Name") or arch or "AMD GPU",
                arch=arch or None,
                vram_bytes=int(float(size[1]) * 2**30) if size else None,
                is_integrated=None if integrated is None else integrated == "1",
            )
        )
    return cards


def parse_kfd_properties(text: str) -> str | None:
    """The card of one node of the kernel's own topology: gfx_target_version 110000 is gfx1100; None for a processor."""
    found = re.search(r"^gfx_target_version\s+(\d+)$", text, flags=re.MULTILINE)
    number = int(found[1]) if found else 0
    if not number:
        return None
    return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"


def parse_proc_version(text: str) -> tuple[str | None, bool]:
    """The kernel's version and whether it is WSL's, from /proc/version."""
    found = re.match(r"Linux version (\S+)", text)
    return (found[1] if found else None), "microsoft" in text.lower()


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name, from /proc/meminfo (kB there are 1024 bytes)."""
    found = re.findall(r"^(\w[\w()]*):\s+(\d+) kB$", text, flags=re.MULTILINE)
    return {name: int(value) << 10 for name, value in found}


def parse_reg_query(text: str) -> dict[str, dict[str, str]]:
    r"""Values by name by key, from `reg query`; the parts of a REG_MULTI_SZ stay joined by "\0"."""
    keys: dict[str, dict[str, str]] = {}
    values: dict[str, str] = {}
    for line in text.splitlines():
        found = re.match(r" {4}(.+?) {4}REG_[A-Z_]+ {4}(.*)$", line)
        if line.startswith("HKEY_"):
            values = keys.setdefault(line.strip(), {})
        elif found:
            values[found[1]] = found[2]
    return keys


def adapters_of(keys: Mapping[str, Mapping[str, str]]) -> list[Card]:
    """Display adapters of the registry's class of them: name, driver and memory."""
    cards = []
    for values in keys.values():
        name = values.get("DriverDesc")
        if not name:
            continue
        size = values.get("HardwareInformation.qwMemorySize", "")
        is_hex = re.fullmatch(r"0x[0-9a-fA-F]+", size)
        cards.append(
            Card(
                name=name,
                vram_bytes=int(size, 16) if is_hex else None,
                driver=values.get("DriverVersion"),
            )
        )
    return cards


def page_files_of(keys: Mapping[str, Mapping[str, str]]) -> list[str] | None:
    r"""Paths of page files, [] where there are none, None where the registry does not say.

    From "PagingFiles" of the memory management key: "C:\pagefile.sys 4096 8192", "?:\pagefile.sys" where the system
    chooses, parts joined by "\0".
    """
    for values in keys.values():
        if "PagingFiles" in values:
            parts = (part.split(" ")[0] for part in values["PagingFiles"].split("\\0"))
            return [part for part in parts if part]
    return None


def parse_systeminfo(text: str) -> dict[str, int]:
    """RAM and commit limit in bytes ("ram", "commit_limit"), from the English `systeminfo`; {} in another language."""
    wanted = {
        "ram": r"Total Physical Memory:\s+([\d.,\s]+) MB",
        "commit_limit": r"Virtual Memory: Max Size:\s+([\d.,\s]+) MB",
    }
    found = {name: re.search(pattern, text) for name, pattern in wanted.items()}
    return {name: int(re.sub(r"\D", "", one[1])) << 20 for name, one in found.items() if one}


def parse_torch_version(text: str) -> dict[str, str | None]:
    """What torch/version.py says without importing torch: "version", "cuda", "hip"."""
    pattern = r"^(__version__|cuda|hip)(?:\s*:[^=\n]+)?\s*=\s*(None|'[^']*'|\"[^\"]*\")"
    found = dict(re.findall(pattern, text, flags=re.MULTILINE))
    values = {name: None if one == "None" else one.strip("'\"") for name, one in found.items()}
    return {{"__version__": "version"}.get(name, name): one for name, one in values.items()}


def _field(text: str, name: str) -> str | None:
    found = re.search(rf"^\s*{re.escape(name)}:[ \t]*(\S.*?)\s*$", text, flags=re.MULTILINE)
    return found[1] if found else None
