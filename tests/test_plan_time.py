"""Seconds: of a step beside the yardstick's measurements, of the ring by arithmetic on paper, of a start by its parts."""

from dataclasses import replace

import pytest

from outsize.devices._profile import MachineProfile, stated
from outsize.devices._rates import Rates, rates_of, stated_rates
from outsize.plan.compute import Compute
from outsize.plan.planner import make_plan
from outsize.plan.pools import Holding, resident
from outsize.plan.report import rate_table, time_table
from outsize.plan.ring import ring_pass
from outsize.plan.speed import StepTime, step_time
from outsize.plan.work import Work, work_of
from outsize.recipes.recipe import Recipe

GIB = 2**30
HERE = MachineProfile(
    device="CPU, 4 cores",
    vram_bytes=None,
    vram_free_bytes=None,
    ram_bytes=256 * GIB,
    ram_available_bytes=250 * GIB,
    disk_free_bytes=None,
    num_cores=16,
    os="Linux",
)
H200 = stated(vram_bytes=141 * GIB, ram_bytes=None, gpu="H200", base=HERE)
EAGER, COMPILED, FP8 = (
    Compute(arithmetic, compiles, is_exact=False, why="")
    for arithmetic, compiles in (("bf16", False), ("bf16", True), ("fp8", True))
)


def recipe(side: int = 512, base: str = "flux2.dev", **sections: object) -> Recipe:
    family, _, variant = base.partition(".")
    return Recipe.model_validate(
        {
            "name": "cat",
            "base": {"family": family, "variant": variant, "source": "nowhere/nothing"},
            "data": {"resolution": side, "sets": [{"folder": "none"}]},
            **sections,
        }
    )


def work(side: int = 512, base: str = "flux2.dev", **sections: object) -> Work:
    return work_of(recipe(side, base, **sections), has_gpu=True)


def timed(
    of: Work, compute: Compute, *, streams: bool = False, rates: Rates | None = None
) -> StepTime:
    holding = (
        Holding("stream", 3, ("pinned",) * len(of.base.blocks))
        if streams
        else resident(of.base, "resident")
    )
    return step_time(of, holding, compute, rates or rates_of(H200))


@pytest.mark.parametrize(
    ("compute", "placement", "side", "measured_s"),
    [
        (EAGER, "resident", 512, 0.701),
        (EAGER, "stream", 512, 0.777),
        (EAGER, "resident", 1024, 1.992),
        (EAGER, "stream", 1024, 1.995),
        (COMPILED, "resident", 512, 0.553),
        (COMPILED, "stream", 512, 0.665),
        (COMPILED, "resident", 1024, 1.625),
        (COMPILED, "stream", 1024, 1.627),
        (FP8, "resident", 512, 0.380),
        (FP8, "stream", 512, 0.614),
        (FP8, "resident", 1024, 1.130),
        (FP8, "stream", 1024, 1.147),
    ],
)
def test_a_step_is_predicted_within_ten_percent_of_the_yardstick(
    compute: Compute, placement: str, side: int, measured_s: float
) -> None:
    """A prototype of this step on Flux.2-dev's blocks, rank 16, one H200 (780 TFLOP/s, 55 GB/s), torch 2.11.

    Three constants of the table and two of the model were fitted to the six resident figures; the six streamed ones follow.
    """
    step = timed(work(side), compute, streams=placement == "stream")
    assert step.seconds == pytest.approx(measured_s, rel=0.1)


def test_a_small_model_is_bound_by_launching_kernels() -> None:
    """A reduced Flux.2 (2 + 6 blocks of width 2048, 256 px) took 0.084 s a step eager on the same card; its arithmetic a tenth.

    klein-4b has the same kernels for each linear, so the seconds go with the number of linears.
    """
    of = work(256, "flux2.klein-4b")
    linears = sum(block.num_linears for block in of.base.blocks)
    step = timed(of, EAGER)
    assert step.bound == "launching"
    assert step.seconds == pytest.approx(0.084 * linears / 36, rel=0.2)
    assert timed(of, COMPILED).seconds < step.seconds / 2


def test_what_binds_a_step_is_what_is_busiest() -> None:
    """A slow bus makes it the bus, a slow disk the disk; three slots spare three blocks at either end of the pass."""
    sizes = [block.streamed_bytes for block in work().base.blocks]
    copied = 2 * sum(sizes) - sum(sizes[:3]) - sum(sizes[-3:])
    slow_bus = stated_rates(rates_of(H200), bus_bytes_per_s=10e9)
    step = timed(work(), COMPILED, streams=True, rates=slow_bus)
    assert step.bound == "bus"
    assert step.seconds == pytest.approx(copied / 10e9, rel=0.02)
    assert timed(work(1024), COMPILED, streams=True).bound == "compute"
    slow_disk = stated_rates(rates_of(H200), disk_read_bytes_per_s=2e9)
    on_disk = Holding("stream", 3, ("disk",) * 56)
    step = step_time(work(), on_disk, COMPILED, slow_disk)
    assert step.bound == "disk"
    assert step.seconds == pytest.approx(copied / 2e9, rel=0.02)


def test_twice_the_passes_take_twice_as_long() -> None:
    """An update is small beside a pass."""
    one, two = timed(work(), EAGER), timed(work(train={"accumulate": 2}), EAGER)
    assert two.seconds == pytest.approx(2 * one.seconds, rel=0.01)


def test_keeping_activations_saves_the_second_forward() -> None:
    """About a quarter of a step: one of four passes."""
    of = work(1024)
    kept = replace(resident(of.base, "resident"), keeps_activations=True)
    saved = 1 - step_time(of, kept, COMPILED, rates_of(H200)).seconds / timed(of, COMPILED).seconds
    assert 0.2 < saved < 0.35


def test_block_inputs_cost_the_bus_and_hide_behind_long_blocks() -> None:
    """56 inputs of 57 MB come back over the bus at 1024 px."""
    of = work(1024)
    plain = timed(of, COMPILED, streams=True)
    away = step_time(
        of,
        Holding("stream", 3, ("pinned",) * 56, offloads_inputs=True),
        COMPILED,
        rates_of(H200),
    )
    assert away.bus_s - plain.bus_s == pytest.approx(56 * 4608 * 6144 * 2 / 55e9)
    assert away.seconds < 1.04 * plain.seconds


# --- the ring on paper ---------------------------------------------------------------------------


def test_copies_that_are_shorter_than_arithmetic_cost_nothing() -> None:
    """Four blocks of a second up and two down, copies of half a second."""
    assert ring_pass([1.0] * 4, [2.0] * 4, [0.5] * 4, [0.0] * 4, slots=2).seconds == 12.0


def test_copies_that_are_longer_than_arithmetic_bound_the_pass() -> None:
    """Two slots keep two blocks at either end, so each sweep copies two of four.

    At either end the link waits while the outermost block is run both ways, since both slots are taken: 0.1 + 0.2 s.
    """
    found = ring_pass([0.1] * 4, [0.2] * 4, [5.0] * 4, [0.0] * 4, slots=2)
    assert found.bus_s == 4 * 5.0
    assert found.seconds == pytest.approx(20.0 + 2 * 0.3)


def test_as_many_slots_as_blocks_copy_nothing_in_a_steady_pass() -> None:
    """All of them stay."""
    found = ring_pass([1.0] * 4, [1.0] * 4, [9.0] * 4, [0.0] * 4, slots=4)
    assert (found.seconds, found.bus_s) == (8.0, 0.0)


def test_blocks_that_stay_are_never_copied() -> None:
    """A copy time of None means that the block is on the device; the other's copies hide behind it."""
    found = ring_pass([1.0] * 3, [1.0] * 3, [None, 0.5, None], [0.0] * 3, slots=1)
    assert (found.seconds, found.bus_s) == (6.0, 0.0)


def test_a_slow_disk_feeds_the_bus_no_faster_than_it_reads() -> None:
    """Reading takes three seconds a block, the copy one."""
    found = ring_pass([0.1] * 6, [0.1] * 6, [1.0] * 6, [3.0] * 6, slots=2)
    assert found.feed_s == pytest.approx(found.bus_s * 3)
    assert found.seconds == pytest.approx(found.feed_s, rel=0.05)


# --- starts, choices, tables ---------------------------------------------------------------------


def test_a_start_is_the_sum_of_its_parts_and_says_where_the_bytes_come_from() -> None:
    """With room in RAM the store's files are still there; without they are read again."""
    plan = make_plan(recipe(), H200)
    assert plan.times.boot_s == sum(part.seconds for part in plan.times.boot)
    assert [part.name for part in plan.times.boot] == ["imports", "device", "load", "first step"]
    load = plan.times.boot[2]
    assert "files that the system still holds" in load.why
    small = stated(vram_bytes=8 * GIB, ram_bytes=32 * GIB, gpu="RTX 4060", base=HERE)
    streamed = make_plan(recipe(), small)
    names = [part.name for part in streamed.times.boot]
    assert names == [part.name for part in plan.times.boot]
    assert streamed.times.boot[2].why == "the store, read from disk"
    store = work().base.store_bytes
    assert streamed.times.boot[2].seconds == pytest.approx(store / 2.5e9)
    slow = stated_rates(rates_of(small), first_touch_bytes_per_s=1e9)
    touched = make_plan(recipe(), small, rates=slow)
    pinned = next(p for p in touched.phases if p.name == "train step").total("pinned")
    assert touched.times.boot[2].seconds == pytest.approx(pinned / 1e9)


def test_training_takes_its_steps_a_start_and_compiling() -> None:
    plan = make_plan(recipe(train={"steps": 500}), H200)
    assert plan.compute.compiles
    assert plan.times.compile_s > 0
    expected = plan.times.boot_s + plan.times.compile_s + 499 * plan.step.seconds
    assert plan.training_s == pytest.approx(expected)


def test_blocks_are_compiled_when_the_run_is_long_enough_to_pay_for_it() -> None:
    """And the reason holds the seconds on both sides."""
    short, long = (make_plan(recipe(train={"steps": steps}), H200).compute for steps in (50, 5000))
    assert not short.compiles
    assert long.compiles
    assert "compiling takes 50 s and saves" in short.why
    assert "compiling takes 50 s once and saves" in long.why
    assert make_plan(recipe(train={"steps": 50, "compile": True}), H200).compute.compiles
    assert not make_plan(recipe(train={"steps": 5000, "compile": False}), H200).compute.compiles


def test_preparing_is_as_fast_as_its_slowest_part() -> None:
    """64 GB of source at 1 GB/s; a slower writer wins with 18 GB of store at 100 MB/s."""
    reading = stated_rates(rates_of(H200), disk_read_bytes_per_s=1e9)
    base = make_plan(recipe(), H200, rates=reading).times.prepare[0]
    assert (base.name, base.why) == ("prepare base", "reading the source")
    assert base.seconds == pytest.approx(64.5, rel=0.01)
    writing = stated_rates(rates_of(H200), disk_write_bytes_per_s=1e8)
    assert make_plan(recipe(), H200, rates=writing).times.prepare[0].why == "writing the store"


def test_the_tables_say_seconds_and_where_every_rate_is_from() -> None:
    plan = make_plan(recipe(), H200)
    rows = {row[0]: row for row in time_table(plan).rows}
    assert "bound by arithmetic" in rows["step"][2]
    assert rows["training"][2].startswith("1000 steps")
    origins = {row[0]: row[2] for row in rate_table(plan).rows}
    assert origins["products in fp8"] == origins["bus"] == "table"
    assert origins["disk, reading"] == "guess"


def test_the_seconds_of_an_unknown_card_are_said_to_be_guesses() -> None:
    unknown = stated(vram_bytes=24 * GIB, ram_bytes=None, gpu=None, base=HERE)
    assert any("is a guess" in note for note in make_plan(recipe(), unknown).notes)
    assert not any("is a guess" in note for note in make_plan(recipe(), H200).notes)
