"""What vendors' tools and systems print, as recorded samples, becomes facts; nonsense becomes nothing."""

from pathlib import Path

import pytest

from outsize.doctor import parse
from outsize.doctor.facts import NO_TORCH
from outsize.doctor.gather import build_of, is_container, rocm_of
from outsize.doctor.parse import Card

SAMPLES = Path(__file__).parent / "doctor_samples"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def test_nvidia_on_linux_and_windows() -> None:
    assert parse.parse_nvidia_query(sample("nvidia_h200.csv")) == [
        Card("NVIDIA H200", "sm_90", 143771 << 20, "580.95.05", None, is_integrated=False)
    ]
    assert parse.parse_nvidia_query(sample("nvidia_4090_windows.csv")) == [
        Card("NVIDIA GeForce RTX 4090", "sm_89", 24564 << 20, "566.36", "WDDM", is_integrated=False)
    ]


def test_a_card_that_shares_the_ram_has_no_memory_of_its_own() -> None:
    (card,) = parse.parse_nvidia_query(sample("nvidia_gb10.csv"))
    assert (card.arch, card.vram_bytes, card.is_integrated) == ("sm_121", None, True)


def test_rocminfo_tells_the_card_from_the_processor() -> None:
    assert parse.parse_rocminfo(sample("rocminfo_gfx1201.txt")) == [
        Card("AMD Radeon AI PRO R9700", "gfx1201", 33406976 << 10)
    ]
    (apu,) = parse.parse_rocminfo(sample("rocminfo_gfx1151.txt"))
    assert (apu.arch, apu.is_integrated, apu.vram_bytes) == ("gfx1151", True, 16252928 << 10)


def test_hipinfo_of_windows() -> None:
    (card,) = parse.parse_hipinfo(sample("hipinfo_gfx1100.txt"))
    assert (card.name, card.arch, card.is_integrated) == (
        "AMD Radeon RX 7900 XTX",
        "gfx1100",
        False,
    )
    assert card.vram_bytes == int(23.98 * 2**30)


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        (sample("kfd_gfx90a.txt"), "gfx90a"),
        ("gfx_target_version 110000", "gfx1100"),
        ("gfx_target_version 110501", "gfx1151"),
        ("gfx_target_version 0", None),
        ("cpu_cores_count 16", None),
    ],
)
def test_the_kernels_own_name_of_a_card(text: str, arch: str | None) -> None:
    assert parse.parse_kfd_properties(text) == arch


def test_wsl_is_told_from_linux() -> None:
    wsl, ubuntu = sample("proc_version_wsl.txt"), sample("proc_version_ubuntu.txt")
    assert parse.parse_proc_version(wsl) == ("5.15.167.4-microsoft-standard-WSL2", True)
    assert parse.parse_proc_version(ubuntu) == ("6.8.0-45-generic", False)


def test_memory_of_linux_and_windows() -> None:
    memory = parse.parse_meminfo(sample("meminfo.txt"))
    assert memory["CommitLimit"] == 41310560 * 1024
    assert memory["Active(anon)"] == 812344 * 1024
    assert "HugePages_Total" not in memory  # a count, not bytes
    assert parse.parse_systeminfo(sample("systeminfo.txt")) == {
        "ram": 65298 << 20,
        "commit_limit": 115474 << 20,
    }


def test_the_registry_of_windows() -> None:
    paging = parse.parse_reg_query(sample("reg_paging.txt"))
    assert parse.page_files_of(paging) == [r"C:\pagefile.sys", r"D:\pagefile.sys"]
    assert parse.page_files_of({"key": {"PagingFiles": ""}}) == []
    assert parse.page_files_of({}) is None
    assert parse.adapters_of(parse.parse_reg_query(sample("reg_adapters.txt"))) == [
        Card("AMD Radeon RX 7900 XTX", vram_bytes=0x600000000, driver="32.0.21030.2001")
    ]


def test_a_build_of_torch_is_known_without_importing_it() -> None:
    torch = parse.parse_torch_version(sample("torch_version_rocm.txt"))
    assert torch == {"version": "2.11.0+rocm7.2", "cuda": None, "hip": "7.2.53211-e1a6bc5663"}
    assert build_of(torch) == "rocm"
    assert rocm_of("2.11.0+rocm7.2") == "7.2"
    assert rocm_of("2.13.0+cu130") is None
    assert build_of({"version": "2.11.0+rocm7.14.0", "hip": None}) == "rocm"  # by its tag alone
    assert build_of({"version": "2.13.0+cpu", "cuda": None, "hip": None}) == "cpu"
    assert build_of({"version": "2.13.0", "cuda": "13.0"}) == "cuda"
    assert build_of({}) == NO_TORCH  # known to be missing, and no rule about a build is open


def test_containers_are_known_by_their_marks(tmp_path: Path) -> None:
    assert not is_container("0::/\n", tmp_path)
    assert is_container("0::/kubepods/besteffort/pod1\n", tmp_path)
    (tmp_path / ".dockerenv").touch()
    assert is_container("0::/\n", tmp_path)


@pytest.mark.parametrize(
    "nonsense",
    ["", "\n\n", "NVIDIA-SMI has failed because it couldn't communicate", "Agent 1\n, , ,"],
)
def test_nonsense_gives_nothing(nonsense: str) -> None:
    assert parse.parse_nvidia_query(nonsense) == []
    assert parse.parse_rocminfo(nonsense) == []
    assert parse.parse_hipinfo(nonsense) == []
    assert parse.parse_kfd_properties(nonsense) is None
    assert parse.parse_proc_version(nonsense) == (None, False)
    assert parse.parse_meminfo(nonsense) == {}
    assert parse.parse_systeminfo(nonsense) == {}
    assert parse.parse_torch_version(nonsense) == {}
