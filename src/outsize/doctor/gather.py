"""This machine's facts, without torch: from vendors' tools, the kernel's files, the registry and package metadata.

Each tool is a child process with a time limit, so a hung driver cannot hang this. What a tool or file does not tell stays
unknown. Windows and AMD were not at hand: what is read there rests on recorded samples alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outsize.devices._profile import ask_tool, within_cgroup
from outsize.doctor import parse
from outsize.doctor.facts import INTEGRATED, NO_TORCH, PACKAGES, Facts, Os

_TOOLS = ("nvidia-smi", "rocminfo", "hipinfo", "rocm-smi", "amd-smi")
_SYSCTL = ("vm.compact_unevictable_allowed", "vm.overcommit_memory", "vm.swappiness")
_ADAPTERS = r"HKLM\SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
_MEMORY_KEY = r"HKLM\SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management"
_OS: dict[str, Os] = {"Linux": "linux", "Windows": "windows", "Darwin": "macos"}
_VENDORS = {
    "nvidia": "nvidia",
    "geforce": "nvidia",
    "radeon": "amd",
    "amd": "amd",
    "intel": "intel",
}


def gather_facts(environment: Mapping[str, str] | None = None) -> Facts:
    """All that is known of this machine. environment: None for this process's own."""
    torch = torch_build()
    vendor, cards, adapters = _cards(torch)
    card = cards[0] if cards else None
    arch = card.arch if card else None
    system = _OS.get(platform.system())
    kernel, is_wsl = parse.parse_proc_version(_text("/proc/version"))
    is_integrated = card.is_integrated if card else None
    if vendor == "amd" and arch is not None:
        is_integrated = arch in INTEGRATED or bool(is_integrated)
    driver = next((one.driver for one in (*cards, *adapters) if one.driver), None)
    return Facts(
        vendor=vendor,
        os=system,
        arch=arch,
        device=card.name if card else platform.processor() or platform.machine(),
        num_devices=len(cards),
        driver_model=card.driver_model if card else None,
        is_integrated=is_integrated,
        is_wsl=is_wsl,
        is_container=is_container(_text("/proc/1/cgroup"), Path("/")),
        is_virtual=" hypervisor" in _text("/proc/cpuinfo") if system == "linux" else None,
        is_jetson=Path("/etc/nv_tegra_release").exists(),
        versions=_versions(torch, {"driver": driver, "kernel": kernel}),
        environment=dict(os.environ if environment is None else environment),
        tools=frozenset(name for name in _TOOLS if shutil.which(name)),
        sysctl=_sysctl(),
        torch_build=build_of(torch),
        has_aotriton_images=_has_images(arch) if vendor == "amd" else None,
        vram_bytes=card.vram_bytes if card else None,
        **_memory(system),
    )


def torch_build() -> dict[str, str | None]:
    """What the installed torch says of itself, read from its file and not imported; {} without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}
    return parse.parse_torch_version(_text(Path(spec.submodule_search_locations[0]) / "version.py"))


def build_of(torch: Mapping[str, str | None]) -> str:
    """Whose build of torch it is, of the tag in its version too: torch.version.hip is empty in some AMD builds."""
    if not torch:
        return NO_TORCH
    tag = (torch.get("version") or "").partition("+")[2]
    if torch.get("hip") or "rocm" in tag:
        return "rocm"
    return "cuda" if torch.get("cuda") else "cpu"


def rocm_of(version: str) -> str | None:
    """The release of ROCm that a wheel of torch names: "2.11.0+rocm7.2" is of 7.2."""
    found = re.search(r"rocm(\d+(?:\.\d+)*)", version)
    return found[1] if found else None


def is_container(cgroup: str, root: Path) -> bool:
    """Whether this is a container, from /proc/1/cgroup and the marks that engines leave."""
    marks = (root / ".dockerenv", root / "run" / ".containerenv")
    words = ("docker", "kubepods", "containerd", "libpod", "lxc")
    return any(one.exists() for one in marks) or any(word in cgroup for word in words)


def _cards(
    torch: Mapping[str, str | None],
) -> tuple[str | None, list[parse.Card], list[parse.Card]]:
    """The vendor whose card training takes, its cards, and what Windows lists as adapters."""
    columns = ",".join(parse.NVIDIA_COLUMNS)
    query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    nvidia = parse.parse_nvidia_query(ask_tool(query) or "")
    amd = parse.parse_rocminfo(ask_tool(["rocminfo"]) or "")
    amd = amd or parse.parse_hipinfo(ask_tool(["hipinfo"]) or "") or _kernel_cards()
    adapters: list[parse.Card] = []
    if platform.system() == "Windows":
        keys = parse.parse_reg_query(ask_tool(["reg", "query", _ADAPTERS, "/s"]) or "")
        adapters = parse.adapters_of(keys)
    found = {"nvidia": nvidia, "amd": amd}
    if build_of(torch) == "rocm":  # with cards of both, torch takes those it was built for
        found = {"amd": amd, "nvidia": nvidia}
    for vendor, cards in found.items():
        if cards:
            return vendor, cards, adapters
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "apple", [parse.Card("Apple GPU", is_integrated=True)], adapters
    for one in adapters:
        vendor = next((who for word, who in _VENDORS.items() if word in one.name.lower()), "")
        if vendor:
            return vendor, [one], adapters
    return "none", [], adapters


def _kernel_cards() -> list[parse.Card]:
    """Cards of the kernel's own topology, where no tool of ROCm is installed."""
    nodes = sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"))
    archs = (parse.parse_kfd_properties(_text(node)) for node in nodes)
    return [parse.Card(f"AMD GPU {arch}", arch=arch) for arch in archs if arch]


def _versions(
    torch: Mapping[str, str | None], others: Mapping[str, str | None]
) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    rocm = rocm_of(torch.get("version") or "")
    if rocm is None and torch.get("hip"):
        rocm = _text("/opt/rocm/.info/version").strip() or None
    more = {"rocm": rocm, "hip": torch.get("hip"), "cuda": torch.get("cuda"), **others}
    return found | {name: value for name, value in more.items() if value}


def _has_images(arch: str | None) -> bool | None:
    """Whether torch's wheel holds AOTriton's kernels for a card; None where it has another layout."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations or arch is None:
        return None
    images = Path(spec.submodule_search_locations[0]) / "lib" / "aotriton.images"
    if not images.is_dir():
        return None
    # kernels are kept for a card, or for it and its siblings: gfx1100, gfx110x, gfx11xx
    names = (arch, f"{arch[:-1]}x", f"{arch[:-2]}xx")
    return any(name in one.name for one in images.iterdir() for name in names)


def _memory(system: str | None) -> dict[str, Any]:
    """RAM, commit limit and page file or swap, in bytes."""
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    ram, _ = within_cgroup(memory.total, memory.available, Path("/sys/fs/cgroup"))
    limit = None
    if system == "windows":
        # psutil's swap there is the commit limit less the RAM
        limit = memory.total + swap.total
    elif system == "linux" and _text("/proc/sys/vm/overcommit_memory").strip() == "2":
        limit = parse.parse_meminfo(_text("/proc/meminfo")).get("CommitLimit")
    return {"ram_bytes": ram, "commit_limit_bytes": limit, "page_file_bytes": swap.total}


def page_files() -> list[str] | None:
    """Paths of Windows' page files; None elsewhere, or where the registry does not say."""
    if platform.system() != "Windows":
        return None
    query = ["reg", "query", _MEMORY_KEY, "/v", "PagingFiles"]
    return parse.page_files_of(parse.parse_reg_query(ask_tool(query) or ""))


def _sysctl() -> dict[str, str]:
    paths = {name: Path("/proc/sys", *name.split(".")) for name in _SYSCTL}
    return {name: text for name, path in paths.items() if (text := _text(path).strip())}


def _text(path: str | Path) -> str:
    """A small file of the system; "" where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
