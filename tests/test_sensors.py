"""What systems say of a card, read from samples: recorded fdinfo, and what tools and kernels document.

No card, no Windows and no AMD machine was at hand: libraries are stand-ins that keep the documented calls, and folders are
laid out as the kernel's documentation has them.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outsize.devices import _nvml, _windows_counters
from outsize.devices._amdgpu import open_amdgpu, parse_fdinfo, parse_kfd_place
from outsize.devices._nvml import (
    Nvml,
    find_handle,
    own_memory,
    parse_smi_processes,
    parse_smi_sensors,
)
from outsize.devices._open_sensors import open_sensors
from outsize.devices._sensors import CardId, NoReader
from outsize.devices._torch_gpu import card_id
from outsize.devices._windows_counters import memory_of, read_counters

SAMPLES = Path(__file__).parent / "sensor_samples"
CARD = CardId("nvidia", "0000:c1:00.0", "GPU-5c2a8a7c-6f4e-11ee-9a1b-0242ac120002")
OTHER = CardId("nvidia", "0000:c2:00.0", "GPU-0b1e6f1d-6f4e-11ee-9a1b-0242ac120002")
MIB, GIB = 1 << 20, 1 << 30


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


# --- nvidia-smi ----------------------------------------------------------------------------------


def test_smi_rows_are_found_by_uuid_and_by_place() -> None:
    """Two cards of one machine must never be taken for each other."""
    text = sample("nvidia_smi_sensors.csv")
    found = parse_smi_sensors(text, CARD)
    assert found == parse_smi_sensors(text, CardId("nvidia", CARD.pci))
    assert (found.power_w, found.power_limit_w, found.temperature_c) == (121.63, 700.0, 34.0)
    assert (found.clock_mhz, found.max_clock_mhz, found.memory_clock_mhz) == (1980, 1980, 3201)
    assert (found.busy, found.memory_busy) == (0.98, 0.41)
    assert (found.used_bytes, found.total_bytes) == (21534 * MIB, 143771 * MIB)
    assert found.why == ""


def test_what_smi_does_not_tell_is_unknown_and_named() -> None:
    """A missing sensor shown as 0 W would look like a stalled card."""
    found = parse_smi_sensors(sample("nvidia_smi_sensors.csv"), OTHER)
    assert found.power_w is None
    assert found.memory_busy is None
    assert found.clock_mhz == 345
    assert found.why == "nvidia-smi does not tell: power, load of the memory"


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "a,b\n"], ids=["empty", "words", "short"]
)
def test_an_answer_without_the_card_is_no_reading(text: str) -> None:
    found = parse_smi_sensors(text, CARD)
    assert found.power_w is None
    assert "does not list the card" in found.why


def test_a_process_counts_on_its_own_card_alone() -> None:
    """The same pid may hold memory on two cards."""
    text = sample("nvidia_smi_apps.csv")
    assert own_memory("x", parse_smi_processes(text, CARD), 4242).card_bytes == 21526 * MIB
    assert own_memory("x", parse_smi_processes(text, OTHER), 4242).card_bytes == 4 * MIB


def test_a_process_in_a_container_is_found_only_where_it_is_alone() -> None:
    """There pids are the host's: of several processes none can be told to be this one."""
    alone = own_memory("NVML", [(991, 3 * GIB)], 7)
    several = own_memory("NVML", [(991, 3 * GIB), (992, GIB)], 7)
    hidden = own_memory("NVML", [(7, None)], 7)
    nobody = own_memory("NVML", [], 7)
    assert alone.card_bytes == 3 * GIB
    for one in (several, hidden, nobody):
        assert one.card_bytes is None
        assert one.why


# --- NVML ----------------------------------------------------------------------------------------


class Library:
    """NVML as documented: codes are returned, values written through pointers. missing: calls that are refused."""

    def __init__(self, missing: tuple[str, ...] = (), processes: int = 2) -> None:
        self._missing, self._num_processes = missing, processes
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name in self._missing:
            return lambda *_: 3  # NVML_ERROR_NOT_SUPPORTED
        values = {
            "nvmlDeviceGetPowerUsage": 121_630,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 34,
            "nvmlDeviceGetMaxClockInfo": 1980,
        }
        return lambda _handle, *arguments: self._write(arguments[-1], values[name])

    def nvmlDeviceGetClockInfo(self, _handle: Any, which: int, into: Any) -> int:  # noqa: N802
        return self._write(into, {1: 1755, 2: 3201}[which])

    def nvmlDeviceGetUtilizationRates(self, _handle: Any, into: Any) -> int:  # noqa: N802
        into._obj.gpu, into._obj.memory = 98, 41
        return 0

    def nvmlDeviceGetMemoryInfo(self, _handle: Any, into: Any) -> int:  # noqa: N802
        into._obj.total, into._obj.used = 143771 * MIB, 21534 * MIB
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, _handle: Any, count: Any, rows: Any) -> int:  # noqa: N802
        self.sizes.append(count._obj.value)
        room, count._obj.value = count._obj.value, self._num_processes
        if room < self._num_processes:
            return 7
        for place in range(self._num_processes):
            rows[place].pid, rows[place].used = os.getpid() + place, (place + 1) * GIB
        return 0

    def nvmlDeviceGetCount_v2(self, into: Any) -> int:  # noqa: N802
        return self._write(into, 2)

    def nvmlDeviceGetHandleByUUID(self, name: bytes, into: Any) -> int:  # noqa: N802
        return self._write(into, 11) if name == CARD.uuid.encode() else 6

    def nvmlDeviceGetHandleByPciBusId_v2(self, name: bytes, into: Any) -> int:  # noqa: N802
        return self._write(into, 22) if name == OTHER.pci.encode() else 6

    def nvmlDeviceGetHandleByIndex_v2(self, _index: int, into: Any) -> int:  # noqa: N802
        return self._write(into, 33)

    @staticmethod
    def _write(into: Any, value: int) -> int:
        into._obj.value = value
        return 0


def test_nvml_gives_every_sensor_in_its_unit() -> None:
    found = Nvml(Library(), ctypes.c_void_p(1)).sensors()
    assert (found.power_w, found.power_limit_w) == (pytest.approx(121.63), pytest.approx(700.0))
    assert (found.clock_mhz, found.memory_clock_mhz, found.max_clock_mhz) == (1755, 3201, 1980)
    assert (found.busy, found.memory_busy, found.temperature_c) == (0.98, 0.41, 34)
    assert (found.used_bytes, found.total_bytes) == (21534 * MIB, 143771 * MIB)


def test_a_refused_call_of_nvml_is_unknown() -> None:
    library = Library(missing=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature"))
    found = Nvml(library, ctypes.c_void_p(1)).sensors()
    assert found.power_w is None
    assert found.clock_mhz == 1755
    assert found.why == "NVML does not tell: power, temperature"


def test_nvml_lists_this_process_however_many_there_are() -> None:
    """The list's length is told only after a call that was too small."""
    library = Library(processes=100)
    assert Nvml(library, ctypes.c_void_p(1)).memory().card_bytes == GIB
    assert library.sizes == [64, 116]


def test_a_card_is_found_by_its_address_and_never_guessed() -> None:
    """On a machine with two cards, one without an address is unknown."""
    assert find_handle(Library(), CARD).value == 11
    assert find_handle(Library(), OTHER).value == 22
    assert find_handle(Library(), CardId("nvidia")) is None
    assert find_handle(Library(), CardId("nvidia", "0000:ff:00.0")) is None


def test_without_library_and_tool_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvml, "_load", lambda: None)
    monkeypatch.setattr(_nvml, "ask_tool", lambda _command: None)
    reader = open_sensors(CARD)
    assert isinstance(reader, NoReader)
    assert "cannot be loaded" in reader.sensors().why
    assert "cannot be loaded" in reader.memory().why


def test_a_card_of_torch_is_named_as_tools_name_it() -> None:
    """What torch calls a device's place and uuid, against the forms of NVML and of the kernel."""
    place = {"pci_domain_id": 0, "pci_bus_id": 0xC1, "pci_device_id": 0}
    told = SimpleNamespace(uuid="5c2a8a7c-6f4e-11ee-9a1b-0242ac120002", **place)
    assert card_id(told, is_amd=False) == CARD
    assert card_id(told, is_amd=True) == CardId("amd", "0000:c1:00.0")
    assert card_id(SimpleNamespace(), is_amd=False) == CardId("nvidia")


# --- amdgpu --------------------------------------------------------------------------------------


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n", encoding="utf-8")


def amd_root(root: Path, *, vram: int = 20 * GIB, fdinfo: str = "", evicted: int = 12) -> Path:
    """A kernel's files with a card of AMD, one of somebody else, and this process."""
    if os.name == "nt":
        pytest.skip("the kernel's names are no names on Windows")
    card = root / "sys/devices/pci0000:00/0000:65:00.0"
    write(
        card, vendor="0x1002", gpu_busy_percent=99, mem_busy_percent=23,
        mem_info_vram_used=21 * GIB, mem_info_vram_total=24 * GIB,
    )  # fmt: skip
    write(
        card / "hwmon/hwmon4", power1_average=315_000_000, power1_cap=339_000_000, temp1_input=61_000,
        freq1_input=2_482_000_000, freq1_label="sclk", freq2_input=1_249_000_000, freq2_label="mclk",
    )  # fmt: skip
    other = root / "sys/devices/pci0000:00/0000:01:00.0"
    write(other, vendor="0x8086")
    for name, device in (("card0", other), ("card1", card)):
        folder = root / "sys/class/drm" / name
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(device)
    write(root / "sys/class/drm/card1-DP-1", status="connected")
    kfd = root / "sys/class/kfd/kfd"
    write(kfd / "topology/nodes/0", gpu_id=0, properties="cpu_cores_count 16")
    write(kfd / "topology/nodes/1", gpu_id=51_421, properties="location_id 25856\ndomain 0")
    own = kfd / "proc" / str(os.getpid())
    write(own, vram_51421=vram)
    write(own / "stats_51421", evicted_ms=evicted)
    write(root / "proc/self/fdinfo", **{"0": "pos: 0", "7": fdinfo})
    return root


CLIENT = "drm-driver: amdgpu\ndrm-pdev: 0000:65:00.0\ndrm-client-id: 9\n"


def test_hwmon_gives_every_sensor_in_its_unit(tmp_path: Path) -> None:
    found = open_amdgpu(CardId("amd", "0000:65:00.0"), amd_root(tmp_path)).sensors()
    assert (found.power_w, found.power_limit_w, found.temperature_c) == (315, 339, 61)
    assert (found.clock_mhz, found.memory_clock_mhz) == (2482, 1249)
    assert (found.busy, found.memory_busy) == (0.99, 0.23)
    assert (found.used_bytes, found.total_bytes) == (21 * GIB, 24 * GIB)
    assert found.why == ""


def test_a_file_that_a_kernel_lacks_is_unknown(tmp_path: Path) -> None:
    """Newer cards have power1_input alone; a card without either is not one of 0 W."""
    root = amd_root(tmp_path)
    hwmon = root / "sys/devices/pci0000:00/0000:65:00.0/hwmon/hwmon4"
    (hwmon / "power1_average").rename(hwmon / "power1_input")
    reader = open_amdgpu(CardId("amd"), root)
    assert reader.sensors().power_w == 315
    (hwmon / "power1_input").unlink()
    (hwmon / "freq1_label").unlink()
    found = reader.sensors()
    assert (found.power_w, found.clock_mhz, found.memory_clock_mhz) == (None, None, 1249)
    assert found.why == "amdgpu does not tell: power, clock"


def test_a_card_that_the_kernel_does_not_list_is_unknown(tmp_path: Path) -> None:
    reader = open_amdgpu(CardId("amd", "0000:99:00.0"), amd_root(tmp_path))
    assert "0000:99:00.0" in reader.sensors().why


def test_memory_that_slid_to_the_host_shows_in_fdinfo(tmp_path: Path) -> None:
    """KFD goes on counting what was allocated; only fdinfo tells where it lies."""
    text = f"{CLIENT}drm-memory-vram: {4 * MIB} KiB\ndrm-memory-gtt: {17 * MIB} KiB"
    found = open_amdgpu(CardId("amd"), amd_root(tmp_path, fdinfo=text)).memory()
    assert (found.card_bytes, found.host_bytes, found.evicted_ms) == (4 * GIB, 17 * GIB, 12)


def test_a_fdinfo_that_is_blind_to_compute_says_nothing(tmp_path: Path) -> None:
    """Else a base that lies where it should would be said to have slid away."""
    text = f"{CLIENT}drm-memory-vram: 2068 KiB\ndrm-memory-gtt: 8192 KiB"
    found = open_amdgpu(CardId("amd"), amd_root(tmp_path, fdinfo=text)).memory()
    assert found.card_bytes is None
    assert found.evicted_ms == 12
    assert "KFD" in found.why


def test_recorded_fdinfo_is_read_in_bytes() -> None:
    assert parse_fdinfo([sample("fdinfo_amdgpu.txt")], "0000:08:00.0") == (2068 << 10, 8192 << 10)
    assert parse_fdinfo([sample("fdinfo_amdgpu_new.txt")], "0000:65:00.0") == (
        286604 << 10,
        2 << 20,
    )


def test_fdinfo_of_another_card_or_driver_does_not_count() -> None:
    texts = [sample("fdinfo_amdgpu.txt"), sample("fdinfo_amdgpu.txt").replace("amdgpu", "i915")]
    assert parse_fdinfo(texts, "0000:65:00.0") == (None, None)
    assert parse_fdinfo(texts, "0000:08:00.0") == (2068 << 10, 8192 << 10)
    assert parse_fdinfo([], "0000:08:00.0") == (None, None)


def test_a_client_counts_once_and_its_larger_reading_counts() -> None:
    """One client may have many files open, and the kernel lets values go back."""
    first = sample("fdinfo_amdgpu.txt")
    later = first.replace("2068 KiB", "1024 KiB")
    second = first.replace("217", "218")
    assert parse_fdinfo([first, later, first, second], "0000:08:00.0") == (
        2 * 2068 << 10,
        2 * 8192 << 10,
    )


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("7", 7),
        ("7 KiB", 7 << 10),
        ("7 MiB", 7 << 20),
        ("7 GiB", 7 << 30),
        ("7 parsecs", None),
        ("", None),
    ],
)
def test_units_of_fdinfo(written: str, num_bytes: int | None) -> None:
    """A bare number is bytes; a unit that nobody knows is not guessed."""
    text = f"drm-driver: amdgpu\ndrm-pdev: 0000:08:00.0\ndrm-memory-vram: {written}\n"
    assert parse_fdinfo([text], "0000:08:00.0")[0] == num_bytes


def test_a_node_of_kfd_tells_its_place_on_the_bus() -> None:
    """location_id 25856 is 0x6500: bus 0x65, device 0, function 0."""
    assert parse_kfd_place("domain 0\nlocation_id 25856\n") == "0000:65:00.0"
    assert parse_kfd_place("domain 1\nlocation_id 25866\n") == "0001:65:01.2"
    assert parse_kfd_place("cpu_cores_count 16\n") == ""


# --- Windows -------------------------------------------------------------------------------------


class Pdh:
    """pdh.dll as documented: the array is asked for twice, first for its size. refused: calls that fail."""

    def __init__(self, values: dict[str, dict[str, int]], refused: str = "") -> None:
        self._values, self._refused = values, refused
        self._paths: dict[int, str] = {}
        self.paths: list[str] = []
        self.is_closed = False

    def PdhOpenQueryW(self, _source: Any, _data: Any, into: Any) -> int:  # noqa: N802
        into._obj.value = 1
        return 0

    def PdhAddEnglishCounterW(self, _query: Any, path: str, _data: Any, into: Any) -> int:  # noqa: N802
        self.paths.append(path)
        into._obj.value = len(self.paths)
        self._paths[len(self.paths)] = path
        return -1073738824 if self._refused == "add" else 0

    def PdhCollectQueryData(self, _query: Any) -> int:  # noqa: N802
        return 1 if self._refused == "collect" else 0

    def PdhGetFormattedCounterArrayW(  # noqa: N802
        self, counter: Any, form: int, size: Any, count: Any, room: Any
    ) -> int:
        assert form == 0x400
        rows = self._values[self._paths[counter.value].rpartition("\\")[2]]
        size._obj.value = len(rows) * ctypes.sizeof(_windows_counters._Item)
        count._obj.value = len(rows)
        if room is None:
            return 0x800007D2 - (1 << 32)  # as a signed number, which ctypes gives
        items = ctypes.cast(room, ctypes.POINTER(_windows_counters._Item))
        for place, (name, value) in enumerate(rows.items()):
            items[place].name, items[place].value.large = name, value
        return 0

    def PdhCloseQuery(self, _query: Any) -> int:  # noqa: N802
        self.is_closed = True
        return 0


def test_windows_counters_are_asked_for_in_english_and_summed_over_cards() -> None:
    """Their names are translated elsewhere; another process's instances must not count."""
    own, luid = f"pid_{os.getpid()}_luid_0x00000000_0x", "_phys_0"
    rows = {
        f"{own}0000D2A1{luid}": 3 * GIB,
        f"{own}0000E1F2{luid}": GIB,
        "pid_4_luid_0x0_0x1_phys_0": 9 * GIB,
    }
    library = Pdh({"Local Usage": rows, "Non Local Usage": dict.fromkeys(rows, MIB)})
    found = read_counters(library)
    assert (found.card_bytes, found.host_bytes) == (4 * GIB, 2 * MIB)
    assert library.paths == [
        r"\GPU Process Memory(*)\Local Usage",
        r"\GPU Process Memory(*)\Non Local Usage",
    ]
    assert library.is_closed


@pytest.mark.parametrize("refused", ["add", "collect"])
def test_counters_that_are_not_there_are_unknown(refused: str) -> None:
    library = Pdh({}, refused)
    found = read_counters(library)
    assert (found.card_bytes, found.host_bytes) == (None, None)
    assert "do not list this process" in found.why
    assert library.is_closed


def test_a_pid_that_begins_like_ours_is_somebody_elses() -> None:
    rows = {"Local Usage": {"pid_42_luid_0x0_0x1_phys_0": 5, "pid_421_luid_0x0_0x1_phys_0": 7}}
    assert memory_of(rows, 42).card_bytes == 5


@pytest.mark.skipif(hasattr(ctypes, "WinDLL"), reason="Windows has them")
def test_elsewhere_there_are_no_windows_counters() -> None:
    found = read_counters()
    assert found.card_bytes is None
    assert "Windows" in found.why


def test_a_processor_has_no_sensors_and_says_so() -> None:
    reader = open_sensors(None)
    assert "processor" in reader.sensors().why
    assert reader.memory().card_bytes is None
