"""What the system itself says of a card: its sensors, and how much of its memory this process holds, and where.

One reading for whoever asks (`_open_sensors.py` chooses who gives it): NVML or nvidia-smi for NVIDIA, the kernel's files
for AMD on Linux, Windows' performance counters for memory there. No torch is needed. Whatever a system does not tell is None, and `why` says so: unknown is never
taken for well. Reading registers can hold a card up for milliseconds, so nobody reads more often than EVERY_S.

Not verified on AMD cards, nor on Windows: those readers rest on recorded samples. An underscore begins this file's name
because every file without one is a device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

EVERY_S = 10.0  # between two readings; 5 at the least: on some cards each one stalls the machine for 4 to 5 ms


@dataclass(frozen=True, slots=True)
class CardId:
    """Which physical card. pci: its place on the bus, "0000:c1:00.0"; uuid: NVIDIA's, "GPU-..."; "" where unknown."""

    vendor: Literal["nvidia", "amd"]
    pci: str = ""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Sensors:
    """One look at a card; None: unknown. busy, memory_busy: shares of the time, 0 to 1. used_bytes: by all programs.

    clock_mhz: of the cores. source: who told. why: what is unknown and why, "" where nothing is.
    """

    source: str = ""
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    busy: float | None = None
    memory_busy: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Where this process's card memory lies, as the system counts it; None: unknown.

    card_bytes: on the card. host_bytes: in the host's memory, pinned buffers included. evicted_ms: for how long its queues
    were held up so far because memory was taken from them (AMD on Linux). source, why: as in Sensors.
    """

    source: str = ""
    card_bytes: int | None = None
    host_bytes: int | None = None
    evicted_ms: int | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class SensorReader(Protocol):
    """Reads one card."""

    def sensors(self) -> Sensors:
        """Its sensors now."""

    def memory(self) -> ProcessMemory:
        """This process's memory on it now."""


@dataclass(frozen=True, slots=True)
class NoReader:
    """Where nothing tells of a card."""

    why: str

    def sensors(self) -> Sensors:
        return Sensors(why=self.why)

    def memory(self) -> ProcessMemory:
        return ProcessMemory(why=self.why)


def unknown_of(found: Sensors) -> Sensors:
    """The same, with the names of what nobody told in `why`."""
    names = {
        "power_w": "power", "clock_mhz": "clock", "temperature_c": "temperature", "busy": "load",
        "memory_busy": "load of the memory", "used_bytes": "used memory",
    }  # fmt: skip
    missing = [name for field, name in names.items() if getattr(found, field) is None]
    return (
        replace(found, why=f"{found.source} does not tell: {', '.join(missing)}")
        if missing
        else found
    )
