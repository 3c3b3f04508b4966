"""Stalls: what is seen of a run that gets nowhere, told apart by ratios to the card's own healthy baseline.

Pure: samples in, decisions out; app/stall_watch.py takes the samples and acts. Six signatures come from public reports (their
sources stand beside them); a step that never ends and matches none of them is `frozen`. A sensor that is absent makes the
signatures that need it undecided, never absent. Watts and megahertz differ between cards and power limits, so nothing
is compared with a fixed value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Doing = Literal["step", "between"]
# save: at the next step boundary, and go on. stop: save there and stop; where the step never ends, end the process.
Act = Literal["save", "stop"]


@dataclass(frozen=True, slots=True)
class Limits:
    """When to act. every_s: between samples (reading registers can hold a card up); hits: in a row before acting.

    hung_s, frozen_s: without an end of the step, on a card that says it is busy, and else: compiling for a new shape leaves a
    card idle and a thread at work for minutes, just as a deadlock does. first_s: the same before a baseline is known. All are
    at least; long steps wait for `patience` of their own. grace_s: from a decision until a thread that does not answer is
    given up.
    """

    every_s: float = 10.0
    hits: int = 2
    hung_s: float = 120.0
    frozen_s: float = 600.0
    first_s: float = 1800.0
    grace_s: float = 60.0
    patience: float = 20.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a run. None: nobody knows.

    at_s: on a clock that never goes back. step: updates done. doing_s: since the training's thread began what it is at.
    step_s: of the steps that ended last (the median of those since the look before). compute_share: of such a step, in which
    the device had work.
    busy, memory_busy: shares of time, 0 to 1. card_bytes, host_bytes: of this process, resident on the card and spilled to the
    host as the system counts them. evicted_ms: for how long queues were held up so far. cpu_s: of this process so far.
    read_bytes: that this process had read so far, from whatever disk. proof: the verdict of a proof of where memory lies
    (doctor/residency.py) that is recent, and no older than what lies on the host.
    """

    at_s: float
    step: int
    doing: Doing = "step"
    doing_s: float = 0.0
    step_s: float | None = None
    compute_share: float | None = None
    busy: float | None = None
    memory_busy: float | None = None
    power_w: float | None = None
    clock_mhz: float | None = None
    card_bytes: int | None = None
    host_bytes: int | None = None
    evicted_ms: float | None = None
    cpu_s: float | None = None
    read_bytes: int | None = None
    on_battery: bool | None = None
    proof: str | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A card that is well, at this run's work: medians over its first samples. slowest_s: the longest step so far."""

    step_s: float
    slowest_s: float
    power_w: float | None = None
    clock_mhz: float | None = None
    memory_busy: float | None = None
    host_bytes: float | None = None
    on_battery: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the journal."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Seen:
    """A sample beside the one before it and the baseline: what signatures look at. None where anything of it is missing."""

    now: Sample
    before: Sample
    baseline: Baseline | None

    @property
    def slow(self) -> float:
        """How many times longer than a healthy step: the last one, or the one that has not ended; 0: nothing to compare with."""
        if self.baseline is None:
            return 0.0
        return max(self.now.step_s or 0.0, self.now.doing_s) / self.baseline.step_s

    def ratio(self, name: str) -> float | None:
        """A sensor's value over its baseline's."""
        now, healthy = getattr(self.now, name), getattr(self.baseline, name, None)
        return None if now is None or not healthy else now / healthy

    def above(self, name: str) -> float | None:
        """How far a sensor's value lies above its baseline's."""
        now, healthy = getattr(self.now, name), getattr(self.baseline, name, None)
        return None if now is None or healthy is None else now - healthy

    def grown(self, name: str) -> float | None:
        """How much a counter grew since the sample before."""
        now, before = getattr(self.now, name), getattr(self.before, name)
        return None if now is None or before is None else now - before

    def rate(self, name: str) -> float | None:
        """The same per second."""
        grown, seconds = self.grown(name), self.now.at_s - self.before.at_s
        return None if grown is None or seconds <= 0 else grown / seconds


# A value that a signature asks for, and whether it fits; only asked where the value is there.
Test = tuple[str, Callable[[Seen], float | None], Callable[[float], bool]]
_CORE = (0.6, 1.6)  # of processors: one thread that spins, and what else a process does
_FLAT_BYTES = 64 << 20
ON_CARD, OFF_CARD = "on the card", "off the card"  # verdicts of a proof
SPILLED_BYTES = 256 << 20  # more than a driver's own buffers come to
TRICKLE = 1e6  # bytes a second: a disk that brings more is slow, not dead


@dataclass(frozen=True, slots=True)
class Signature:
    """A class of stall. slow: steps at least so many times longer; after: seconds for which a step must not have ended at all.

    is_restarted: a fresh process cures it. remedy: what a person can do. source: who reported it.
    """

    name: str
    what: str
    tests: tuple[Test, ...]
    act: Act
    remedy: str
    source: str
    slow: float = 3.0
    after: Callable[[Limits], float] | None = None
    is_restarted: bool = True

    @property
    def is_frozen(self) -> bool:
        """Whether the step does not end."""
        return self.after is not None


def _spilled(seen: Seen) -> float | None:
    """Bytes that came to lie in the host's memory; all of them where they were proved to be off the card."""
    return float("inf") if seen.now.proof == OFF_CARD else seen.above("host_bytes")


def _not_proved(seen: Seen) -> float | None:
    """Whether nobody proved that memory lies on the card; None before anybody tried."""
    return None if seen.now.proof is None else seen.now.proof != ON_CARD


SIGNATURES = (
    Signature(
        "poisoned context",
        "the card runs at a higher clock, draws less power and hardly reads its memory",
        (
            ("clock_mhz", lambda seen: seen.ratio("clock_mhz"), lambda ratio: ratio >= 1.15),
            # 210 to 260 W of 370 to 390; below lies a hung queue
            ("power_w", lambda seen: seen.ratio("power_w"), lambda ratio: 0.4 < ratio <= 0.7),
            # healthy 23 to 52 %, poisoned 0 to 10 %
            ("memory_busy", lambda seen: seen.ratio("memory_busy"), lambda ratio: ratio <= 0.4),
            # neither waiting for copies nor an idle queue: the kernels themselves are slow
            ("compute_share", lambda seen: seen.now.compute_share, lambda share: share >= 0.5),
        ),
        "stop",
        "run nothing else on this card while it trains: a second context that computes is what brings it about (seen on RDNA3 "
        "with Windows)",
        "ROCm/TheRock#6824",
    ),
    Signature(
        "clock at its floor",
        "the card says that it is busy at a fraction of its clock and power",
        (
            # 41 to 630 MHz of 2400 to 2900
            ("clock_mhz", lambda seen: seen.ratio("clock_mhz"), lambda ratio: ratio <= 0.3),
            ("power_w", lambda seen: seen.ratio("power_w"), lambda ratio: ratio <= 0.7),
            ("busy", lambda seen: seen.now.busy, lambda busy: busy >= 0.9),
        ),
        "save",
        "keep the display on, or set the performance level (rocm-smi --setperflevel high); a newer kernel or driver helped others. "
        "Training goes on, slowly: neither stopping nor a fresh process would cure it",
        "ROCm/legacy-rocm-build#5849, #6675; CachyOS/linux-cachyos#888",
        slow=2.0,  # three to four times were reported, and steps that wait for copies feel less of it
        is_restarted=False,
    ),
    Signature(
        "hung queue",
        "the card says that it is busy at full clock and draws next to nothing",
        (
            ("busy", lambda seen: seen.now.busy, lambda busy: busy >= 0.9),
            ("clock_mhz", lambda seen: seen.ratio("clock_mhz"), lambda ratio: ratio >= 0.9),
            # 41 to 49 W of 370
            ("power_w", lambda seen: seen.ratio("power_w"), lambda ratio: ratio <= 0.4),
        ),
        "stop",
        "update driver and runtime together; what was computed since the last checkpoint is lost",
        "ROCm/legacy-rocm-build#6437",
        after=lambda limits: limits.hung_s,
    ),
    Signature(
        "deadlock",
        "the card is idle, its memory unchanged, and one thread of this process spins",
        (
            ("busy", lambda seen: seen.now.busy, lambda busy: busy <= 0.05),
            ("card_bytes", lambda seen: seen.grown("card_bytes"), lambda grown: abs(grown) <= _FLAT_BYTES),
            ("cpu_s", lambda seen: seen.rate("cpu_s"), lambda cores: _CORE[0] <= cores <= _CORE[1]),
            ("read_bytes", lambda seen: seen.rate("read_bytes"), lambda rate: rate < TRICKLE),
        ),
        "stop",
        "hung.txt in the run folder shows where; if it is a kernel's compiler, try `train.compile: false`, if a copy, "
        "`placement: {pinned_bytes: 0B}`",
        "ROCm/TheRock#7832, SageAttention#365",
        after=lambda limits: limits.frozen_s,
    ),
    Signature(
        "spilled memory",
        "memory of this process was moved from the card to the host",
        (
            ("host_bytes", _spilled, lambda above: above >= SPILLED_BYTES),
            # buffers of our own that were pinned for a larger picture are counted alike
            ("proof", _not_proved, bool),
        ),
        "stop",
        "close what else uses the card's memory, or plan for less of it (--vram-limit); on NVIDIA with Windows set `CUDA - Sysmem "
        "Fallback Policy` to `Prefer No Sysmem Fallback`",
        "ostris/ai-toolkit#794, unslothai/unsloth#7072",
        slow=1.5,
    ),
    Signature(
        "evicted memory",
        "the driver holds the card's queues up while it moves pinned memory",
        (
            # a tenth of the time; a single eviction, as when another program starts, is over in one sample
            ("evicted_ms", lambda seen: seen.rate("evicted_ms"), lambda rate: rate >= 100.0),
        ),
        "stop",
        "sysctl vm.compact_unevictable_allowed=0, or pin less (`placement: {pinned_bytes: ...}`); a fresh process pins as much",
        "operating notes of a public vLLM fork for RDNA",
        slow=2.0,
        is_restarted=False,
    ),
)  # fmt: skip

FROZEN = Signature(
    "frozen",
    "the step does not end, and what is known of the machine fits no known cause",
    (),
    "stop",
    "hung.txt in the run folder shows where it stands",
    "no report: none of the above",
    after=lambda limits: limits.frozen_s,
)


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall that was seen. why: with the figures. undecided: other classes that could not be, with the sensors they lack."""

    signature: Signature
    why: str
    step: int
    undecided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What a person is told."""
        lacking = ""
        if self.undecided:
            sensors = {one for missing in self.undecided.values() for one in missing}
            lacking = f" (not decided, for want of {', '.join(sorted(sensors))}: {', '.join(self.undecided)})"
        return f"{self.signature.name}: {self.why}: {self.signature.what}{lacking}. {self.signature.remedy}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the journal."""
        one = self.signature
        undecided = {name: list(missing) for name, missing in self.undecided.items()}
        return {
            "kind": one.name, "act": one.act, "step": self.step, "what": self.text, "source": one.source,
            "is_restarted": one.is_restarted, "undecided": undecided,
        }  # fmt: skip
