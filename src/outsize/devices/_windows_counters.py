"""Windows' performance counters of this process's graphics memory, asked for by their English names.

"Local Usage" and "Non Local Usage" are what is resident on the card and in the host's memory; "Dedicated Usage" and
"Shared Usage", which Task Manager shows, are what is committed, and hardly change when memory slides away
(System Informer, pull request 2971). Not verified on hardware: the calls are PDH's documentation, and tested against a
stand-in of it.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from typing import Any

from outsize.devices._sensors import ProcessMemory

COUNTERS = ("Local Usage", "Non Local Usage")
_LARGE = 0x400  # PDH_FMT_LARGE
_MORE_DATA = 0x800007D2
_SOURCE = "Windows' counters"


class _Value(ctypes.Structure):
    _fields_ = (("status", ctypes.c_uint32), ("large", ctypes.c_longlong))


class _Item(ctypes.Structure):
    _fields_ = (("name", ctypes.c_wchar_p), ("value", _Value))


def read_counters(library: Any = None) -> ProcessMemory:
    """This process's memory now. library: in place of pdh.dll, for tests."""
    if library is None:
        load: Any = getattr(ctypes, "WinDLL", None)
        if load is None:
            return ProcessMemory(why="there are no performance counters but on Windows")
        library = load("pdh")
    query = ctypes.c_void_p()
    if library.PdhOpenQueryW(None, None, ctypes.byref(query)):
        return ProcessMemory(_SOURCE, why="PDH opens no query")
    try:
        found = {name: _values(library, query, name) for name in COUNTERS}
    finally:
        library.PdhCloseQuery(query)
    return memory_of(found, os.getpid())


def memory_of(found: Mapping[str, Mapping[str, int] | None], pid: int) -> ProcessMemory:
    """The sums over a process's instances, "pid_4242_luid_0x00000000_0x0000D2A1_phys_0", one for each card it uses."""
    sums: list[int | None] = []
    for name in COUNTERS:
        own = [
            value
            for instance, value in (found.get(name) or {}).items()
            if re.match(rf"pid_{pid}_", instance, flags=re.IGNORECASE)
        ]
        sums.append(sum(own) if own else None)
    why = "" if None not in sums else "the counters of GPU Process Memory do not list this process"
    return ProcessMemory(_SOURCE, sums[0], sums[1], why=why)


def _values(library: Any, query: ctypes.c_void_p, name: str) -> dict[str, int] | None:
    """A counter's value by instance; None where there is no such counter."""
    counter = ctypes.c_void_p()
    path = f"\\GPU Process Memory(*)\\{name}"
    if library.PdhAddEnglishCounterW(query, path, None, ctypes.byref(counter)):
        return None
    if library.PdhCollectQueryData(query):
        return None
    size, count = ctypes.c_uint32(0), ctypes.c_uint32(0)
    call = library.PdhGetFormattedCounterArrayW
    code = call(counter, _LARGE, ctypes.byref(size), ctypes.byref(count), None)
    if code & 0xFFFFFFFF != _MORE_DATA:
        return None
    room = ctypes.create_string_buffer(size.value)  # names lie behind the items, in the same piece
    if call(counter, _LARGE, ctypes.byref(size), ctypes.byref(count), room):
        return None
    items = ctypes.cast(room, ctypes.POINTER(_Item))
    return {items[place].name: items[place].value.large for place in range(count.value)}
