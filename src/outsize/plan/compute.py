"""How the step computes: in which arithmetic, compiled or not, with kernels that repeat their bits or not.

A recipe may leave the first two open. The arithmetic is then the fastest of those that the card has and for which the
family has evidence that training is as good. Compiling pays when the run is long enough; that is judged where seconds
are known (draft.py), here only whether it may be done.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from typing import Any

from outsize.devices._profile import MachineProfile
from outsize.devices._rates import COMPUTE_TYPE, Rates, find_card, first_capability, vendor_of
from outsize.plan.names import AUTO
from outsize.recipes.recipe import Recipe

_EVERYWHERE = COMPUTE_TYPE
_VERIFIED = "nvidia"  # whose cards compiling and 8-bit products were run on


@dataclass(frozen=True, slots=True)
class Compute:
    """What train.arithmetic, train.compile and train.exact come to on a machine, and why.

    records: the kernels of a compiled block are launched as one, where the device can do that. It changes no bit.
    """

    arithmetic: str
    compiles: bool
    is_exact: bool
    why: str
    records: bool = False

    def describe(self) -> dict[str, Any]:
        """What decides bits: two runs resume each other only where it is equal."""
        return {
            "arithmetic": self.arithmetic,
            "compiles": self.compiles,
            "is_exact": self.is_exact,
        }


def proven_for(family: str) -> tuple[str, ...]:
    """Arithmetics beside the compute type for which there is evidence that training this family is as good."""
    text = resources.files("outsize.plan").joinpath("_evidence.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text).get(family, {}).get("arithmetics", ()))


def choose_arithmetic(
    recipe: Recipe, machine: MachineProfile, rates: Rates, proven: Collection[str]
) -> tuple[str, str]:
    """The arithmetic and the reason. proven: those in which training this family was shown to be as good."""
    asked = recipe.train.arithmetic
    if asked != AUTO:
        return asked, "asked for by the recipe"
    if not machine.has_gpu:
        return _EVERYWHERE, "a processor computes in fp32"
    is_verified = vendor_of(machine.device) == _VERIFIED
    usable = [
        name
        for name in rates.matmul_flops
        if name == _EVERYWHERE or (is_verified and name in proven)
    ]
    fastest = max(usable, key=lambda name: rates.matmul_flops[name])
    others = [name for name in rates.matmul_flops if name not in usable]
    if others and not is_verified:
        why = f"{', '.join(others)} was not verified on such hardware"
    elif others:
        why = f"{', '.join(others)} would be faster, but that training is as good has not been shown for this family"
    elif fastest == _EVERYWHERE:
        why = "the card has nothing faster"
    else:
        why = "the fastest that the card has"
    return fastest, why


def arithmetic_fault(arithmetic: str, machine: MachineProfile, rates: Rates) -> str | None:
    """Why the machine cannot compute so; None when it can, or when nobody can tell without trying."""
    if arithmetic == _EVERYWHERE or (machine.has_gpu and arithmetic in rates.matmul_flops):
        return None
    since = first_capability(arithmetic)
    is_known = find_card(machine.device) is not None or machine.compute_capability is not None
    if machine.has_gpu and (since is None or not is_known):
        return None  # the arithmetic tells by itself once the device is open
    needs = "" if since is None else f" (NVIDIA cards have it from compute capability {since} on)"
    return f"{machine.device} has no products in {arithmetic}{needs}"


def may_record(machine: MachineProfile) -> bool:
    """Whether a block's kernels may be launched as one: on the cards for which that was verified."""
    return machine.has_gpu and vendor_of(machine.device) == _VERIFIED


def may_compile(
    machine: MachineProfile, *, has_triton: bool, asked: bool | None
) -> tuple[bool, str]:
    """Whether the blocks may be compiled, and the reason when not."""
    if asked is not None:
        return asked, "asked for by the recipe"
    if not machine.has_gpu:
        return False, "blocks are compiled on cards only"
    if machine.os != "Linux" or vendor_of(machine.device) != _VERIFIED:
        return (
            False,
            "compiling is off where it was not verified on hardware (all but NVIDIA on Linux)",
        )
    if not has_triton:
        return False, "triton, which compiling needs, is not installed"
    return True, ""
