"""Checks that need no child: driver, memory, page file and versions, judged from facts."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement

from outsize.base.units import format_bytes
from outsize.doctor.checks import Check, Status
from outsize.doctor.facts import NO_TORCH, Facts

_READ = "read from the system"
# Plans start near 6 GiB for the smallest bases; 16 GiB hold torch, an encoder's window and a desktop.
_RAM_WANTED = 16 << 30
_PACKAGES_WANTED = ("torch", "diffusers", "transformers", "peft", "safetensors", "bitsandbytes")
Requires = Callable[[str], "list[str] | None"]


def standing_checks(facts: Facts, *, page_files: list[str] | None = None) -> list[Check]:
    """All of them. page_files: paths on Windows; None elsewhere."""
    return [
        check_driver(facts),
        check_versions(facts.versions),
        check_ram(facts),
        check_commit(facts, page_files),
    ]


def check_driver(facts: Facts) -> Check:
    """A card has a driver, and torch was built for its maker."""
    if facts.vendor in {None, "none"}:
        found = "no card answers (nvidia-smi, rocminfo, hipinfo, the kernel)"
        return Check(
            "driver", "skipped", found, "", "", "a card without a driver looks the same", False
        )
    known = ("driver", "cuda", "rocm", "hip", "kernel")
    told = ", ".join(f"{name} {facts.versions[name]}" for name in known if facts.versions.get(name))
    measured = (
        f"{facts.device} ({facts.arch or 'arch unknown'}), {told}, "
        f"{'no torch' if facts.torch_build == NO_TORCH else f'torch for {facts.torch_build}'}"
    )
    builds = {"nvidia": "cuda", "amd": "rocm"}
    wanted = builds.get(facts.vendor or "")
    if wanted is None:
        remedy = "train on the processor, or on a card of NVIDIA or AMD"
        return Check(
            "driver", "warn", measured, "a card that outsize can use", remedy, _READ, False
        )
    is_right = facts.torch_build == wanted
    remedy = (
        "" if is_right else f"install torch's {wanted} build (`python bootstrap.py` chooses it)"
    )
    return Check(
        "driver", "pass" if is_right else "fail", measured, f"torch built for {wanted}", remedy, _READ, True
    )  # fmt: skip


def check_ram(facts: Facts) -> Check:
    """RAM, as far as a container may use it."""
    if facts.ram_bytes is None:
        return Check("ram", "skipped", "not known", "", "", "not measured", False)
    is_enough = facts.ram_bytes >= _RAM_WANTED
    remedy = "" if is_enough else "small bases only; `outsize plan RECIPE` tells what fits"
    measured, wanted = format_bytes(facts.ram_bytes), f"{format_bytes(_RAM_WANTED)} or more"
    return Check("ram", "pass" if is_enough else "warn", measured, wanted, remedy, _READ, False)


def check_commit(facts: Facts, page_files: list[str] | None) -> Check:
    """What the system will promise at most: where it ends, loading dies without a word."""
    limit, ram = facts.commit_limit_bytes, facts.ram_bytes
    if facts.os == "linux" and limit is None:
        swap = format_bytes(facts.page_file_bytes or 0)
        measured = f"no commit limit (vm.overcommit_memory {facts.sysctl.get('vm.overcommit_memory', '?')}), swap {swap}"
        return Check("commit", "pass", measured, "none, or well above the RAM", "", _READ, False)
    if limit is None or ram is None:
        return Check("commit", "skipped", "not known", "", "", "not measured", False)
    where = "" if page_files is None else f"; page files: {', '.join(page_files) or 'none'}"
    measured = f"{format_bytes(limit)}, {format_bytes(ram)} of it RAM{where}"
    # a card's memory may be charged against it as well, and a map of the largest shard always is
    wanted_bytes = ram + max(16 << 30, facts.vram_bytes or 0)
    status: Status = "pass" if limit >= wanted_bytes else "warn"
    grow = format_bytes(max(0, wanted_bytes - limit))
    remedy = "" if status == "pass" else f"make the page file (or swap) {grow} larger"
    confidence = _READ if facts.os == "linux" else f"{_READ}; not tried on this system"
    wanted = f"{format_bytes(wanted_bytes)} or more"
    return Check("commit", status, measured, wanted, remedy, confidence, False)


def check_versions(versions: Mapping[str, str | None], requires: Requires | None = None) -> Check:
    """Packages that must go together, by what each of them says it requires. requires: for tests."""
    found = [*_conflicts(versions, requires or _requirements)]
    missing = [name for name in _PACKAGES_WANTED if name not in versions]
    told = [
        f"{name} {versions[name]}" for name in (*_PACKAGES_WANTED, "triton") if versions.get(name)
    ]
    measured = ", ".join(told)
    faults = [f"{name} is missing" for name in missing] + found
    if faults:
        measured = "; ".join(faults) + (f" (found {measured})" if measured else "")
    remedy = "pip install --upgrade outsize, in an environment of its own" if faults else ""
    return Check(
        "versions", "fail" if faults else "pass", measured, "each takes the others' versions", remedy,
        "read from package metadata", True, values=dict(versions),
    )  # fmt: skip


def _conflicts(versions: Mapping[str, str | None], requires: Requires) -> Iterable[str]:
    """What one of the packages, or outsize itself, requires of another and does not get."""
    for owner in ("outsize", *versions):
        for text in requires(owner) or ():
            try:
                wanted = Requirement(text)
                is_asked = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            except (InvalidRequirement, UndefinedEnvironmentName):
                continue
            have = versions.get(wanted.name)
            if is_asked and have and not wanted.specifier.contains(have, prereleases=True):
                yield f"{owner} requires {wanted.name} {wanted.specifier}, and {have} is there"


def _requirements(name: str) -> list[str] | None:
    try:
        return importlib.metadata.requires(name)
    except importlib.metadata.PackageNotFoundError:
        return None
