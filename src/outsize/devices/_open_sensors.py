"""Which reader tells of a card on this system: by its vendor, and by the system."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from outsize.devices._amdgpu import open_amdgpu
from outsize.devices._nvml import open_nvidia
from outsize.devices._sensors import CardId, NoReader, ProcessMemory, SensorReader, Sensors
from outsize.devices._windows_counters import read_counters


def open_sensors(card: CardId | None, *, root: Path = Path("/")) -> SensorReader:
    """What reads a card. card: None where the host's processor computes. root: of the kernel's files, for tests."""
    if card is None:
        return NoReader("no card: the host's processor computes")
    system = platform.system()
    reader: SensorReader
    if card.vendor == "nvidia":
        reader = open_nvidia(card)
    elif system == "Linux":
        reader = open_amdgpu(card, root)
    else:
        reader = NoReader(f"no sensors of AMD cards are read on {system}")
    return WithCounters(reader) if system == "Windows" else reader


@dataclass(frozen=True, slots=True)
class WithCounters:
    """A card on Windows, where the driver's own tools do not tell of a process's memory."""

    inner: SensorReader

    def sensors(self) -> Sensors:
        return self.inner.sensors()

    def memory(self) -> ProcessMemory:
        found = self.inner.memory()
        return read_counters() if found.card_bytes is None else found
