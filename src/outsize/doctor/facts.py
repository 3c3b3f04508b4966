"""What is known of one machine before anything is measured: plain values, so that any machine can be written down.

None means that nobody knows; rules that ask for it stay undecided. A package that is missing from `versions` is not
installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Os = Literal["linux", "windows", "macos"]

# GPUs of AMD that share the RAM.
INTEGRATED = frozenset(
    {"gfx90c", "gfx1033", "gfx1035", "gfx1036", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"}
)  # fmt: skip
# What every machine has: a missing version of one of these is unknown, not absent.
PLATFORM_VERSIONS = frozenset({"driver", "kernel", "rocm", "hip", "cuda"})

NO_TORCH = "none"  # as torch_build: there is none

# Packages whose versions are asked for.
PACKAGES = (
    "torch", "triton", "triton-windows", "pytorch-triton-rocm", "triton-rocm", "bitsandbytes",
    "diffusers", "transformers", "peft", "safetensors", "accelerate", "huggingface-hub", "hf-xet",
    "flash-attn", "flash-linear-attention", "torchao",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine.

    vendor: of the card that training takes; "none": there is no card. arch: "sm_90", "gfx1100". driver_model: "WDDM" or
    "TCC", of NVIDIA on Windows. versions: of packages by their names, and of "driver", "kernel", "rocm" (as the wheel of
    torch names it), "hip" and "cuda" (torch.version). environment: the variables of this process. tools: vendors'
    programs found on PATH. sysctl: settings of the kernel. commit_limit_bytes: RAM and page files together (Windows), or
    what the kernel would promise at most where it is told not to promise more (Linux, strict). torch_build: "cuda", "rocm",
    "cpu", or NO_TORCH.
    """

    vendor: str | None
    os: Os | None
    arch: str | None = None
    device: str | None = None
    num_devices: int | None = None
    driver_model: str | None = None
    is_integrated: bool | None = None
    is_wsl: bool = False
    is_container: bool | None = None
    is_virtual: bool | None = None
    is_jetson: bool = False
    versions: Mapping[str, str | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    tools: frozenset[str] | None = None
    sysctl: Mapping[str, str] = field(default_factory=dict)
    torch_build: str | None = None
    has_aotriton_images: bool | None = None
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    commit_limit_bytes: int | None = None
    page_file_bytes: int | None = None

    @property
    def os_class(self) -> str | None:
        """The system as a driver sees it: "wsl" is neither Linux nor Windows."""
        return "wsl" if self.is_wsl else self.os

    @property
    def torch_hip_unset(self) -> bool | None:
        """Whether torch tells no version of HIP."""
        return None if "torch" not in self.versions else not self.versions.get("hip")

    @property
    def override(self) -> str | None:
        """HSA_OVERRIDE_GFX_VERSION against the card: "same", "differs", "" where it is unset or empty."""
        value = self.environment.get("HSA_OVERRIDE_GFX_VERSION", "")
        if not value:
            return ""
        if self.arch is None:
            return None
        return "same" if overridden_arch(value) == self.arch else "differs"

    def to_json(self) -> dict[str, Any]:
        """As JSON values, without the environment, which holds secrets."""
        values = {**asdict(self), "tools": None if self.tools is None else sorted(self.tools)}
        del values["environment"]
        return values


def overridden_arch(value: str) -> str | None:
    """The card that HSA_OVERRIDE_GFX_VERSION names: "11.0.0" is gfx1100, "9.0.10" gfx90a; None when it is none."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", value.strip())
    return None if found is None else f"gfx{found[1]}{int(found[2]):x}{int(found[3]):x}"


def version_numbers(text: str) -> tuple[int, ...] | None:
    """The leading numbers of a version: "7.2.53211-e1a6bc" is (7, 2, 53211); None when it begins with none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    return None if found is None else tuple(int(one) for one in found[1].split("."))


def version_matches(text: str, wanted: str) -> bool | None:
    """Whether a version lies in a range, as in ">=7.2,<7.13", "==7.2.*" or "*"; None when it cannot be read.

    Numbers are compared as numbers: 7.14 is newer than 7.2. What follows them (a1, +rocm7.2, -generic) is left out.
    """
    if wanted.strip() == "*":
        return True
    have = version_numbers(text)
    if have is None:
        return None
    return all(_bound_holds(have, bound.strip()) for bound in wanted.split(","))


def _bound_holds(have: tuple[int, ...], bound: str) -> bool:
    found = re.fullmatch(r"(>=|<=|==|>|<)(\d+(?:\.\d+)*)(\.\*)?", bound)
    assert found is not None, f"no bound of a version: {bound!r}"
    sign, numbers = found[1], tuple(int(one) for one in found[2].split("."))
    if found[3]:
        assert sign == "==", f"only == goes with a star: {bound!r}"
        return have[: len(numbers)] == numbers
    width = max(len(have), len(numbers))
    left, right = (one + (0,) * (width - len(one)) for one in (have, numbers))
    return {
        ">=": left >= right,
        "<=": left <= right,
        "==": left == right,
        ">": left > right,
        "<": left < right,
    }[sign]
