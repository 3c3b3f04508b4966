"""Plans: sizes from tables, bytes by phase, the choice of a placement, refusals, and the `plan` command.

Independent truths: closed forms on small tables, published shapes of the real families, and peaks
measured on a GPU with a prototype of the same step on Flux.2-dev's own blocks.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import outsize
from outsize.app.tasks.protocol import task_of
from outsize.base.errors import DoesNotFit, RecipeError
from outsize.base.table import ShapeTable, TensorSpec
from outsize.cli.main import main
from outsize.devices._profile import (
    Gpu,
    MachineProfile,
    free_disk,
    parse_amd_smi,
    parse_nvidia_smi,
    parse_rocm_smi,
    read_machine,
    stated,
    visible_gpu,
    within_cgroup,
)
from outsize.formats.protocol import make_format
from outsize.plan.compare import MeasuredRun, compare_run
from outsize.plan.compute import Compute
from outsize.plan.estimate import training_step
from outsize.plan.plan import Plan
from outsize.plan.planner import make_plan
from outsize.plan.pools import Holding, Phase, resident
from outsize.plan.report import comparison_table, headline, sentences, tables
from outsize.plan.sizes import adapter_elements, model_sizes, sizes_of, stream_width, token_traffic
from outsize.plan.work import work_of
from outsize.recipes.adapter import AdapterChoice
from outsize.recipes.load import load_recipe
from outsize.recipes.recipe import FormatChoice, Recipe, rest_format
from outsize.train.optimizers.protocol import make_optimizer

GIB = 2**30
EAGER, COMPILED, FP8 = (
    Compute(arithmetic, compiles, is_exact=False, why="")
    for arithmetic, compiles in (("bf16", False), ("bf16", True), ("fp8", True))
)
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))
HERE = MachineProfile(
    device="CPU, 4 cores",
    vram_bytes=None,
    vram_free_bytes=None,
    ram_bytes=32 * GIB,
    ram_available_bytes=28 * GIB,
    disk_free_bytes=500 * GIB,
    num_cores=4,
    os="Linux",
)


def machine(vram_gib: float, ram_gib: float = 32) -> MachineProfile:
    return stated(
        vram_bytes=int(vram_gib * GIB), ram_bytes=int(ram_gib * GIB), gpu="RTX X", base=HERE
    )


def recipe(base: str = "flux2.dev", **sections: object) -> Recipe:
    family, _, variant = base.partition(".")
    return Recipe.model_validate(
        {
            "name": "cat",
            "base": {"family": family, "variant": variant, "source": "nowhere/nothing"},
            "data": {"resolution": 1024, "sets": [{"folder": "none"}]},
            **sections,
        }
    )


def at(resolution: int) -> dict[str, object]:
    return {"data": {"resolution": resolution, "sets": [{"folder": "none"}]}}


def tensor_bytes(phase: Phase) -> int:
    """What an allocator would report: everything but the driver's context."""
    return sum(
        item.num_bytes for item in phase.items if item.pool == "device" and item.owner != "context"
    )


# --- sizes ---------------------------------------------------------------------------------------


def small_table() -> ShapeTable:
    def linear(name: str, n: int, k: int, block: int | None) -> TensorSpec:
        return TensorSpec(name, (n, k), "attention", block=block, is_linear=True)

    return ShapeTable(
        (
            linear("in.weight", 128, 64, None),
            *(
                spec
                for block in range(2)
                for spec in (
                    linear(f"{block}.qkv.weight", 384, 128, block),
                    linear(f"{block}.out.weight", 128, 256, block),
                    TensorSpec(f"{block}.norm.weight", (128,), "norm", block=block),
                )
            ),
            TensorSpec("mean", (16,), "buffer"),
        )
    )


def test_sizes_of_a_small_table_follow_from_its_shapes() -> None:
    """NF4 in groups of 64 with fp32 scales is half a byte and a sixteenth of one per weight."""
    sizes = sizes_of(small_table(), make_format("nf4"), make_format("plain"))
    packed = (384 * 128 + 128 * 256) * 9 // 16  # both a multiple of 256 bytes, so no padding
    assert [block.streamed_bytes for block in sizes.blocks] == [packed, packed]
    assert sizes.packed_bytes == 2 * packed
    assert sizes.small_elements == 128 * 64 + 2 * 128 + 16
    assert sizes.largest_matrix == 384 * 128
    assert sizes.source_bytes == 2 * (128 * 64 + 2 * (384 * 128 + 128 * 256 + 128) + 16)
    # each block's norm takes 256 bytes; outside are bf16 numbers and an fp32 buffer, padded
    assert sizes.store_bytes == 2 * (packed + 256) + 128 * 64 * 2 + 256
    assert [block.width for block in sizes.blocks] == [128, 128]
    assert sizes.blocks[0].traffic == 384 + 128 + 128 + 256


def test_an_adapter_has_rank_times_inputs_and_outputs() -> None:
    """One matrix on each side of every matched linear."""
    choice = AdapterChoice(rank=4, roles=("attention",))
    pairs = tuple((block, 4 * size) for block in range(2) for size in (384, 128, 128, 256))
    assert adapter_elements(small_table(), choice) == pairs
    lengths = tuple((block, size) for block in range(2) for size in (384, 128))
    dora = choice.model_copy(update={"kind": "dora"})
    assert adapter_elements(small_table(), dora) == pairs + lengths
    with pytest.raises(RecipeError, match="so nothing would be trained; there are attention"):
        adapter_elements(small_table(), AdapterChoice(rank=4, roles=("mlp",)))


def test_a_block_of_two_streams_lets_a_token_pass_one() -> None:
    """Text and image each have weights of their own in a double block."""
    specs = [
        TensorSpec(f"{stream}.{name}", shape, "attention", block=0, is_linear=True)
        for stream in ("image", "text")
        for name, shape in (("qkv", (96, 32)), ("out", (32, 32)))
    ]
    assert token_traffic(specs) == 96 + 32 + 32 + 32
    assert token_traffic(specs[:2]) == 96 + 32 + 32 + 32


def test_the_stream_is_as_wide_as_most_matrices_begin_or_end() -> None:
    """Grouped queries make the smallest dimension wrong: Mistral's o_proj is (5120, 4096)."""
    shapes = [(4096, 5120), (1024, 5120), (1024, 5120), (5120, 4096)]
    shapes += [(32768, 5120), (32768, 5120), (5120, 32768)]
    specs = [
        TensorSpec(f"{i}.weight", shape, "mlp", 0, is_linear=True) for i, shape in enumerate(shapes)
    ]
    assert stream_width(specs) == 5120


@pytest.mark.parametrize(
    ("base", "packed_gib", "widths"),
    [
        ("flux2.dev", 16.45, {6144}),
        ("flux2.klein-9b", 4.57, {4096}),
        ("flux2.klein-4b", 1.93, {3072}),
        ("flux1.dev", 6.20, {3072}),
    ],
)
def test_packed_blocks_of_real_bases_have_the_known_sizes(
    base: str, packed_gib: float, widths: set[int]
) -> None:
    """Parameters of upstream's blocks, counted on meta, times 4.5 bits."""
    family, _, variant = base.partition(".")
    sizes = model_sizes(family, variant, FormatChoice(name="nf4"), rest_format("base"))
    assert sizes.packed_bytes / GIB == pytest.approx(packed_gib, abs=0.01)
    assert {block.width for block in sizes.blocks} == widths


def test_the_optimizer_state_is_two_fp32_moments_or_two_bytes_and_scales() -> None:
    """Bitsandbytes scales 256 numbers together and keeps small tensors in fp32."""
    assert make_optimizer("adamw").state_bytes(1 << 20) == 8 << 20
    eight_bit = make_optimizer("adamw8bit")
    assert eight_bit.state_bytes(1 << 20) == 2 * (1 << 20) + 2 * 4 * (1 << 20) // 256
    assert eight_bit.state_bytes(4095) == 8 * 4095


# --- estimates beside measurements ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "resolution", "placement", "measured_gib"),
    [
        (EAGER, 512, "stream", 5.6),
        (EAGER, 1024, "stream", 8.5),
        (EAGER, 512, "resident", 20.5),
        (EAGER, 1024, "resident", 23.4),
        (COMPILED, 512, "stream", 6.2),
        (COMPILED, 1024, "stream", 9.1),
        (COMPILED, 512, "resident", 21.1),
        (COMPILED, 1024, "resident", 24.1),
        (FP8, 512, "stream", 5.4),
        (FP8, 1024, "stream", 8.6),
        (FP8, 512, "resident", 20.4),
        (FP8, 1024, "resident", 23.6),
    ],
)
def test_the_training_step_is_estimated_within_seven_percent_of_measured_peaks(
    compute: Compute, resolution: int, placement: str, measured_gib: float
) -> None:
    """Peaks of a prototype of this step on one H200, rank 16 on all linears of Flux.2-dev.

    It kept its adapter in bf16 without masters and bf16 moments: 6 bytes a number where ours are 14.
    """
    work = work_of(recipe(**at(resolution)), has_gpu=True)
    holding = (
        Holding("stream", 3, ("pinned",) * 56)
        if placement == "stream"
        else resident(work.base, "resident")
    )
    ours = tensor_bytes(training_step(work, holding, compute))
    as_prototype = ours - (14 - 6) * work.num_adapter_elements
    assert as_prototype / GIB == pytest.approx(measured_gib, rel=0.07)


def test_block_inputs_are_tokens_times_width_for_every_block() -> None:
    """4096 image and 512 text tokens of width 6144 in bf16, 56 times."""
    work = work_of(recipe(), has_gpu=True)
    step = training_step(work, resident(work.base, "resident"))
    by_owner = {item.owner: item.num_bytes for item in step.items}
    assert by_owner["block inputs"] == 56 * 4608 * 6144 * 2


def test_without_a_gpu_everything_lies_in_ram_in_fp32() -> None:
    """The same phases, counted against the memory that computes."""
    on_gpu, on_cpu = (work_of(recipe("flux2.tiny", **at(64)), has_gpu=x) for x in (True, False))
    gpu = training_step(on_gpu, resident(on_gpu.base, "resident"))
    cpu = training_step(on_cpu, resident(on_cpu.base, "resident"))
    assert cpu.device_bytes == 0
    assert cpu.total("pinned") == 0
    inputs = {
        phase: next(i.num_bytes for i in phase.items if i.owner == "block inputs")
        for phase in (gpu, cpu)
    }
    assert inputs[cpu] == 2 * inputs[gpu]


def test_a_batch_and_accumulation_cost_what_they_should() -> None:
    """Twice the pictures are twice the tokens; accumulation keeps fp32 gradients and no more."""
    one = work_of(recipe(), has_gpu=True)
    two = work_of(recipe(train={"batch": 2}), has_gpu=True)
    assert two.tokens == 2 * one.tokens
    many = work_of(recipe(train={"accumulate": 4}), has_gpu=True)
    holding = Holding("stream", 3, ("pinned",) * 56)
    extra = training_step(many, holding).device_bytes - training_step(one, holding).device_bytes
    assert extra == 4 * one.num_adapter_elements


# --- choosing ------------------------------------------------------------------------------------


def test_what_fits_stays_on_the_device_and_streaming_is_the_runner_up() -> None:
    """The fastest placement that fits, and what could be saved."""
    plan = make_plan(recipe(), machine(48))
    assert plan.fits
    assert plan.chosen.holding.kind == "resident"
    assert plan.chosen.holding.num_streamed == 0
    assert plan.runner_up is not None
    assert plan.runner_up.holding.num_streamed == 56
    assert plan.runner_up.device_bytes < plan.chosen.device_bytes


def test_what_does_not_fit_streams_with_as_many_blocks_kept_as_there_is_room_for() -> None:
    """More memory keeps more blocks, and never more than there is."""
    kept = []
    for vram_gib in (12, 16, 24):
        plan = make_plan(recipe(), machine(vram_gib))
        assert plan.fits
        assert plan.chosen.holding.kind == "stream"
        assert plan.chosen.device_bytes <= vram_gib * GIB
        kept.append(len(plan.chosen.holding.resident))
    assert kept == sorted(set(kept))
    assert kept[-1] < 56


def test_the_recipe_may_insist_on_a_placement() -> None:
    """Then nothing else is chosen, and kept bytes are obeyed."""
    asked = {"kind": "stream", "slots": 2, "resident_bytes": "2 GiB"}
    plan = make_plan(recipe(placement=asked), machine(48))
    holding = plan.chosen.holding
    assert (holding.kind, holding.slots) == ("stream", 2)
    kept = next(i for i in plan.peak.items if i.owner == "blocks kept")
    assert 1 * GIB < kept.num_bytes <= 2 * GIB
    ring = next(i for i in plan.peak.items if i.owner == "ring")
    work = work_of(recipe(), has_gpu=True)
    assert ring.num_bytes == 2 * max(block.streamed_bytes for block in work.base.blocks)


def test_every_block_is_somewhere() -> None:
    """Kept and streamed blocks together are the packed base."""
    for vram_gib in (12, 24, 48):
        step = next(p for p in make_plan(recipe(), machine(vram_gib)).phases if "step" in p.name)
        owned = {i.owner: i.num_bytes for i in step.items}
        total = owned.get("blocks kept", 0) + owned.get("streamed blocks", 0)
        assert total == work_of(recipe(), has_gpu=True).base.packed_bytes


def test_the_peak_is_the_largest_phase_and_not_the_sum() -> None:
    """Memory is staged: one big thing at a time."""
    plan = make_plan(recipe("flux2.klein-4b"), machine(24))
    assert plan.chosen.device_bytes == max(phase.device_bytes for phase in plan.phases)
    names = [phase.name for phase in plan.phases]
    assert names == [
        "prepare text_encoder",
        "prepare vae",
        "prepare base",
        "cache text_encoder",
        "cache latents",
        "train step",
        "train update",
        "sample",
        "decode pictures",
    ]
    assert plan.holding_of("base") == plan.chosen.holding
    assert plan.holding_of("text_encoder") is not None
    assert plan.holding_of("vae") is None


def test_a_text_encoder_too_large_for_the_card_streams() -> None:
    """Mistral's 30 layers are 8.7 GiB packed."""
    small, large = (make_plan(recipe(), machine(gib)).holding_of("text_encoder") for gib in (8, 24))
    assert small is not None
    assert large is not None
    assert small.num_streamed == 30
    assert large.num_streamed == 0


# --- refusing ------------------------------------------------------------------------------------


def test_a_refusal_says_what_it_takes_what_is_there_of_what_and_the_smallest_change() -> None:
    """The model message of the design."""
    asked = recipe(
        placement={"kind": "resident", "offload_inputs": False}, train={"compile": False}
    )
    plan = make_plan(asked, machine(24))
    assert not plan.fits
    with pytest.raises(DoesNotFit) as caught:
        plan.require_fit()
    step = next(phase for phase in plan.phases if phase.name == "train step")
    need = f"train step needs {step.device_bytes / GIB:.1f} GiB on RTX X, 24.0 GiB are there. Base "
    assert str(caught.value).startswith(need)
    for part in ("activations 4.4 (1024 px, batch 1)", "adapter and optimizer 1.3", "program and"):
        assert part in str(caught.value)
    assert "Smallest change that fits: `placement: {kind: auto}` (2" in str(caught.value)


def test_changes_that_alter_no_number_are_named_first() -> None:
    """Two slots instead of three, before anything that touches what is learned."""
    work = work_of(recipe(), has_gpu=True)
    holding = Holding("stream", 3, ("pinned",) * 56, offloads_inputs=True)
    just_below = (training_step(work, holding).device_bytes - 100 * 2**20) / GIB
    refusal = make_plan(recipe(placement={"slots": 3}), machine(just_below)).refusal
    assert refusal is not None
    assert "Smallest change that fits: `placement: {slots: 2}`" in refusal
    left_open = make_plan(recipe(), machine(just_below))
    assert left_open.fits
    assert left_open.chosen.holding.slots == 2


def test_a_batch_is_split_into_passes_of_the_same_gradient() -> None:
    """Accumulation averages, so the update stays what it was."""
    refusal = make_plan(recipe(train={"batch": 4, "accumulate": 2}), machine(9)).refusal
    assert refusal is not None
    assert "`train: {batch: 1, accumulate: 8}`" in refusal


def test_a_named_change_really_fits() -> None:
    """Made to the recipe, it gives a plan that fits."""
    for vram, named in ((6.0, "resolution"), (7.0, "adamw8bit")):
        refusal = make_plan(recipe(), machine(vram)).refusal
        assert refusal is not None
        remedy = refusal.split("Smallest")[1]
        assert named in remedy
        changes: dict[str, object] = {}
        if "resolution" in remedy:
            changes |= at(int(remedy.split("resolution: ")[1].split("}")[0]))
        if "adamw8bit" in remedy:
            changes["train"] = {"optimizer": "adamw8bit"}
        assert make_plan(recipe(**changes), machine(vram)).fits


def test_a_limit_that_a_recipe_sets_is_the_first_to_go() -> None:
    """What the planner may choose costs nothing to give back to it."""
    for asked in ({"offload_inputs": False}, {"kind": "resident"}):
        refusal = make_plan(recipe(placement=asked), machine(8)).refusal
        assert refusal is not None
        key, left_open = next(iter(asked)), {"offload_inputs": "null", "kind": "auto"}
        assert f"`placement: {{{key}: {left_open[key]}}}`" in refusal


def test_a_machine_too_small_for_any_change_is_told_so() -> None:
    """With what it would take, both on the device and in RAM."""
    refusal = make_plan(recipe(), machine(3, 4)).refusal
    assert refusal is not None
    assert "of RAM, 2.0 GiB are free for it" in refusal  # 2 GiB are the system's
    assert "No change of this recipe fits: even with" in refusal
    assert "take a smaller base" in refusal


def test_an_adapter_that_matches_nothing_is_refused_by_name() -> None:
    """None matched is an error before anything is prepared."""
    with pytest.raises(RecipeError, match=r"match no linear .* there are attention, mlp"):
        make_plan(recipe(adapter={"roles": ["conv"]}), machine(24))


def test_pictures_smaller_than_a_token_are_refused() -> None:
    """Flux.2 takes 16 pixels a token; a comparison may be smaller than the training pictures."""
    with pytest.raises(RecipeError, match="smaller than one token"):
        make_plan(recipe(compare={"width": 8, "height": 512}), machine(48))


# --- the plan as a value -------------------------------------------------------------------------


def test_the_json_of_a_plan_keeps_its_keys() -> None:
    """Run folders hold it; a later version reads it back."""
    plan = make_plan(recipe(), machine(24), num_samples=(12,))
    value = json.loads(json.dumps(plan.to_json()))
    assert list(value) == [
        "version",
        "recipe",
        "fits",
        "refusal",
        "machine",
        "budget",
        "compute",
        "placement",
        "seconds",
        "rates",
        "runner_up",
        "peak",
        "phases",
        "disk",
        "notes",
    ]
    assert list(value["phases"][0]) == [
        "name",
        "device_bytes",
        "pinned_bytes",
        "private_bytes",
        "cached_bytes",
        "holding",
        "items",
    ]
    assert list(value["phases"][0]["items"][0]) == ["owner", "pool", "num_bytes", "why"]
    assert set(value["placement"]) >= {"kind", "slots", "num_blocks", "kept_blocks", "why"}
    assert value["recipe"]["digest"] == recipe().digest()
    assert value["machine"]["is_stated"] is True


def keeps_activations(base: str, where: MachineProfile, *, recompute: bool | None) -> bool:
    plan = make_plan(recipe(base, placement={"recompute": recompute}), where)
    assert plan.chosen.holding.kind == "resident"
    owners = {item.owner for phase in plan.phases for item in phase.items}
    assert ("activations" in owners) == plan.chosen.holding.keeps_activations
    return plan.chosen.holding.keeps_activations


def test_activations_are_kept_on_a_cpu_with_room_and_on_a_card_when_asked() -> None:
    """Twice the memory of the whole run must be free, since a machine without a card has other work as well."""
    plenty, little = (
        stated(vram_bytes=0, ram_bytes=ram_gib * GIB, gpu=None, base=HERE) for ram_gib in (512, 48)
    )
    assert keeps_activations("flux2.klein-4b", plenty, recompute=None)
    assert not keeps_activations("flux2.klein-4b", little, recompute=None)
    assert not keeps_activations("flux2.klein-4b", plenty, recompute=True)
    assert not keeps_activations("flux2.klein-4b", machine(80), recompute=None)
    assert keeps_activations("flux2.klein-4b", machine(80), recompute=False)


def test_kept_activations_that_do_not_fit_are_refused_with_the_remedy() -> None:
    plan = make_plan(recipe("flux2.klein-4b", placement={"recompute": False}), machine(12))
    assert plan.refusal is not None
    assert "activations" in plan.refusal
    assert "`placement: {recompute: null}`" in plan.refusal


def test_measured_figures_stand_beside_the_estimates() -> None:
    """More than a tenth off is a defect of the estimate; the driver's context is not measured."""
    plan = make_plan(recipe(), machine(24))
    planned = max(tensor_bytes(phase) for phase in plan.phases if phase.name.startswith("train"))
    peaks = {
        "train": {"device": planned, "host": 1},
        "cache latents": {"device": 2 * GIB * 10},
        "load base": {"device": 5},
    }
    step_s, boot_s = plan.step.seconds * 1.05, plan.times.boot_s * 2
    rows = compare_run(plan, MeasuredRun(peaks, step_s, boot_s, {"base": 1e6, "nothing": 1}))
    assert [(row.stage, row.what, row.unit) for row in rows] == [
        ("train", "device", "B"),
        ("train", "host", "B"),
        ("cache latents", "device", "B"),
        ("prepare base", "time", "s"),
        ("start", "time", "s"),
        ("step", "time", "s"),
    ]
    assert [row.is_within_tolerance for row in rows] == [True, False, False, False, False, True]
    assert rows[0].off == 0
    assert rows[-2].off == pytest.approx(1)
    assert json.loads(json.dumps(rows[-1].to_json()))["off"] == pytest.approx(0.05)
    told = comparison_table(rows).rows
    assert told[0][-2:] == ("+0%", "")
    assert [row[-1] for row in told[1:5]] == ["beyond tolerance"] * 4


def test_a_run_that_tells_no_seconds_is_compared_by_bytes_alone() -> None:
    """A resumed run starts differently, and one step has no median."""
    plan = make_plan(recipe(), machine(24))
    assert compare_run(plan, MeasuredRun({"sample": {"device": 1}}))[0].stage == "sample"
    assert len(compare_run(plan, MeasuredRun({"sample": {"device": 1}}))) == 1


def test_every_owner_says_why() -> None:
    """A figure without a reason cannot be argued with."""
    plan = make_plan(recipe(), machine(24))
    assert all(item.why for phase in plan.phases for item in phase.items)
    assert all(item.num_bytes >= 0 for phase in plan.phases for item in phase.items)


def test_the_report_tells_choice_runner_up_and_notes() -> None:
    """The sentences below the tables."""
    plan = make_plan(recipe(), machine(24))
    said = list(sentences(plan))
    assert said[0].startswith("compute: bf16, compiled, not exact: ")
    assert said[1].startswith("placement: stream, ")
    assert said[2].startswith("runner-up: resident, all 56 (peak ")
    assert "does not fit: 1." in said[2]
    assert any("cross the bus per step" in one for one in said)
    assert headline(plan).startswith("cat: flux2.dev on RTX X; 24.0 GiB, 24.0 GiB usable; RAM 32.0")
    assert tables(plan)[0].title == "by phase (one at a time)"


# --- the machine ---------------------------------------------------------------------------------

NVIDIA = "0, GPU-bc7134ed-f97c-a652-13bd-aab91e232bd2, NVIDIA H200, 143771, 143156\n"
NVIDIA_TWO = (
    "0, GPU-aaa, NVIDIA GeForce RTX 4090, 24564, 23971\n"
    "1, GPU-bbb, NVIDIA GeForce RTX 3060, 12288, 12027\n"
)
NVIDIA_UNIFIED = "0, GPU-ccc, NVIDIA GB10, [N/A], [N/A]\n"
ROCM = """\
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{"card0": {"VRAM Total Memory (B)": "25753026560", "VRAM Total Used Memory (B)": "1130496000",
 "Card Series": "Radeon RX 7900 XTX", "Card Model": "0x744c", "GFX Version": "gfx1100"},
 "system": {"Driver version": "6.8.5"}}
"""
AMD = (
    '[{"gpu": 0, "mem_usage": {"total_vram": {"value": 16368, "unit": "MB"},'
    ' "used_vram": {"value": 24, "unit": "MB"}, "free_vram": {"value": 16344, "unit": "MB"}}}]'
)


def test_nvidia_smi_is_understood() -> None:
    """Recorded from nvidia-smi 580; "[N/A]" is what it says where the GPU shares the RAM."""
    (h200,) = parse_nvidia_smi(NVIDIA)
    assert (h200.name, h200.total_bytes, h200.free_bytes) == (
        "NVIDIA H200",
        143771 * 2**20,
        143156 * 2**20,
    )
    assert [gpu.index for gpu in parse_nvidia_smi(NVIDIA_TWO)] == ["0", "1"]
    assert parse_nvidia_smi(NVIDIA_UNIFIED)[0].total_bytes is None
    assert parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate") == []


def test_rocm_smi_and_amd_smi_are_understood() -> None:
    """Warnings before the JSON, bytes as text, and ROCm 7's outer mapping."""
    (xtx,) = parse_rocm_smi(ROCM)
    assert xtx == Gpu("Radeon RX 7900 XTX", 25753026560, 25753026560 - 1130496000)
    expected = [Gpu("AMD GPU", 16368 * 2**20, 16344 * 2**20)]
    assert parse_amd_smi(AMD) == expected
    assert parse_amd_smi(f'{{"gpu_data": {AMD}}}') == expected
    for parser in (parse_rocm_smi, parse_amd_smi):
        assert parser("no GPU found") == []
        assert parser("{torn") == []


def test_the_card_left_visible_is_the_one_that_counts() -> None:
    """By index or by uuid; "" and an unknown one leave none."""
    gpus = parse_nvidia_smi(NVIDIA_TWO)
    assert visible_gpu(gpus, {}) == gpus[0]
    assert visible_gpu(gpus, {"CUDA_VISIBLE_DEVICES": "1,0"}) == gpus[1]
    assert visible_gpu(gpus, {"CUDA_VISIBLE_DEVICES": "GPU-bbb"}) == gpus[1]
    assert visible_gpu(gpus, {"CUDA_VISIBLE_DEVICES": ""}) is None
    assert visible_gpu([], {}) is None


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    """The kernel's total is the host's; page cache can be dropped, so it counts as available."""
    assert within_cgroup(64 * GIB, 60 * GIB, tmp_path) == (64 * GIB, 60 * GIB)
    (tmp_path / "memory.max").write_text(f"{16 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{10 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {5 * GIB}\ninactive_file {4 * GIB}\n")
    assert within_cgroup(64 * GIB, 60 * GIB, tmp_path) == (16 * GIB, 10 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    assert within_cgroup(64 * GIB, 60 * GIB, tmp_path) == (64 * GIB, 60 * GIB)


def test_this_machine_is_read(tmp_path: Path) -> None:
    """Against the system's own answers."""
    profile = read_machine(tmp_path / "not" / "there")
    assert 0 < profile.ram_available_bytes <= profile.ram_bytes
    assert profile.num_cores >= 1
    assert profile.disk_free_bytes == pytest.approx(free_disk(tmp_path), rel=0.2)
    assert not profile.is_stated


def test_a_stated_machine_keeps_what_was_not_stated() -> None:
    """And zero bytes of VRAM is a machine without a card."""
    only_ram = stated(vram_bytes=None, ram_bytes=8 * GIB, gpu=None, base=HERE)
    assert (only_ram.vram_bytes, only_ram.ram_bytes) == (None, 8 * GIB)
    with_gpu = stated(vram_bytes=8 * GIB, ram_bytes=None, gpu=None, base=HERE)
    assert (with_gpu.vram_free_bytes, with_gpu.ram_available_bytes) == (8 * GIB, 28 * GIB)
    assert not stated(vram_bytes=0, ram_bytes=None, gpu=None, base=with_gpu).has_gpu


# --- examples and the command --------------------------------------------------------------------


def test_there_is_an_example_for_every_base_that_is_published() -> None:
    """The issue's list."""
    assert {path.stem for path in EXAMPLES} >= {
        "flux1-dev",
        "flux1-schnell",
        "flux2-dev",
        "flux2-klein-4b",
        "flux2-klein-9b",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_loads_plans_and_fits_a_16_gib_card(path: Path) -> None:
    """A first recipe that does not run is worse than none."""
    loaded = load_recipe(path)
    assert f"{loaded.base.family}-{loaded.base.variant}" == path.stem
    plan: Plan = make_plan(loaded, machine(16))
    assert plan.fits, plan.refusal
    assert "#" in path.read_text(encoding="utf-8")


def write_recipe(folder: Path, base: str = "flux2.dev") -> Path:
    path = folder / "cat.yaml"
    path.write_text(json.dumps(recipe(base).to_json() | {"cache": str(folder)}), encoding="utf-8")
    return path


def test_plan_prints_tables_and_exits_with_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain columns where there is no terminal."""
    arguments = [
        str(write_recipe(tmp_path)),
        "--vram",
        "24GiB",
        "--ram",
        "32GiB",
        "--gpu",
        "rtx 4090",
    ]
    assert main(["plan", *arguments]) == 0
    said = capsys.readouterr().out
    parts = (
        "on RTX 4090; 24.0 GiB",
        "by phase",
        "page cache",
        "block inputs",
        "placement: stream",
        "on disk",
        "first start: compiling",
        "bound by arithmetic",
        "first touch of RAM",
    )
    for part in parts:
        assert part in said


def test_a_card_by_name_brings_its_memory_and_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stated rates are said to be stated; a card that nobody knows is an error with near names."""
    path = str(write_recipe(tmp_path))
    rates = ["--disk-rate", "500MB/s", "--bus-rate", "6GB"]
    assert main(["plan", path, "--gpu", "RTX 5090", "--ram", "64GiB", *rates, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["machine"]["vram_bytes"] == 32 * GIB
    assert value["rates"]["origins"]["matmul_flops"] == "table"
    for name, rate in (("disk_read_bytes_per_s", 5e8), ("bus_bytes_per_s", 6e9)):
        assert value["rates"][name] == rate
        assert value["rates"]["origins"][name] == "stated"
    assert value["seconds"]["training"] > 1000 * value["seconds"]["step"]["seconds"]
    assert main(["plan", path, "--gpu", "RTX 509"]) == 2
    assert "did you mean 'RTX 5090'?" in capsys.readouterr().err


def test_a_name_that_does_not_exist_is_told_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As every other fault of a recipe is."""
    path = tmp_path / "cat.yaml"
    path.write_text(
        "name: cat\n"
        "base:\n"
        "  family: flux2\n"
        "  variant: devv\n"
        "  source: nowhere/nothing\n"
        "data:\n"
        "  sets: [{folder: none}]\n"
        "train:\n"
        "  arithmetic: fp9\n",
        encoding="utf-8",
    )
    assert main(["plan", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}: 2 faults" in said
    assert "line 4: base.variant: flux2 has no variant 'devv'; did you mean 'dev'?" in said
    assert "line 9: train.arithmetic: no arithmetic is called 'fp9'; did you mean 'fp8'?" in said


def test_a_refusal_is_printed_with_the_plan_and_exits_with_four(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The object comes whole, with the refusal in it, so that a script sees both."""
    arguments = ["plan", str(write_recipe(tmp_path)), "--vram", "4GiB", "--ram", "16GiB", "--json"]
    assert main(arguments) == 4
    printed = capsys.readouterr()
    value = json.loads(printed.out)
    assert value["fits"] is False
    assert printed.err.strip() == f"DoesNotFit: {value['refusal']}"


def test_pictures_are_counted_by_name_alone(tmp_path: Path) -> None:
    """Nothing is opened: the files need not even be pictures."""
    (tmp_path / "pictures" / "inner").mkdir(parents=True)
    for name in ("a.png", "b.JPG", "a.txt", "inner/c.webp"):
        (tmp_path / "pictures" / name).touch()
    values = recipe().to_json()
    values["data"]["sets"] = [{"folder": str(tmp_path / "pictures")}]
    wanted = Recipe.model_validate(values)
    assert task_of(wanted).count(wanted) == (3,)
    assert task_of(recipe()).count(recipe()) is None


def test_plan_imports_no_torch_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    """In a child process, whose source does not exist and whose sockets are closed."""
    code = (
        "import socket, sys\n"
        "def closed(*_, **__): raise AssertionError('plan opened a socket')\n"
        "socket.socket = closed\n"
        "from outsize.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'peft', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(outsize.__file__).parents[1])}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "plan",
            str(write_recipe(tmp_path)),
            "--vram",
            "24GiB",
            "--json",
        ],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert math.isfinite(json.loads(done.stdout)["peak"]["device_bytes"])
