"""The pure schedule: properties of shares, coverage, buckets, dropout and seeds."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from data_support import UNHURRIED
from hypothesis import given
from hypothesis import strategies as st

from outsize.base.errors import RecipeError
from outsize.data.buckets import Bucket
from outsize.data.schedule import Entry, MicroBatch, Schedule, draw_set, exact_shares, noise_seed

BUCKETS = [Bucket(32, 32), Bucket(48, 16), Bucket(16, 48)]
ENTRIES = st.lists(
    st.builds(Entry, st.integers(0, 2), st.sampled_from(BUCKETS)), min_size=1, max_size=30
)
Plan = tuple[int, list[Entry], int, int]  # seed, entries, batch, accumulate
SEEDS = st.integers(0, 2**63 - 1)
PLANS = st.tuples(SEEDS, ENTRIES, st.integers(1, 5), st.integers(1, 4))


def schedule_of(plan: Plan, **options: Any) -> Schedule:
    seed, entries, batch, accumulate = plan
    return Schedule(seed, entries, batch=batch, accumulate=accumulate, **options)


def first(schedule: Schedule, count: int) -> list[MicroBatch]:
    """The first micro-batches of a run, in order."""
    return [schedule.micro_batch(*divmod(number, schedule.accumulate)) for number in range(count)]


@UNHURRIED
@given(PLANS, st.randoms(use_true_random=False))
def test_a_micro_batch_depends_on_seed_step_and_place_and_not_on_what_was_asked_before(
    plan: Plan, order: random.Random
) -> None:
    expected = first(schedule_of(plan, caption_dropout=0.3), 40)
    other = schedule_of(plan, caption_dropout=0.3)
    numbers = list(range(40))
    order.shuffle(numbers)
    for number in numbers:
        assert other.micro_batch(*divmod(number, other.accumulate)) == expected[number]


@UNHURRIED
@given(PLANS)
def test_all_items_are_of_one_bucket_and_fill_the_batch_and_sets_mix_only_where_all_sizes_are_equal(
    plan: Plan,
) -> None:
    _, entries, batch, _ = plan
    has_one_size = len({entry.bucket for entry in entries}) == 1
    for micro in first(schedule_of(plan), 40):
        assert len(micro.items) == batch
        assert has_one_size or len({item.set_index for item in micro.items}) == 1
        for item in micro.items:
            assert entries[item.picture] == Entry(item.set_index, micro.bucket)


@UNHURRIED
@given(PLANS)
def test_with_batch_one_every_epoch_of_a_set_shows_each_picture_exactly_once(plan: Plan) -> None:
    seed, entries, _, accumulate = plan
    schedule = Schedule(seed, entries, accumulate=accumulate)
    seen: dict[tuple[int, int], list[int]] = {}
    for micro in first(schedule, 4 * len(entries)):
        seen.setdefault((micro.items[0].set_index, micro.items[0].epoch), []).append(
            micro.items[0].picture
        )
    last = {set_index: max(e for s, e in seen if s == set_index) for set_index, _ in seen}
    assert set(last) == {entry.set_index for entry in entries}
    for (set_index, epoch), pictures in seen.items():
        assert len(set(pictures)) == len(pictures), "none repeats before all were seen"
        if epoch < last[set_index]:
            all_of_set = [i for i, entry in enumerate(entries) if entry.set_index == set_index]
            assert sorted(pictures) == all_of_set


@UNHURRIED
@given(st.tuples(SEEDS, ENTRIES, st.integers(2, 5), st.just(1)), st.integers(1, 12))
def test_with_larger_batches_no_picture_is_favoured(plan: Plan, num_epochs: int) -> None:
    """After E epochs of a set each picture was seen E times, and less than a batch more in all."""
    seed, entries, batch, _ = plan
    entries = [Entry(0, entry.bucket) for entry in entries]
    counts: Counter[int] = Counter()
    for micro in first(Schedule(seed, entries, batch=batch), num_epochs * len(entries) + 9):
        if micro.items[0].epoch >= num_epochs:
            break
        counts.update(item.picture for item in micro.items)
    for bucket in BUCKETS:
        pictures = [i for i, entry in enumerate(entries) if entry.bucket == bucket]
        extra = [counts[picture] - num_epochs for picture in pictures]
        assert all(count >= 0 for count in extra)
        assert sum(extra) < batch
        if pictures and num_epochs * len(pictures) % batch == 0:
            assert sum(extra) == 0


def test_sets_of_one_size_mix_within_a_micro_batch_by_their_shares() -> None:
    entries = [Entry(0, BUCKETS[0])] * 16 + [Entry(1, BUCKETS[0])] * 96
    for micro in first(Schedule(1, entries, batch=8, shares=[None, 0.25]), 200):
        assert Counter(item.set_index for item in micro.items) == {0: 6, 1: 2}


def test_a_bucket_smaller_than_the_batch_wraps_and_comes_up_less_often() -> None:
    entries = [Entry(0, BUCKETS[1])] + [Entry(0, BUCKETS[0])] * 8
    micros = first(Schedule(3, entries, batch=4), 900)
    lone = [micro for micro in micros if micro.bucket == BUCKETS[1]]
    assert all([item.picture for item in micro.items] == [0] * 4 for micro in lone)
    assert all(len({item.noise_seed for item in micro.items}) == 4 for micro in lone)
    # One of nine pictures: a ninth of all samples, and so of all micro-batches.
    assert len(lone) == 100


def test_epochs_differ_in_order_and_so_do_seeds() -> None:
    entries = [Entry(0, BUCKETS[index % 3]) for index in range(30)]
    orders = [
        [micro.items[0].picture for micro in first(Schedule(seed, entries), 60)] for seed in (1, 2)
    ]
    assert orders[0] != orders[1]
    assert orders[0][:30] != orders[0][30:]
    assert sorted(orders[0][:30]) == sorted(orders[0][30:]) == list(range(30))


SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@UNHURRIED
@given(SHARES, st.integers(0, 10**12))
def test_set_draws_count_up_and_stay_near_their_share_at_every_moment(
    weights: list[int], start: int
) -> None:
    shares = [(i, Fraction(weight, sum(weights))) for i, weight in enumerate(weights)]
    before: dict[int, int] = {}
    for number in range(start, start + 60):
        index, ordinal = draw_set(shares, number)
        assert ordinal == before.get(index, ordinal), "ordinals of a set have no gap"
        before[index] = ordinal + 1
        assert abs(ordinal - number * shares[index][1]) <= len(weights)


@UNHURRIED
@given(SHARES)
def test_set_draws_begin_with_ordinal_zero_and_lose_none(weights: list[int]) -> None:
    shares = [(i, Fraction(weight, sum(weights))) for i, weight in enumerate(weights)]
    drawn = [draw_set(shares, number) for number in range(100)]
    for index, _ in shares:
        assert [o for i, o in drawn if i == index] == list(range(sum(i == index for i, _ in drawn)))
    period = [draw_set(shares, number)[0] for number in range(sum(weights))]
    assert Counter(period) == dict(enumerate(weights)), "exact over one period"


def test_shares_are_kept_and_default_to_the_number_of_pictures() -> None:
    entries = [Entry(0, BUCKETS[0])] * 10 + [Entry(1, BUCKETS[0])] * 90
    counts = Counter(
        m.items[0].set_index for m in first(Schedule(0, entries, shares=[None, 0.3]), 1000)
    )
    assert counts == {0: 700, 1: 300}
    assert Counter(m.items[0].set_index for m in first(Schedule(0, entries), 1000)) == {
        0: 100,
        1: 900,
    }


def test_unstated_shares_divide_what_is_left_by_number_of_pictures() -> None:
    assert exact_shares([None, 0.4, None], {0: 10, 1: 999, 2: 20}) == (
        (0, Fraction(1, 5)),
        (1, Fraction(2, 5)),
        (2, Fraction(2, 5)),
    )
    thirds = exact_shares([0.333, 0.333, 0.333], {0: 1, 1: 1, 2: 1})
    assert [share for _, share in thirds] == [Fraction(1, 3)] * 3


@pytest.mark.parametrize(
    ("shares", "counts", "message"),
    [
        ([], {}, "no picture"),
        ([0.0], {0: 1}, r"share of 0\.0"),
        ([1.5], {0: 1}, r"share of 1\.5"),
        ([0.5], {0: 1}, r"add up to 0\.5"),
        ([1.0, None], {0: 1, 1: 1}, "leaves nothing"),
        ([0.5, 0.5], {0: 1}, "no pictures"),
    ],
)
def test_impossible_shares_are_refused_with_their_values(
    shares: list[float | None], counts: dict[int, int], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        exact_shares(shares, counts)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_captions_are_dropped_at_the_stated_rate(rate: float) -> None:
    schedule = Schedule(11, [Entry(0, BUCKETS[0])] * 7, batch=4, caption_dropout=rate)
    drops = [item.drops_caption for micro in first(schedule, 2500) for item in micro.items]
    deviation = math.sqrt(rate * (1 - rate) / len(drops))
    assert abs(sum(drops) / len(drops) - rate) <= 4 * deviation, "four standard deviations"


@UNHURRIED
@given(SEEDS, st.integers(0, 2**31))
def test_noise_seeds_are_unique_within_a_run_even_in_their_low_half(seed: int, start: int) -> None:
    """The CPU generator of torch reads the low 32 bits only: seeds 1 and 1 + 2**32 give one noise."""
    seeds = [noise_seed(seed, sample) for sample in range(start, start + 2000)]
    assert all(0 <= value < 2**63 for value in seeds)
    assert len({value & 0xFFFFFFFF for value in seeds}) == len(seeds)


@UNHURRIED
@given(PLANS)
def test_noise_seeds_differ_between_all_steps_places_and_items(plan: Plan) -> None:
    seeds = [item.noise_seed for micro in first(schedule_of(plan), 60) for item in micro.items]
    assert len(set(seeds)) == len(seeds)


def test_noise_seeds_have_no_bit_that_stands_still() -> None:
    seeds = [noise_seed(5, sample) for sample in range(4000)]
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert abs(ones - 2000) < 5 * math.sqrt(1000), f"bit {bit}: five standard deviations"


def test_runs_of_different_seeds_share_no_noise() -> None:
    ours, theirs = ({noise_seed(seed, sample) for sample in range(5000)} for seed in (1, 2))
    assert not ours & theirs


def test_step_one_billion_costs_no_more_than_step_one() -> None:
    entries = [Entry(i % 2, BUCKETS[i % 3]) for i in range(2000)]
    schedule = Schedule(0, entries, batch=3, accumulate=2)
    steps = [random.Random(0).randrange(10**9) for _ in range(20)]
    began = time.perf_counter()
    for step in steps:
        schedule.micro_batch(step, 1)
    # 20 fresh epochs of 2000 pictures; a replay of a billion steps would take an hour.
    assert time.perf_counter() - began < 5


def test_the_schedule_is_the_same_on_every_machine_and_in_every_version() -> None:
    """Pinned on purpose: a change here breaks the resuming of every run that exists."""
    entries = [Entry(0, BUCKETS[0])] * 3 + [Entry(1, BUCKETS[1])] * 2
    schedule = Schedule(42, entries, batch=2, accumulate=2, caption_dropout=0.5)
    micro = schedule.micro_batch(7, 1)
    facts = [(item.picture, item.drops_caption, item.noise_seed) for item in micro.items]
    assert facts == [(1, False, 8865217636586416523), (2, True, 6823235957961016124)]
    assert micro.items[1].noise_seed == noise_seed(42, (7 * 2 + 1) * 2 + 1)
