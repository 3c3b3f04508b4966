"""An AMD card on Linux by the kernel's files alone: hwmon for its sensors, fdinfo and KFD for this process's memory.

Not verified on hardware: the layout is the kernel's documentation and recorded samples. Every file may be missing, by
kernel and card; what it would tell is then unknown. Where a processor's graphics share its memory both kinds of memory are
one, and where it lies says nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outsize.devices._sensors import (
    CardId,
    NoReader,
    ProcessMemory,
    SensorReader,
    Sensors,
    unknown_of,
)

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SEEN_SHARE = (
    0.9  # of what KFD allocated: rounding to pages and what was just freed stay below a tenth
)
_SOURCE = "amdgpu"


def open_amdgpu(card: CardId, root: Path = Path("/")) -> SensorReader:
    """What reads an AMD card: the one at that place on the bus, or the only one."""
    folders = [
        one.resolve()
        for one in sorted((root / "sys/class/drm").glob("card*/device"))
        if re.fullmatch(r"card\d+", one.parent.name) and _text(one / "vendor").strip() == "0x1002"
    ]
    named = [one for one in folders if card.pci and one.name == card.pci]
    if not named and not card.pci and len(folders) == 1:
        named = folders
    if not named:
        return NoReader(f"the kernel lists no AMD card at {card.pci or 'an unknown place'}")
    return Amdgpu(named[0], root)


@dataclass(frozen=True, slots=True)
class Amdgpu:
    """One card. device: its folder below /sys/devices, named by its place on the bus."""

    device: Path
    root: Path

    def sensors(self) -> Sensors:
        hwmon = next(iter(sorted(self.device.glob("hwmon/hwmon*"))), self.device / "hwmon")
        power = _number(hwmon / "power1_average")
        power = _number(hwmon / "power1_input") if power is None else power  # newer cards
        clocks = {_text(one).strip(): one for one in hwmon.glob("freq*_label")}
        core, memory = (_clock(clocks.get(name)) for name in ("sclk", "mclk"))
        return unknown_of(
            Sensors(
                _SOURCE,
                power_w=None if power is None else power / 1e6,
                power_limit_w=_share(_number(hwmon / "power1_cap"), 1e6),
                clock_mhz=core,
                memory_clock_mhz=memory,
                temperature_c=_share(_number(hwmon / "temp1_input"), 1e3),
                busy=_share(_number(self.device / "gpu_busy_percent"), 100),
                memory_busy=_share(_number(self.device / "mem_busy_percent"), 100),
                used_bytes=_number(self.device / "mem_info_vram_used"),
                total_bytes=_number(self.device / "mem_info_vram_total"),
            )
        )

    def memory(self) -> ProcessMemory:
        own = self.root / "proc/self/fdinfo"
        texts = [_text(one) for one in own.iterdir()] if own.is_dir() else []
        card_bytes, host_bytes = parse_fdinfo(texts, self.device.name)
        allocated, evicted_ms = self._kfd()
        if card_bytes is None:
            return ProcessMemory(
                _SOURCE, evicted_ms=evicted_ms, why="fdinfo does not tell of this process"
            )
        # KFD counts what was allocated, wherever it went; a fdinfo that sees less than that is blind to compute
        if card_bytes + (host_bytes or 0) < _SEEN_SHARE * (allocated or 0):
            return ProcessMemory(
                _SOURCE, evicted_ms=evicted_ms, why="fdinfo does not count what KFD allocated"
            )
        return ProcessMemory(_SOURCE, card_bytes, host_bytes, evicted_ms)

    def _kfd(self) -> tuple[int | None, int | None]:
        """Bytes allocated on the card and milliseconds of eviction, as the compute driver counts them by process."""
        kfd = self.root / "sys/class/kfd/kfd"
        for node in sorted((kfd / "topology/nodes").glob("*")):
            gpu_id = _text(node / "gpu_id").strip()
            if (
                gpu_id not in {"", "0"}
                and parse_kfd_place(_text(node / "properties")) == self.device.name
            ):
                own = kfd / "proc" / str(os.getpid())
                return _number(own / f"vram_{gpu_id}"), _number(
                    own / f"stats_{gpu_id}" / "evicted_ms"
                )
        return None, None


def parse_fdinfo(texts: Iterable[str], pci: str) -> tuple[int | None, int | None]:
    """Bytes on the card and in the host's memory, from the fdinfo of all open files; None where none tells.

    A client is counted once, however many of its files are open; of two readings of it the larger counts, since the kernel
    may let values go back. drm-resident-* is what newer kernels call drm-memory-*, which they keep beside it.
    """
    clients: dict[str, tuple[int | None, int | None]] = {}
    for place, text in enumerate(texts):
        values = dict(re.findall(r"^([\w-]+):[ \t]*(.*?)[ \t]*$", text, flags=re.MULTILINE))
        if values.get("drm-driver") != "amdgpu" or values.get("drm-pdev", pci) != pci:
            continue
        client = values.get("drm-client-id", f"file {place}")
        told = (_region(values, "vram"), _region(values, "gtt"))
        had = clients.get(client, (None, None))
        clients[client] = (_larger(had[0], told[0]), _larger(had[1], told[1]))
    card = [one for one, _ in clients.values() if one is not None]
    host = [one for _, one in clients.values() if one is not None]
    return (sum(card) if card else None), (sum(host) if host else None)


def parse_kfd_place(text: str) -> str:
    """The place on the bus of a node of KFD's topology: location_id is bus, device and function; "" for none."""
    found = {
        name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, flags=re.MULTILINE)
    }
    place = found.get("location_id", 0)
    if not place:
        return ""
    return f"{found.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"


def _region(values: dict[str, str], name: str) -> int | None:
    for key in (f"drm-resident-{name}", f"drm-memory-{name}"):
        found = re.fullmatch(r"(\d+)(?:[ \t]+(\w+))?", values.get(key, ""))
        unit = None if found is None else _UNITS.get((found[2] or "").lower())
        if found is not None and unit is not None:
            return int(found[1]) * unit
    return None


def _larger(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)


def _clock(label: Path | None) -> float | None:
    """MHz of the clock whose label this is."""
    return (
        None
        if label is None
        else _share(_number(label.with_name(label.name.replace("label", "input"))), 1e6)
    )


def _share(value: int | None, of: float) -> float | None:
    return None if value is None else value / of


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """A small file of the kernel; "" where there is none, or it cannot be read at the moment."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
