"""What doctor checks: each is measured, then judged against what training needs, with a remedy and how far to trust it.

A check that was not made says why. Limits have their origin beside them. The calls run in child processes (children.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from outsize.base.units import format_bytes, format_seconds
from outsize.doctor.children import Call, Outcome
from outsize.doctor.facts import Facts

Status = Literal["pass", "warn", "fail", "skipped"]
Values = Mapping[str, Any]
Verdict = tuple[Status, str, str]  # status, measured, wanted

# Where these checks themselves have been tried, as (vendor, class of system): elsewhere a failure may be the check's own.
TRIED_ON = frozenset({("none", "linux")})
# Relative errors. Rounding of a result is 2**-24 and 2**-9, and sums of some hundred products add little; in bf16 attention
# also rounds its shares. A wrong kernel is off by a tenth or more.
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
# nf4 of normal numbers loses 9.2 % (docs/formats.md)
_ENCODE_LIMIT = 0.12
# Of the median: a piece of memory that is read at a quarter of its neighbours' rate does not lie on the card.
_SLOW_SHARE = 0.25
_PINNED_WANTED = 1 << 30  # twice the ring of staging pieces (placement/_feeder.py)
_HIDDEN_WANTED = 0.7


@dataclass(frozen=True, slots=True)
class Check:
    """One judged check. values: all that was measured; is_needed: training cannot do without it."""

    id: str
    status: Status
    measured: str
    wanted: str
    remedy: str
    confidence: str
    is_needed: bool
    seconds: float = 0.0
    values: Values = field(default_factory=dict)

    @property
    def passed(self) -> bool | None:
        """Whether it passed; None where it was not made."""
        return None if self.status == "skipped" else self.status == "pass"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "values": dict(self.values)}


@dataclass(frozen=True, slots=True)
class Probe:
    """A check that runs in a child. judge: of what it measured, on that machine; remedy: when it does not pass."""

    id: str
    target: str
    judge: Callable[[Values, Facts], Verdict]
    remedy: str
    is_needed: bool = True
    for_cards: bool = False
    timeout_s: float = 60.0

    def call(self, *arguments: Any) -> Call:
        """The call to make."""
        return Call(self.id, self.target, arguments, self.timeout_s)

    def judged(self, outcome: Outcome, facts: Facts) -> Check:
        """What the outcome says; a call that did not end well has failed, and what is not needed only warns."""
        if outcome.end == "done":
            status, measured, wanted = self.judge(outcome.value, facts)
        else:
            status, wanted = "fail", "a result"
            measured = f"{outcome.end}: {outcome.why}"
        if status == "fail" and not self.is_needed:
            status = "warn"
        return Check(
            self.id,
            status,
            measured,
            wanted,
            "" if status == "pass" else self.remedy,
            measured_confidence(facts),
            self.is_needed,
            outcome.seconds,
            outcome.value or {"end": outcome.end, "why": outcome.why, "said": outcome.said},
        )

    def skipped(self, why: str) -> Check:
        """The check where it is not made."""
        return Check(self.id, "skipped", why, "", "", "not measured", self.is_needed)


def measured_confidence(facts: Facts) -> str:
    """How far a measurement may be trusted."""
    if (facts.vendor, facts.os_class) in TRIED_ON:
        return "measured"
    return f"measured; this check has not been tried on {facts.vendor} with {facts.os_class}"


def judge_device(values: Values, facts: Facts) -> Verdict:
    """A card that is there must be the one that opens, and torch must hold kernels for it."""
    measured = f"{values['name']} ({values['kind']}), computes in {values['compute_dtype']}"
    has_card = facts.vendor in {"nvidia", "amd"}
    if has_card and not values["is_card"]:
        return (
            "fail",
            measured,
            f"{facts.device}, which torch as installed ({facts.torch_build}) does not open",
        )
    if not values["is_card"]:
        return "pass", measured, "a device"
    built_for = values["built_for"]
    wanted = f"kernels for {values['arch']} in torch (it has {', '.join(built_for)})"
    return ("pass" if is_built_for(values["arch"], built_for) else "fail"), measured, wanted


def is_built_for(arch: str, built_for: list[str]) -> bool:
    """Whether kernels run: of the very card, of NVIDIA's same major and an older minor, or compiled as they load."""
    if arch in built_for or not arch.startswith("sm_"):
        return arch in built_for
    major, minor = arch[3:-1], arch[-1]
    binary = (one[3:] for one in built_for if one.startswith("sm_") and one[-1].isdigit())
    later = (one[8:] for one in built_for if one.startswith("compute_") and one[-1].isdigit())
    fits = any(one[:-1] == major and one[-1] <= minor for one in binary)
    return fits or any(int(one) <= int(major + minor) for one in later)


def judge_allocation(values: Values, facts: Facts) -> Verdict:
    """All that is called free can be taken, holds what is written, and is equally fast everywhere."""
    rate, slow = values["median_bytes_per_s"], values["slowest_bytes_per_s"]
    measured = f"{format_bytes(values['bytes'])} of {format_bytes(values['wanted_bytes'])}, read at {rate / 1e9:.0f} GB/s"
    wanted = "all of it, each byte as written"
    is_card = facts.vendor in {"nvidia", "amd"}
    if is_card:
        measured += f", the slowest piece at {slow / 1e9:.0f}"
        wanted += f", no piece below {_SLOW_SHARE:.0%} of the rate"
    is_slow = is_card and slow < _SLOW_SHARE * rate
    if values["wrong_pieces"]:
        measured += f"; {values['wrong_pieces']} pieces read back wrong"
    if values["refused"]:
        measured += f"; refused: {values['refused']}"
    is_bad = values["wrong_pieces"] or values["refused"] or is_slow
    return ("fail" if is_bad else "pass"), measured, wanted


def judge_errors(values: Values, facts: Facts) -> Verdict:
    """Relative errors against float64; "worst" by case."""
    del facts
    limit = LIMITS[values["compute_dtype"]]
    name, worst = max(values["worst"].items(), key=lambda one: one[1])
    measured = f"error {worst:.1e} ({name})"
    if "backend" in values:
        measured += f", library: {values['backend']}"
    if "kernels" in values:
        wide = ", ".join(f"{w}: {'+'.join(k) or 'none'}" for w, k in values["kernels"].items())
        measured += f"; fused kernels by width {wide}"
    if "compile_s" in values:
        measured += f", {format_seconds(values['compile_s'])}"
    return (
        ("pass" if worst <= limit else "fail"),
        measured,
        f"error of {limit:g} at most, there and back",
    )


def judge_four_bit(values: Values, facts: Facts) -> Verdict:
    """Encoding loses what the format loses; decoding and products lose what the compute type loses."""
    del facts
    limit = LIMITS[values["compute_dtype"]]
    others = [values[name] for name in ("decode_error", "forward_error", "backward_error")]
    is_right = values["encode_error"] <= _ENCODE_LIMIT and max(others) <= limit
    measured = (
        f"{values['format']} by {values['kernel']}: encoding loses {values['encode_error']:.1%}, "
        f"decode and products off by {max(others):.1e}"
    )
    return ("pass" if is_right else "fail"), measured, f"{_ENCODE_LIMIT:.0%} and {limit:g} at most"


def judge_pinned(values: Values, facts: Facts) -> Verdict:
    """Enough for a ring, and worth having."""
    del facts
    held = values["bytes"]
    measured = f"{format_bytes(held)} of {format_bytes(values['asked_bytes'])} tried"
    if held:
        fast, slow = values["pinned_bytes_per_s"], values["pageable_bytes_per_s"]
        measured += f", {fast / 1e9:.1f} GB/s (ordinary memory {slow / 1e9:.1f})"
    if values["refused"]:
        measured += f"; {values['refused']}"
    is_good = (
        held >= _PINNED_WANTED and values["pinned_bytes_per_s"] >= values["pageable_bytes_per_s"]
    )
    wanted = f"{format_bytes(_PINNED_WANTED)} or more, faster than ordinary memory"
    return ("pass" if is_good else "warn"), measured, wanted


def judge_overlap(values: Values, facts: Facts) -> Verdict:
    """Copies run while the card computes."""
    del facts
    status: Status = "pass" if values["hidden"] >= _HIDDEN_WANTED else "warn"
    measured = f"{values['hidden']:.0%} of the copy is hidden"
    return status, measured, f"{_HIDDEN_WANTED:.0%} or more"


_DRIVER = "update driver and torch together; see the rules below for what is known of this machine"
_AT = "outsize.doctor.probes:"
PROBES = (
    Probe("device", f"{_AT}device", judge_device,
          "install the torch build of this card (pytorch.org, or `python bootstrap.py`), or a driver that it can use"),
    Probe("allocation", f"{_AT}allocation", judge_allocation,
          "close other programs on the card; keep plans below what could be taken (--vram-limit)"),
    Probe("matmul", f"{_AT}matmul", judge_errors, _DRIVER),
    Probe("attention", f"{_AT}attention", judge_errors, _DRIVER),
    Probe("four_bit", f"{_AT}four_bit", judge_four_bit,
          "update bitsandbytes, or train with another format (`format: int8`)"),
    Probe("pinned", f"{_AT}pinned", judge_pinned, is_needed=False, for_cards=True,
          remedy="blocks stream from ordinary memory (placement.pinned_bytes: 0B), which is slower; see the rules below"),
    Probe("overlap", f"{_AT}overlap", judge_overlap, is_needed=False, for_cards=True,
          remedy="keep more blocks on the card (placement.resident_bytes): what streams is waited for"),
    Probe("compile", f"{_AT}compiled", judge_errors, is_needed=False, for_cards=True, timeout_s=240.0,
          remedy="train.compile: false"),
)  # fmt: skip
