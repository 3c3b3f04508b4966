"""Classes of stall are told apart by the figures of public reports, and nothing that is well is called a stall."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
from stall_traces import (
    BLIND,
    GIB,
    LAPTOP,
    RX_7900,
    RX_9070,
    Trace,
    healthy,
    recorded,
    stalls_of,
    without,
)

from outsize.doctor.residency import Verdict
from outsize.train.stall_judge import Judge, baseline_of
from outsize.train.stalls import FROZEN, OFF_CARD, ON_CARD, SIGNATURES, Limits, Sample

# Of a queue that hangs and a thread that waits for it: no step ends.
HANGS = {"ended": False, "step_s": None}
POISONED = {"step_s": 67.0, "clock_mhz": 3100.0, "power_w": 230.0, "memory_busy": 0.05}
HUNG = HANGS | {"power_w": 45.0, "clock_mhz": 2500.0, "memory_busy": 0.0}
DEADLOCKED = HANGS | {"busy": 0.04, "power_w": 60.0, "clock_mhz": 100.0, "memory_busy": 0.0}

STALLED: dict[str, tuple[str, Trace]] = {
    "TheRock#6824, steps of 67 s": ("poisoned context", healthy(RX_7900).then(12, RX_7900 | POISONED)),
    "TheRock#6824, steps of 118 s": (
        "poisoned context",
        healthy(RX_7900).then(20, RX_7900 | POISONED | {"step_s": 118.0, "power_w": 260.0, "memory_busy": 0.1}),
    ),
    "legacy-rocm-build#5849, 41 MHz": (
        "clock at its floor",
        healthy(RX_9070).then(12, RX_9070 | {"clock_mhz": 41.0, "power_w": 50.0, "step_s": 27.0}),
    ),
    "legacy-rocm-build#6675, display off": (
        "clock at its floor",
        healthy(RX_9070, 40).then(12, RX_9070 | {"clock_mhz": 600.0, "power_w": 60.0, "step_s": 36.0}),
    ),
    "legacy-rocm-build#6437, queue stops": ("hung queue", healthy(RX_7900).then(40, RX_7900 | HUNG)),
    "TheRock#7832, copy never ends": ("deadlock", healthy(RX_7900).then(70, RX_7900 | DEADLOCKED)),
    "founding page, 2.27 GB spilled": (
        "spilled memory",
        healthy(RX_7900).then(30, RX_7900 | {"step_s": 204.0, "host_bytes": int(3.27 * GIB), "power_w": 160.0, "proof": "unknown"}),
    ),
    "ai-toolkit#794, creeping spill": (
        "spilled memory",
        healthy(RX_7900).then(12, RX_7900 | {"step_s": 20.0, "host_bytes": 2 * GIB, "proof": "in doubt"}),
    ),
    "evicted queues, steps of 20 s": (
        "evicted memory",
        healthy(RX_7900 | {"step_s": 2.0}).then(12, RX_7900 | {"step_s": 20.0, "evicted_ms": 700.0}),
    ),
    "no sensor, step never ends": ("frozen", healthy(BLIND).then(70, BLIND | HANGS)),
}  # fmt: skip


@pytest.mark.parametrize("case", STALLED)
def test_a_reported_stall_is_called_by_its_name_once(case: str) -> None:
    """Each figure is of the report that the case names; saying it again at every look would bury the rest."""
    wanted, trace = STALLED[case]
    assert [one.signature.name for one in stalls_of(trace)] == [wanted]


def test_every_class_has_a_reported_case() -> None:
    named = {one.name for one in (*SIGNATURES, FROZEN)}
    assert named == {wanted for wanted, _ in STALLED.values()}


@pytest.mark.parametrize("case", STALLED)
def test_one_look_is_no_stall(case: str) -> None:
    """Sensors glitch: two looks in a row must agree."""
    wanted, trace = STALLED[case]
    judge = Judge(Limits(hits=10_000))
    assert not [one for one in trace.samples if judge.see(one)], wanted


def compile_first() -> Trace:
    """Ten minutes of JIT before the first step ends: card idle, memory flat, one thread at work."""
    begun = Trace([Sample(0.0, 0, cpu_s=0.0, read_bytes=0.0, evicted_ms=0.0)])
    waits = begun.then(60, RX_7900 | DEADLOCKED)
    return waits.then(1, RX_7900 | {"step_s": 610.0}).then(40, RX_7900)


def resolutions() -> Trace:
    """Steps of 2 s, and at times some of 24 s: 512 and 1536 pixels."""
    trace, chance = healthy(RX_7900 | {"step_s": 2.0}), random.Random(0)
    for _ in range(40):
        large = chance.random() < 0.3
        trace = trace.then(6, RX_7900 | {"step_s": 24.0 if large else 2.0, "power_w": 390.0})
    return trace


BETWEEN = {"doing": "between", "step_s": None, "ended": False}
PASSING: dict[str, Trace] = {
    "a run that is well": healthy(RX_7900, 200),
    "slow first steps": compile_first(),
    "several resolutions": resolutions(),
    "a preview of 20 minutes": healthy(RX_7900).then(120, RX_7900 | BETWEEN | {"power_w": 200.0}).then(20, RX_7900),
    "a checkpoint to a slow disk": healthy(RX_7900)
    .then(70, RX_7900 | BETWEEN | {"busy": 0.0, "power_w": 40.0, "clock_mhz": 100.0, "memory_busy": 0.0})
    .then(20, RX_7900),
    "an evaluation": healthy(RX_7900).then(90, RX_7900 | BETWEEN | {"clock_mhz": 2900.0, "power_w": 250.0}).then(9, RX_7900),
    "a laptop that is unplugged": healthy(LAPTOP).then(
        60, LAPTOP | {"on_battery": True, "clock_mhz": 600.0, "power_w": 30.0, "step_s": 7.0}
    ),
    "a laptop that is plugged in again": healthy(LAPTOP | {"on_battery": True, "clock_mhz": 700.0, "power_w": 30.0}).then(
        60, LAPTOP
    ),
    "a power limit that somebody set": healthy(RX_7900).then(60, RX_7900 | {"power_w": 228.0, "clock_mhz": 1900.0, "step_s": 12.0}),
    "another program for a short time": healthy(RX_7900).then(6, RX_7900 | {"step_s": 30.0}).then(20, RX_7900),
    "another program that takes memory for a moment": healthy(RX_7900)
    .then(1, RX_7900 | {"step_s": 10.0}, host_bytes=4 * GIB)
    .then(20, RX_7900),
    "buffers that are pinned for larger pictures": healthy(RX_7900)
    .then(2, RX_7900 | {"step_s": 25.0, "host_bytes": 4 * GIB, "proof": "on the card"})
    .then(60, RX_7900 | {"step_s": 25.0, "host_bytes": 4 * GIB}),
    "another program starts, and queues wait once": healthy(RX_7900).then(1, RX_7900 | {"evicted_ms": 900.0}).then(20, RX_7900),
    "a new shape is compiled for 4 minutes": healthy(RX_7900).then(24, RX_7900 | DEADLOCKED).then(20, RX_7900),
    "a block that comes from a slow network": healthy(RX_7900)
    .then(90, RX_7900 | DEADLOCKED | {"read_bytes": 20e6})
    .then(20, RX_7900),
    "a card that heats up": healthy(RX_7900).then(60, RX_7900 | {"power_w": 340.0, "clock_mhz": 2200.0, "step_s": 10.5}),
    "long steps": healthy(RX_7900 | {"step_s": 95.0}, 400),
    "nothing but steps is known": healthy(BLIND, 200),
}  # fmt: skip


@pytest.mark.parametrize("case", PASSING)
def test_what_is_well_is_no_stall(case: str) -> None:
    """A watcher that ends a run which was well has cost a night itself."""
    assert stalls_of(PASSING[case]) == []


def test_a_recorded_run_that_is_well_is_no_stall() -> None:
    """220 steps of 64 and 160 pixels on two busy cores, 0.6 to 8.8 s each, with previews, checkpoints and evaluations.

    Looked at once a second, so the times of the watcher are a tenth as well.
    """
    trace, limits = recorded("cpu_pictures"), Limits(every_s=1.0, hung_s=12.0, frozen_s=60.0)
    judge = Judge(limits)
    assert not [one for one in trace.samples if judge.see(one)]
    assert judge.baseline is not None
    assert max(one.step_s or 0.0 for one in trace.samples) > 5 * judge.baseline.step_s
    assert sum(one.doing == "between" for one in trace.samples) > 10


@pytest.mark.parametrize(
    ("case", "sensor"),
    [
        ("TheRock#6824, steps of 67 s", "memory_busy"),
        ("legacy-rocm-build#5849, 41 MHz", "power_w"),
        ("founding page, 2.27 GB spilled", "host_bytes"),
        ("evicted queues, steps of 20 s", "evicted_ms"),
    ],
)
def test_a_missing_sensor_leaves_a_class_open_rather_than_absent(case: str, sensor: str) -> None:
    """Silence would read as health: slow steps whose cause cannot be told are said to be that."""
    wanted, trace = STALLED[case]
    judge = Judge(Limits())
    found = [one for sample in without(trace, sensor).samples if (one := judge.see(sample))]
    assert found == []
    assert judge.undecided[wanted] == (sensor,)


@pytest.mark.parametrize(
    ("wanted", "sensor", "figures"),
    [("hung queue", "power_w", HUNG), ("deadlock", "busy", DEADLOCKED)],
    ids=["hung queue", "deadlock"],
)
def test_a_step_that_never_ends_is_stopped_even_where_its_cause_cannot_be_told(
    wanted: str, sensor: str, figures: dict[str, float]
) -> None:
    found = stalls_of(without(healthy(RX_7900).then(70, RX_7900 | figures), sensor))
    assert [one.signature.name for one in found] == ["frozen"]
    assert found[0].undecided[wanted] == (sensor,)
    assert f"not decided, for want of {sensor}: " in found[0].text


def test_a_first_step_that_never_ends_is_found_without_a_baseline() -> None:
    """Triton's num_stages deadlock comes at step 0 (SageAttention#365)."""
    begun = Trace([Sample(0.0, 0, cpu_s=0.0, read_bytes=0.0)])
    found = stalls_of(begun.then(200, RX_7900 | DEADLOCKED))
    assert [one.signature.name for one in found] == ["deadlock"]
    assert "no step has ended for 30 min" in found[0].text


def test_a_first_step_that_was_planned_to_take_hours_is_waited_for() -> None:
    begun = Trace([Sample(0.0, 0)])
    assert stalls_of(begun.then(400, BLIND | HANGS), planned_s=900.0) == []


def test_the_words_hold_the_figures_beside_the_healthy_ones() -> None:
    _, trace = STALLED["legacy-rocm-build#6437, queue stops"]
    text = stalls_of(trace)[0].text
    for part in ("45 W (healthy: 380 W)", "2500 MHz (healthy: 2500 MHz)", "where 9.00 s is usual"):
        assert part in text
    assert "update driver and runtime" in text


def test_memory_that_went_to_the_host_is_proved_before_anybody_is_accused() -> None:
    """Buffers of our own are counted alike: the watcher asks where the base lies, and acts on the answer."""
    grown = RX_7900 | {"step_s": 20.0, "host_bytes": 3 * GIB}
    trace, judge = healthy(RX_7900).then(6, grown), Judge(Limits())
    assert not [one for one in trace.samples if judge.see(one)]
    assert judge.wants_proof
    for proof, wanted in (("off the card", ["spilled memory"]), ("on the card", [])):
        after = stalls_of(trace.then(6, grown | {"proof": proof}))
        assert [one.signature.name for one in after] == wanted


def test_what_was_proved_to_be_off_the_card_needs_no_counter() -> None:
    """WSL counts nothing by process (WSL#11050); the clock of the proof tells."""
    away = BLIND | {"step_s": 40.0, "proof": "off the card"}
    assert [one.signature.name for one in stalls_of(healthy(BLIND).then(12, away))] == [
        "spilled memory"
    ]


def test_the_verdicts_that_decide_are_those_that_a_proof_gives() -> None:
    assert {ON_CARD, OFF_CARD} < {*get_args(Verdict)}


def test_a_stall_that_was_gone_is_told_again() -> None:
    floor = RX_9070 | {"clock_mhz": 41.0, "power_w": 50.0, "step_s": 27.0}
    trace = healthy(RX_9070).then(12, floor).then(6, RX_9070).then(12, floor)
    assert [one.signature.name for one in stalls_of(trace)] == ["clock at its floor"] * 2
    silent = Trace(
        [replace(one, busy=one.busy if n % 5 else None) for n, one in enumerate(trace.samples)]
    )
    assert len(stalls_of(silent)) == 2  # a sensor that misses a look does not end a stall


def test_ratios_decide_and_not_watts() -> None:
    """A card with a sixth of the power and another clock shows the same classes."""
    scale = {"power_w": 1 / 6, "clock_mhz": 0.6}
    for wanted, trace in STALLED.values():
        smaller = [
            replace(
                one, **{n: v * k for n, k in scale.items() if (v := getattr(one, n)) is not None}
            )
            for one in trace.samples
        ]
        assert [one.signature.name for one in stalls_of(Trace(smaller))] == [wanted]


def test_a_baseline_is_the_median_of_the_first_minute() -> None:
    samples = [Sample(10.0 * n, n, step_s=9.0 + (n == 3) * 50, power_w=380.0 - n) for n in range(7)]
    found = baseline_of(samples)
    assert found is not None
    assert (found.step_s, found.slowest_s, found.power_w, found.clock_mhz) == (
        9.0,
        59.0,
        377.0,
        None,
    )
    assert baseline_of(samples[:5]) is None


def test_a_run_that_was_slow_from_its_first_step_is_doubted() -> None:
    """A baseline that was learned on a poisoned card would call it well; the plan knows better."""
    judge = Judge(Limits(), planned_step_s=9.0)
    for one in healthy(RX_7900 | POISONED, 80).samples:
        judge.see(one)
    assert judge.is_doubtful
