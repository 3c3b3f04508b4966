"""Where the planner puts blocks and their inputs, by what a machine has."""

from dataclasses import replace

import pytest

from outsize.devices._profile import MachineProfile, stated
from outsize.placement._staging import staging_bytes
from outsize.plan.plan import Plan
from outsize.plan.planner import make_plan
from outsize.plan.pools import Phase
from outsize.recipes.recipe import Recipe

GIB = 2**30
HERE = MachineProfile(
    device="CPU, 4 cores",
    vram_bytes=None,
    vram_free_bytes=None,
    ram_bytes=64 * GIB,
    ram_available_bytes=60 * GIB,
    disk_free_bytes=None,
    num_cores=4,
    os="Linux",
)


def plan_of(
    vram_gib: float,
    ram_gib: float,
    *,
    side: int = 512,
    system: str = "Linux",
    arithmetic: str = "bf16",
    **placement: object,
) -> Plan:
    """Flux.2-dev, 16.45 GiB of packed blocks."""
    recipe = Recipe.model_validate(
        {
            "name": "cat",
            "base": {"family": "flux2", "variant": "dev", "source": "nowhere/nothing"},
            "data": {"resolution": side, "sets": [{"folder": "none"}]},
            "train": {"arithmetic": arithmetic},
            "placement": placement,
        }
    )
    where = stated(
        vram_bytes=int(vram_gib * GIB), ram_bytes=int(ram_gib * GIB), gpu="RTX 4060", base=HERE
    )
    return make_plan(recipe, replace(where, os=system))


def counts(plan: Plan) -> tuple[int, int, int, int]:
    """Blocks on the device, pinned, in ordinary memory and on disk."""
    holding = plan.chosen.holding
    device, pinned, pageable, disk = (
        len(holding.blocks_in(tier)) for tier in ("device", "pinned", "pageable", "disk")
    )
    assert device + pinned + pageable + disk == 56
    return device, pinned, pageable, disk


def step_of(plan: Plan) -> Phase:
    return next(phase for phase in plan.phases if phase.name == "train step")


def owned(plan: Plan) -> dict[str, int]:
    return {item.owner: item.num_bytes for item in step_of(plan).items}


def test_plenty_of_ram_pins_every_streamed_block_and_needs_no_staging() -> None:
    """The fastest tier after the device."""
    plan = plan_of(8, 32)
    assert counts(plan) == (0, 56, 0, 0)
    assert "staging" not in owned(plan)


def test_what_does_not_fit_into_ram_stays_on_disk() -> None:
    """An 8 GiB card and 16 GiB of RAM train a 32B base, and are told the seconds that it costs."""
    plan = plan_of(8, 16)
    assert plan.fits
    device, pinned, pageable, disk = counts(plan)
    assert device == pageable == 0
    assert pinned > 20
    assert disk > 10
    assert plan.chosen.host_bytes <= plan.budget.host_bytes
    sizes = [GIB // 2] * 56
    assert owned(plan)["staging"] == staging_bytes(sizes, plan.chosen.holding.tiers)
    assert any("are read from disk" in note for note in plan.notes)
    assert plan.step.disk_s > 0
    assert plan.runner_up is not None
    assert plan.runner_up.holding.blocks_in("pinned") == list(range(56))
    assert "of RAM would be needed" in plan.runner_up.why


def test_windows_pins_half_of_the_ram_and_uses_the_rest_as_ordinary_memory() -> None:
    """It refuses more."""
    plan = plan_of(8, 24, system="Windows")
    _, pinned, pageable, _ = counts(plan)
    assert pinned > 0
    assert pageable > 0
    assert max(phase.total("pinned") for phase in plan.phases) <= 12 * GIB
    assert plan.fits
    assert any("Windows often refuses" in note for note in plan.notes)
    assert not any("Windows" in note for note in plan_of(8, 24).notes)


def test_the_recipe_may_limit_every_tier() -> None:
    """A limit of nothing leaves nothing there."""
    assert counts(plan_of(8, 64, kind="stream", pinned_bytes=0, pageable_bytes=0)) == (0, 0, 0, 56)
    assert counts(plan_of(8, 64, kind="stream", pinned_bytes=0)) == (0, 0, 56, 0)
    plan = plan_of(
        24, 64, kind="stream", resident_bytes="4GiB", pinned_bytes="4GiB", pageable_bytes="4GiB"
    )
    items = owned(plan)
    for owner in ("blocks kept", "streamed blocks", "blocks in ordinary memory"):
        assert 3 * GIB < items[owner] <= 4 * GIB
    assert items["blocks on disk"] > 4 * GIB


def test_all_blocks_are_somewhere_whatever_the_machine() -> None:
    """Their bytes in all tiers together are the packed base."""
    for vram, ram in ((8, 12), (8, 24), (16, 16), (24, 64)):
        items = owned(plan_of(vram, ram))
        tiers = ("blocks kept", "streamed blocks", "blocks in ordinary memory", "blocks on disk")
        assert sum(items.get(owner, 0) for owner in tiers) == pytest.approx(16.45 * GIB, rel=1e-3)


def test_block_inputs_go_to_host_memory_only_where_the_card_is_too_small_for_them() -> None:
    """4608 tokens of width 6144 in bf16, of all blocks but the last; four of them stay on the device."""
    large, small = plan_of(12, 64, side=1024), plan_of(8, 64, side=1024)
    assert large.fits
    assert not large.chosen.holding.offloads_inputs
    assert small.fits
    assert small.chosen.holding.offloads_inputs
    each = 4608 * 6144 * 2
    items = owned(small)
    assert items["waiting block inputs"] == 55 * each
    assert items["slots of block inputs"] + items["block inputs"] == 4 * each
    assert step_of(small).total("pinned") == items["streamed blocks"] + 55 * each
    assert owned(large)["block inputs"] == 56 * each


def test_an_open_arithmetic_gives_way_to_the_compute_type_where_it_needs_too_much() -> None:
    """Rows on the way to 8 bits take memory that products in bf16 do not."""
    small, large = (plan_of(size, 64, side=1024, arithmetic="auto") for size in (7.5, 16))
    assert small.fits
    assert small.compute.arithmetic == "bf16"
    assert "training in fp8 does not fit" in small.compute.why
    assert large.compute.arithmetic == "fp8"
    assert not plan_of(7.5, 64, side=1024, arithmetic="fp8").fits


def test_the_recipe_decides_about_block_inputs() -> None:
    """True moves them where there is room as well; false keeps them where there is none."""
    assert plan_of(48, 64, side=1024, offload_inputs=True).chosen.holding.offloads_inputs
    refused = plan_of(8, 64, side=1024, offload_inputs=False)
    assert not refused.fits
    assert "`placement: {offload_inputs: null}`" in (refused.refusal or "")


def test_a_resident_base_that_was_asked_for_gives_its_inputs_away_to_fit() -> None:
    """Nothing else may be changed then."""
    assert plan_of(24, 64, side=1024, kind="resident").chosen.holding.offloads_inputs
    assert not plan_of(32, 64, side=1024, kind="resident").chosen.holding.offloads_inputs


def test_a_text_encoder_streams_from_disk_where_the_ram_is_small() -> None:
    """Mistral's 30 layers are 8.7 GiB packed."""
    held = plan_of(8, 8).holding_of("text_encoder")
    assert held is not None
    assert len(held.blocks_in("disk")) > 5
    assert len(held.blocks_in("pinned")) > 0


def test_a_processor_without_enough_ram_reads_blocks_from_disk() -> None:
    """There, the device's memory is the RAM."""
    recipe = Recipe.model_validate(
        {
            "name": "cat",
            "base": {"family": "flux2", "variant": "dev", "source": "nowhere/nothing"},
            "data": {"resolution": 256, "sets": [{"folder": "none"}]},
        }
    )
    where = stated(vram_bytes=0, ram_bytes=20 * GIB, gpu=None, base=HERE)
    plan = make_plan(recipe, where)
    assert plan.fits, plan.refusal
    device, pinned, pageable, disk = counts(plan)
    assert device > 0
    assert pinned == pageable == 0
    assert disk > 0
    assert plan.chosen.device_bytes == 0


def test_a_placement_that_the_planner_does_not_know_is_said_to_be_counted_as_a_ring() -> None:
    """A plug-in of somebody else's has costs of its own."""
    from outsize.devices._rates import rates_of
    from outsize.plan.compute import Compute
    from outsize.plan.draft import budget_of, decide
    from outsize.plan.notes import notes
    from outsize.plan.work import work_of

    known = plan_of(12, 64)
    recipe = Recipe.model_validate(
        {
            "name": "cat",
            "base": {"family": "flux2", "variant": "dev", "source": "nowhere/nothing"},
            "data": {"resolution": 512, "sets": [{"folder": "none"}]},
        }
    )
    work = work_of(recipe, has_gpu=True)
    asked = recipe.placement.model_copy(update={"kind": "fetch"})
    compute = Compute("bf16", compiles=False, is_exact=True, why="")
    decision = decide(asked, work, budget_of(known.machine), compute)
    told = list(notes(work, decision.outcome, known.machine, rates_of(known.machine)))
    assert any("does not know the placement 'fetch'" in note for note in told)
    assert not any("does not know the placement" in note for note in known.notes)
