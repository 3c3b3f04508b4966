"""From what a machine's tools and files say to the rules that name it: gathering and judging together, on recorded samples.

test_doctor_rules.py judges facts that were written down by hand; here they come from the samples, so that a fact which gathering
forgets, or calls by another name than a rule does, shows.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from doctor_machines import PACKAGES
from test_doctor_rules import EXPECTED

from outsize.doctor import gather
from outsize.doctor.facts import Facts
from outsize.doctor.rules import judge, known_rules

SAMPLES = Path(__file__).parent / "doctor_samples"
TODAY = dt.date(2026, 12, 1)
CUDA = "__version__ = '2.13.0'\ncuda = '13.0'\nhip = None\n"


@dataclass(frozen=True)
class Machine:
    """What answers on it. tools: sample by program; texts: by file; torch: its version.py; packages: beside the usual."""

    system: str
    tools: Mapping[str, str]
    torch: str
    texts: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    has_images: bool | None = None


def rocm(version: str, hip: str) -> str:
    return f"__version__ = '{version}'\ncuda = None\nhip = '{hip}'\n"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


UBUNTU = {
    "/proc/version": sample("proc_version_ubuntu.txt"),
    "/proc/sys/vm/compact_unevictable_allowed": "1\n",
}
MACHINES = {
    "RTX 4090, Windows": Machine("Windows", {"nvidia-smi": "nvidia_4090_windows.csv"}, CUDA),
    "RTX 4090, WSL 2": Machine(
        "Linux", {"nvidia-smi": "nvidia_4090_wsl.csv"}, CUDA,
        {"/proc/version": sample("proc_version_wsl.txt"), "/proc/cpuinfo": "flags : fpu hypervisor\n"},
        {"triton": "3.7.0"},
    ),
    "gfx1100, Windows": Machine(
        "Windows", {"hipinfo": "hipinfo_gfx1100.txt", "reg": "reg_adapters.txt"},
        rocm("2.13.0+rocm7.14.0", "7.14.60850"), has_images=True,
    ),
    "gfx1201, Linux": Machine(
        "Linux", {"rocminfo": "rocminfo_gfx1201.txt"}, rocm("2.13.0+rocm7.2.3", "7.2.53211"),
        UBUNTU, {"triton": "3.6.0"}, has_images=True,
    ),
    "H200, Linux": Machine("Linux", {"nvidia-smi": "nvidia_h200.csv"}, CUDA, UBUNTU, {"triton": "3.7.0"}),
}  # fmt: skip
# The same machines in the table that was written by hand.
BY_HAND = {
    ("NVIDIA GeForce RTX 4090", "windows"): "RTX 4090, Windows",
    ("NVIDIA GeForce RTX 4090", "wsl"): "RTX 4090, WSL 2",
    ("AMD Radeon RX 7900 XTX", "windows"): "gfx1100, Windows",
    ("AMD Radeon AI PRO R9700", "linux"): "gfx1201, Linux",
    ("NVIDIA H200", "linux"): "H200, Linux",
}


def gathered(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """Its facts, gathered as if this were it."""
    have = {**PACKAGES, **machine.packages}

    def version(name: str) -> str:
        if name not in have:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(have[name])

    def answer(command: list[str]) -> str | None:
        name = machine.tools.get(command[0])
        return None if name is None else sample(name)

    monkeypatch.setattr(gather, "ask_tool", answer)
    monkeypatch.setattr(gather, "_text", lambda path: machine.texts.get(str(path), ""))
    monkeypatch.setattr(gather, "_kernel_cards", list)
    monkeypatch.setattr(
        gather, "torch_build", lambda: gather.parse.parse_torch_version(machine.torch)
    )
    monkeypatch.setattr(gather, "_has_images", lambda _arch: machine.has_images)
    monkeypatch.setattr(gather.platform, "system", lambda: machine.system)
    monkeypatch.setattr(
        gather.shutil, "which", lambda name: name if name in machine.tools else None
    )
    monkeypatch.setattr(importlib.metadata, "version", version)
    return gather.gather_facts({})


@pytest.mark.parametrize("name", MACHINES)
def test_what_a_machine_says_of_itself_brings_the_rules_that_name_it_and_no_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = gathered(MACHINES[name], monkeypatch)
    wanted = {
        BY_HAND[one.device, one.os_class]: rules  # type: ignore[index] # those machines have both
        for one, rules in EXPECTED if (one.device, one.os_class) in BY_HAND
    }  # fmt: skip
    judged = judge(known_rules(), facts, today=TODAY, measured={})
    assert {one.rule.id for one in judged.findings} == wanted[name]
    assert judged.undecided == ()
