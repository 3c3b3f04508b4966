"""Plans for language bases: every item by itself, token table and head in host memory, remedies in tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outsize.devices._profile import MachineProfile, read_machine, stated
from outsize.families import _attention as attention
from outsize.families import _gated_delta as delta
from outsize.families import _tiled_attention as tiled
from outsize.families.protocol import FAMILIES
from outsize.objectives.next_token import NextToken
from outsize.plan.plan import Plan
from outsize.plan.planner import make_plan
from outsize.plan.sizes import vocabulary_tensors
from outsize.plan.tasks import next_token
from outsize.plan.work import work_of
from outsize.recipes.recipe import Recipe

GIB = 2**30
VARIANTS = [
    ("gemma4", "31b"),
    ("llama", "smollm2-135m"),
    ("mistral3", "small-24b"),
    ("qwen3_5", "27b"),
]


def recipe(family: str = "gemma4", variant: str = "31b", **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "name": "chat",
        "base": {"family": family, "variant": variant, "source": "some/model"},
        "data": {"sets": [{"path": "talks.jsonl"}], **changes.pop("data", {})},
        **changes,
    }
    return Recipe.model_validate(values)


def machine(vram_gib: float, ram_gib: int = 64) -> MachineProfile:
    here = read_machine(Path("/"))
    vram = int(vram_gib * GIB)
    return stated(vram_bytes=vram, ram_bytes=ram_gib * GIB, gpu=None, base=here)


def items(plan: Plan, phase: str = "train step") -> dict[str, int]:
    found = next(one for one in plan.phases if one.name == phase)
    return {one.owner: one.num_bytes for one in found.items}


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_what_a_step_holds_follows_from_window_width_and_vocabulary(
    family: str, variant: str
) -> None:
    """Derived here from the family's own numbers, apart from the planner's code."""
    plugin: Any = FAMILIES.load(family)
    width = plugin.config(variant)["hidden_size"]
    short, long = (
        make_plan(recipe(family, variant, data={"window": window}), machine(141))
        for window in (1024, 4096)
    )
    for plan, window in ((short, 1024), (long, 4096)):
        found = items(plan)
        num_layers = len(plugin.layer_kinds(variant))
        assert found["block inputs"] <= num_layers * window * width * 2
        assert found["hidden states"] == 4 * window * width * 2
        assert found["batch"] == window * (3 * 8 + 4)
        assert found["logits"] <= next_token.TILE_BYTES + 12 * width * 2048
        assert "attention masks" not in found
        assert ("attention scores" in found) == (family == "gemma4")
    cache = sum(kind.cache_elements(4096 + 200) for kind in plugin.layer_kinds(variant))
    assert items(long, "sample")["keys and values"] == 2 * cache
    assert ("recurrent states" in items(long)) == (family == "qwen3_5")
    assert long.step.compute_s > 3 * short.step.compute_s


def test_a_tile_is_as_large_as_the_objective_makes_it() -> None:
    """Plans import no torch, so the figure stands in both."""
    assert NextToken().tile_bytes == next_token.TILE_BYTES


def test_only_a_processor_is_given_masks() -> None:
    """There full attention of one document is a flag, and windows need a mask where they are shorter than a row."""
    alone = {"data": {"pack": False, "window": 2048}}
    here = replace(machine(0), vram_bytes=None)
    found = [
        items(make_plan(recipe(*base, **options), here)).get("attention masks", 0)
        for base, options in (
            (("mistral3", "small-24b"), alone),
            (("mistral3", "small-24b"), {}),
            (("gemma4", "31b"), alone),
            (("gemma4", "31b"), {}),
        )
    ]
    pairs = 2048**2
    # a byte each as they are made, and one in fp32 as kernels take it
    assert found == [0, (1 + 4) * pairs, (1 + 4) * pairs, (2 + 4) * pairs]


def test_scores_of_wide_heads_are_counted_by_tiles() -> None:
    """Gemma's full layers, 32 heads: an eighth of the queries with all keys, fp32; from some length on a tile is full."""
    found = [
        items(make_plan(recipe(data={"window": window}), machine(141)))["attention scores"]
        for window in (1024, 2048, 8192)
    ]
    one = 4 * 32 * 128 * 1024
    assert found == [3 * one, 3 * 4 * one, 3 * (256 << 20)]
    assert next_token.SCORE_BYTES == tiled.TILE_BYTES
    assert next_token.QUERY_TILES == tiled._PART
    assert next_token.WIDEST_FLASH_HEAD == attention._WIDEST
    assert next_token.PASS_BYTES == delta.PASS_BYTES


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_token_table_and_head_may_stay_in_host_memory(family: str, variant: str) -> None:
    """Their bytes move from the card to pinned memory, and a head of its own counts beside the table."""
    plugin: Any = FAMILIES.load(family)
    table = plugin.table(variant)
    is_tied = not any(spec.name == "lm_head.weight" for spec in table)
    names = vocabulary_tensors(family, variant)
    assert len(names) == (1 if is_tied else 2)
    size = 2 * len(names) * plugin.vocabulary(variant) * plugin.config(variant)["hidden_size"]
    placed = [
        make_plan(recipe(family, variant, placement={"vocabulary_on_host": on_host}), machine(141))
        for on_host in (False, True)
    ]
    there, away = map(items, placed)
    assert away["vocabulary"] == size
    assert there["outside the blocks"] - away["outside the blocks"] == size
    assert placed[0].step.seconds < placed[1].step.seconds
    assert work_of(recipe(family, variant), has_gpu=False).num_vocabulary_elements == size // 2


def test_a_small_card_keeps_the_vocabulary_in_host_memory_by_itself() -> None:
    """Before block inputs, which cross the bus twice; a large card keeps both."""
    large, small = (make_plan(recipe(), machine(gib)) for gib in (24, 8))
    assert not large.chosen.holding.has_vocabulary_on_host
    assert small.fits, small.refusal
    assert small.chosen.holding.has_vocabulary_on_host
    assert not small.chosen.holding.offloads_inputs
    assert "token table and head stay there" in small.chosen.why


def test_a_refusal_names_a_shorter_window() -> None:
    """In tokens, as the recipe has it."""
    plan = make_plan(recipe(data={"window": 32768}), machine(8))
    assert not plan.fits
    assert "(32768 tokens, batch 1)" in str(plan.refusal)
    assert "`data: {window: " in str(plan.refusal)


def test_a_plan_for_text_has_no_phases_of_pictures() -> None:
    """Prepared, trained, sampled."""
    names = [phase.name for phase in make_plan(recipe(), machine(24)).phases]
    assert names == ["prepare base", "train step", "train update", "sample"]
