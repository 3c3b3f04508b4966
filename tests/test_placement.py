"""Placements: the right bytes at the right time, as few copies as the ring allows, within stated bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.base.tiers import TIERS
from outsize.devices.protocol import open_device
from outsize.placement._spread import as_tiers, choose_resident, choose_tiers, spread_evenly
from outsize.placement.protocol import PLACEMENTS, PlacementSettings, Sweep
from outsize.placement.stream import Stream

CPU = open_device("cpu")


def _filled(name: str, sizes: list[int], resident: frozenset[int], slots: int):  # noqa: ANN202
    made = PLACEMENTS.load(name)(
        PlacementSettings(CPU, sizes, as_tiers(len(sizes), resident), slots)
    )
    staging = torch.empty(max(sizes), dtype=torch.uint8)
    for block, size in enumerate(sizes):
        staging.fill_(block + 1)
        made.put(block, staging[:size])  # only lent: the next block overwrites it
    return made


def _sweep(placement: Stream, kind: Sweep, num_blocks: int, sizes: list[int]) -> None:
    placement.begin(kind)
    order = list(range(num_blocks))
    for block in order + (order[::-1] if kind == "train" else []):
        packet = placement.acquire(block)
        assert packet.numel() == sizes[block]
        assert bool((packet == block + 1).all()), f"block {block} has other bytes"
        placement.release(block)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=12),
    slots=st.integers(1, 5),
    num_resident=st.integers(0, 12),
    sweeps=st.lists(st.sampled_from(["train", "forward"]), min_size=1, max_size=5),
    name=st.sampled_from(["stream", "resident"]),
)
def test_every_acquired_packet_holds_its_own_block(
    sizes: list[int], slots: int, num_resident: int, sweeps: list[Sweep], name: str
) -> None:
    resident = spread_evenly(len(sizes), min(num_resident, len(sizes)))
    placement = _filled(name, sizes, resident, slots)
    for kind in sweeps:
        _sweep(placement, kind, len(sizes), sizes)


@pytest.mark.parametrize(("num_blocks", "slots"), [(5, 2), (8, 3), (56, 3), (3, 3)])
def test_a_streamed_step_copies_each_block_twice_less_what_the_slots_still_hold(
    num_blocks: int, slots: int
) -> None:
    """Up n blocks, down n blocks; at the turn and at the step boundary the slots' blocks need no copy."""
    sizes = [16] * num_blocks
    placement = _filled("stream", sizes, frozenset(), slots)
    _sweep(placement, "train", num_blocks, sizes)
    before = placement.num_copies
    for _ in range(3):
        _sweep(placement, "train", num_blocks, sizes)
    assert placement.num_copies - before == 3 * 2 * (num_blocks - slots)


def test_a_sweep_broken_off_in_the_middle_starts_again_cleanly() -> None:
    sizes = [8] * 6
    placement = _filled("stream", sizes, frozenset(), 3)
    placement.begin("train")
    for block in range(4):
        placement.acquire(block)
        placement.release(block)
    _sweep(placement, "train", 6, sizes)


def test_a_block_out_of_order_is_refused() -> None:
    placement = _filled("stream", [8] * 4, frozenset(), 2)
    placement.begin("forward")
    with pytest.raises(AssertionError, match="the schedule says 0"):
        placement.acquire(2)


def test_stated_bytes_are_slots_and_resident_blocks_on_the_device_and_the_rest_on_the_host() -> (
    None
):
    sizes = [100, 200, 100, 50]
    placement = _filled("stream", sizes, frozenset({1}), 2)
    assert placement.device_bytes() == 2 * 100 + 200
    assert placement.host_bytes() == 250


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), budget=st.integers(0, 30_000))
def test_resident_blocks_fit_the_budget_and_are_as_many_as_can_be(
    sizes: list[int], budget: int
) -> None:
    chosen = choose_resident(sizes, budget)
    assert sum(sizes[block] for block in chosen) <= budget
    if len(chosen) < len(sizes):
        one_more = spread_evenly(len(sizes), len(chosen) + 1)
        assert len(one_more) == len(chosen) + 1
        assert sum(sizes[block] for block in one_more) > budget


def test_resident_blocks_are_spread_evenly() -> None:
    chosen = sorted(spread_evenly(56, 14))
    gaps = {after - before for before, after in itertools.pairwise(chosen)}
    assert gaps == {4}


SIZES = st.lists(st.integers(1, 1000), max_size=40)
BYTES = st.integers(0, 12_000)


@settings(deadline=None)
@given(sizes=SIZES, device=BYTES, pinned=BYTES, pageable=BYTES)
def test_every_tier_keeps_within_its_bytes_and_the_device_takes_what_it_can(
    sizes: list[int], device: int, pinned: int, pageable: int
) -> None:
    tiers = choose_tiers(sizes, device, pinned, pageable)
    assert len(tiers) == len(sizes)
    for tier, limit in {"device": device, "pinned": pinned, "pageable": pageable}.items():
        held = sum(size for size, one in zip(sizes, tiers, strict=True) if one == tier)
        assert held <= limit
    resident = {block for block, tier in enumerate(tiers) if tier == "device"}
    assert resident == choose_resident(sizes, device)
    assert choose_tiers(sizes, device, 10**9, 0) == as_tiers(len(sizes), resident)


def test_each_tier_takes_its_share_and_is_spread_evenly() -> None:
    tiers = choose_tiers([10] * 56, 140, 140, 140)
    for tier in TIERS:
        held = [block for block, one in enumerate(tiers) if one == tier]
        assert len(held) == 14, f"a quarter of the blocks is in {tier}"
        gaps = {after - before for before, after in itertools.pairwise(held)}
        assert max(gaps) <= 6, f"{tier} blocks lie {gaps} apart, evenly would be 4"
    assert choose_tiers([10] * 4, 0, 0, 0) == ("disk",) * 4
