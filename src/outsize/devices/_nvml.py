"""NVIDIA's own library of sensors, called directly; nvidia-smi, which is made of it, where it cannot be loaded.

The library comes with every driver, answers in well under a millisecond, and needs no package. A number that a card or a
system does not give is None. Under Windows' display driver model it tells no process's memory; in a container it tells
pids of the host, so a process there is found only where it is the card's only one.
"""

from __future__ import annotations

import csv
import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outsize.devices._profile import ask_tool
from outsize.devices._sensors import (
    CardId,
    NoReader,
    ProcessMemory,
    Sensors,
    unknown_of,
)

_SUCCESS, _TOO_SMALL = 0, 7
_CLOCK_CORES, _CLOCK_MEMORY = 1, 2
_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_MIB = 1 << 20
SMI_COLUMNS = (
    "uuid", "pci.bus_id", "power.draw", "enforced.power.limit", "clocks.sm", "clocks.max.sm", "clocks.mem",
    "temperature.gpu", "utilization.gpu", "utilization.memory", "memory.used", "memory.total",
)  # fmt: skip


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def open_nvidia(card: CardId) -> Nvml | NvidiaSmi | NoReader:
    """What reads an NVIDIA card."""
    library = _load()
    if library is not None and library.nvmlInit_v2() == _SUCCESS:
        handle = find_handle(library, card)
        if handle is None:
            return NoReader(
                f"NVML does not know the card {card.uuid or card.pci or '(no address)'}"
            )
        return Nvml(library, handle)
    if ask_tool(["nvidia-smi", "-L"]) is not None:
        return NvidiaSmi(card)
    return NoReader("NVML cannot be loaded, and nvidia-smi does not answer")


def compute_processes(card: CardId) -> list[tuple[int, int | None]] | None:
    """(pid, bytes) of every process that computes on a card; None where neither library nor tool tells."""
    reader = open_nvidia(card)
    return None if isinstance(reader, NoReader) else reader.processes()


def find_handle(library: Any, card: CardId) -> ctypes.c_void_p | None:
    """A card's handle: by its uuid, by its place on the bus, or because it is the only one."""
    handle = ctypes.c_void_p()
    for call, name in (
        (library.nvmlDeviceGetHandleByUUID, card.uuid),
        (library.nvmlDeviceGetHandleByPciBusId_v2, card.pci),
    ):
        if name and call(name.encode(), ctypes.byref(handle)) == _SUCCESS:
            return handle
    count = ctypes.c_uint()
    is_told = library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _SUCCESS
    is_only = is_told and count.value == 1 and not (card.uuid or card.pci)
    if is_only and library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == _SUCCESS:
        return handle
    return None


@dataclass(frozen=True, slots=True)
class Nvml:
    """One card through the library."""

    library: Any
    handle: ctypes.c_void_p
    source = "NVML"

    def sensors(self) -> Sensors:
        lib = self.library
        load = self._struct(lib.nvmlDeviceGetUtilizationRates, _Utilization())
        memory = self._struct(lib.nvmlDeviceGetMemoryInfo, _Memory())
        return unknown_of(
            Sensors(
                self.source,
                power_w=_share(self._number(lib.nvmlDeviceGetPowerUsage), 1000),
                power_limit_w=_share(self._number(lib.nvmlDeviceGetEnforcedPowerLimit), 1000),
                clock_mhz=self._number(lib.nvmlDeviceGetClockInfo, _CLOCK_CORES),
                max_clock_mhz=self._number(lib.nvmlDeviceGetMaxClockInfo, _CLOCK_CORES),
                memory_clock_mhz=self._number(lib.nvmlDeviceGetClockInfo, _CLOCK_MEMORY),
                temperature_c=self._number(lib.nvmlDeviceGetTemperature, 0),
                busy=None if load is None else load.gpu / 100,
                memory_busy=None if load is None else load.memory / 100,
                used_bytes=None if memory is None else memory.used,
                total_bytes=None if memory is None else memory.total,
            )
        )

    def memory(self) -> ProcessMemory:
        found = self.processes()
        if found is None:
            return ProcessMemory(self.source, why="NVML does not list the card's processes")
        return own_memory(self.source, found, os.getpid())

    def _number(self, call: Callable[..., int], *arguments: int) -> float | None:
        value = ctypes.c_uint()
        is_told = call(self.handle, *arguments, ctypes.byref(value)) == _SUCCESS
        return float(value.value) if is_told else None

    def _struct(self, call: Callable[..., int], into: Any) -> Any:
        return into if call(self.handle, ctypes.byref(into)) == _SUCCESS else None

    def processes(self) -> list[tuple[int, int | None]] | None:
        """(pid, bytes) of each process that computes on the card."""
        call = getattr(self.library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if call is None:  # a driver before 510
            return None
        room = ctypes.c_uint(64)
        for _ in range(3):  # others may start meanwhile
            rows = (_Process * room.value)()
            count = ctypes.c_uint(room.value)
            code = call(self.handle, ctypes.byref(count), rows)
            if code == _SUCCESS:
                return [
                    (row.pid, None if row.used == _NOT_AVAILABLE else row.used)
                    for row in rows[: count.value]
                ]
            if code != _TOO_SMALL:
                return None
            room = ctypes.c_uint(count.value + 16)
        return None


@dataclass(frozen=True, slots=True)
class NvidiaSmi:
    """One card through the driver's tool, a child process a reading."""

    card: CardId
    source = "nvidia-smi"

    def sensors(self) -> Sensors:
        query = [
            "nvidia-smi",
            f"--query-gpu={','.join(SMI_COLUMNS)}",
            "--format=csv,noheader,nounits",
        ]
        return parse_smi_sensors(ask_tool(query) or "", self.card)

    def memory(self) -> ProcessMemory:
        found = self.processes()
        if found is None:
            return ProcessMemory(self.source, why="nvidia-smi did not answer")
        return own_memory(self.source, found, os.getpid())

    def processes(self) -> list[tuple[int, int | None]] | None:
        """(pid, bytes) of each process that computes on the card."""
        query = [
            "nvidia-smi",
            "--query-compute-apps=gpu_uuid,pid,used_memory",
            "--format=csv,noheader,nounits",
        ]
        text = ask_tool(query)
        return None if text is None else parse_smi_processes(text, self.card)


def parse_smi_sensors(text: str, card: CardId) -> Sensors:
    """The card's row of `nvidia-smi --query-gpu=` SMI_COLUMNS; "[N/A]" and the like are None."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    rows = [row for row in rows if len(row) == len(SMI_COLUMNS)]
    named = [row for row in rows if card.uuid and row[0] == card.uuid]
    named = named or [row for row in rows if card.pci and row[1].lower().endswith(card.pci.lower())]
    if not named and not (card.uuid or card.pci) and len(rows) == 1:
        named = rows
    if not named:
        return Sensors("nvidia-smi", why="nvidia-smi does not list the card")
    power, limit, clock, most, memory_clock, celsius, busy, memory_busy, used, total = map(
        _decimal, named[0][2:]
    )
    return unknown_of(
        Sensors(
            "nvidia-smi", power, limit, clock, most, memory_clock, celsius,
            _share(busy, 100), _share(memory_busy, 100), _mebibytes(used), _mebibytes(total),
        )
    )  # fmt: skip


def parse_smi_processes(text: str, card: CardId) -> list[tuple[int, int | None]]:
    """(pid, bytes) of the card's rows of `nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory`."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [
        (int(row[1]), _mebibytes(_decimal(row[2])))
        for row in rows
        if len(row) == 3 and row[1].isdigit() and card.uuid in {"", row[0]}
    ]


def own_memory(source: str, found: list[tuple[int, int | None]], pid: int) -> ProcessMemory:
    """This process's share. A list of one that bears another pid is this process seen from outside its container."""
    own = [used for other, used in found if other == pid]
    if not own and len(found) == 1:
        own = [found[0][1]]
    if not own:
        return ProcessMemory(
            source,
            why=f"{source} lists {len(found)} processes and not this one (a container has pids of its own)",
        )
    if own[0] is None:
        why = "Windows' display driver model" if platform.system() == "Windows" else "this system"
        return ProcessMemory(source, why=f"{source} does not tell a process's memory under {why}")
    return ProcessMemory(source, card_bytes=own[0])


def _load() -> Any:
    """The library; None where there is none."""
    names = ("nvml.dll",) if platform.system() == "Windows" else ("libnvidia-ml.so.1",)
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _share(value: float | None, of: float) -> float | None:
    return None if value is None else value / of


def _mebibytes(value: float | None) -> int | None:
    return None if value is None else int(value * _MIB)


def _decimal(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdigit() else None
