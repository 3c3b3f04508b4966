"""Sums of adapters, lower ranks and survival, against whole matrices in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outsize.base.errors import AdapterError
from outsize.dialects.protocol import AdapterWeights, LoraPair
from outsize.export.combine import combined, lowered, overall_error
from outsize.export.survival import Meter


def adapter_of(
    seed: int, *, rank: int = 4, alpha: float = 3.0, names: tuple[str, ...] = ("a", "b")
) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        name: LoraPair(
            torch.randn(rank, 24, generator=generator), torch.randn(40, rank, generator=generator)
        )
        for name in names
    }
    return AdapterWeights(pairs, rank, alpha)


def deltas(adapter: AdapterWeights) -> dict[str, Tensor]:
    return {name: p.B.double() @ p.A.double() * adapter.scale for name, p in adapter.pairs.items()}


def test_a_sum_of_adapters_has_the_weighted_sum_of_their_deltas() -> None:
    """Of different ranks, scales and modules; a weight below zero takes away."""
    some = [(adapter_of(1), 0.75), (adapter_of(2, rank=7, alpha=1.5, names=("b", "c")), -0.3)]
    wanted: dict[str, Tensor] = {}
    for adapter, weight in some:
        for name, delta in deltas(adapter).items():
            wanted[name] = wanted.get(name, torch.zeros_like(delta)) + weight * delta
    made = combined(some)
    assert {name: pair.rank for name, pair in made.pairs.items()} == {"a": 4, "b": 11, "c": 7}
    got = deltas(made)
    assert set(got) == set(wanted)
    for name, delta in wanted.items():  # each B is rounded once to fp32
        assert torch.allclose(got[name], delta, rtol=0, atol=1e-6 * float(delta.abs().max()))


def test_one_adapter_with_a_weight_keeps_its_factors() -> None:
    one = adapter_of(3)
    made = combined([(one, 0.8)])
    assert made.pairs is one.pairs
    assert made.scale == pytest.approx(0.8 * one.scale, rel=1e-15)


def test_adapters_of_other_shapes_or_without_weight_are_refused() -> None:
    other = AdapterWeights({"a": LoraPair(torch.ones(2, 8), torch.ones(40, 2))}, 2, 2.0)
    with pytest.raises(AdapterError, match="a: 40 x 24, 40 x 8"):
        combined([(adapter_of(1), 1.0), (other, 1.0)])
    with pytest.raises(AdapterError, match="every adapter has the weight 0"):
        combined([(other, 0.0)])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 8), st.integers(1, 9))
def test_a_lower_rank_is_the_best_that_there_is_and_its_error_is_the_stated_one(
    seed: int, rank: int, target: int
) -> None:
    """Eckart and Young: the error is the norm of the singular values that were cut off, no less and no more."""
    generator = torch.Generator().manual_seed(seed)
    falling = torch.logspace(0, -2, rank)
    pair = LoraPair(
        torch.randn(rank, 24, generator=generator, dtype=torch.float64) * falling[:, None],
        torch.randn(40, rank, generator=generator, dtype=torch.float64),
    )
    adapter = AdapterWeights({"a": pair}, rank, 2.0)
    made, told = lowered(adapter, rank=target)
    (whole,), (cut,) = deltas(adapter).values(), deltas(made).values()
    values = torch.linalg.svdvals(whole)
    best = float(values[target:].norm())
    assert made.pairs["a"].rank == min(rank, target)
    assert made.scale == pytest.approx(adapter.scale)
    assert float((whole - cut).norm()) == pytest.approx(best, abs=1e-12 * float(values[0]))
    assert told["a"].lost == pytest.approx(best, abs=1e-12 * float(values[0]))
    assert told["a"].norm == pytest.approx(float(whole.norm()))
    assert overall_error(told) == pytest.approx(told["a"].error)


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99, 1.0])
def test_an_energy_takes_the_smallest_rank_that_keeps_it(energy: float) -> None:
    adapter = adapter_of(9, rank=8)
    made, told = lowered(adapter, energy=energy)
    for name, delta in deltas(adapter).items():
        squares = torch.linalg.svdvals(delta).square()
        total = float(squares.sum())
        rank = next(
            k for k in range(1, 9) if float(squares[:k].sum()) >= energy * total * (1 - 1e-9)
        )
        assert made.pairs[name].rank == told[name].new_rank == rank
        assert 1 - told[name].error ** 2 >= energy - 1e-9
    assert made.rank == max(pair.rank for pair in made.pairs.values())


def test_a_rank_that_is_low_already_leaves_every_number_as_it_is() -> None:
    adapter = adapter_of(4)
    made, told = lowered(adapter, rank=4)
    assert all(made.pairs[name] is pair for name, pair in adapter.pairs.items())
    assert overall_error(told) == 0.0


def test_a_sum_of_an_adapter_with_itself_has_its_rank_again() -> None:
    """What lowering is good for after adding: no energy lies in the doubled directions."""
    one = adapter_of(5)
    made, told = lowered(combined([(one, 0.5), (one, 0.5)]), energy=1 - 1e-9)
    assert {pair.rank for pair in made.pairs.values()} == {4}
    assert overall_error(told) < 1e-6
    for name, delta in deltas(one).items():
        assert torch.allclose(deltas(made)[name], delta, rtol=0, atol=1e-5)


def test_a_module_without_effect_is_lowered_to_rank_one() -> None:
    silent = AdapterWeights({"a": LoraPair(torch.ones(3, 8), torch.zeros(8, 3))}, 3, 3.0)
    made, told = lowered(silent, energy=0.5, rank=1)
    assert made.pairs["a"].rank == 1
    assert not bool(deltas(made)["a"].any())
    assert told["a"].error == 0.0


def test_targets_that_make_no_sense_are_refused() -> None:
    for wrong in ({}, {"rank": 0}, {"energy": 0.0}, {"energy": 1.5}):
        with pytest.raises(AdapterError):
            lowered(adapter_of(1), **wrong)


def test_what_survives_is_told_by_ratio_cosine_and_share() -> None:
    """Windows of two weights add up to what the whole matrices say."""
    generator = torch.Generator().manual_seed(1)
    D = {name: torch.randn(30, 8, generator=generator) for name in ("a", "b")}
    S = {name: 0.5 * one + 0.1 * torch.randn(30, 8, generator=generator) for name, one in D.items()}
    meter = Meter()
    for name, one in D.items():
        for start in range(0, 30, 7):
            meter.add("way", name, one[start : start + 7], S[name][start : start + 7])
    flat_D, flat_S = (torch.cat([x["a"], x["b"]]).double().flatten() for x in (D, S))
    whole = meter.overall("way")
    assert whole.norm == pytest.approx(float(flat_D.norm()))
    assert whole.ratio == pytest.approx(float(flat_S.norm() / flat_D.norm()))
    assert whole.share == pytest.approx(float(flat_D @ flat_S / (flat_D @ flat_D)))
    assert whole.num_elements == 480
    one = meter.of_modules("way")["a"]
    cosine = torch.nn.functional.cosine_similarity(
        D["a"].double().flatten(), S["a"].double().flatten(), dim=0
    )
    assert one.cosine == pytest.approx(float(cosine))


def test_a_delta_that_was_rounded_away_has_survived_not_at_all_and_none_has_nothing_to_lose() -> (
    None
):
    meter = Meter()
    meter.add("way", "gone", torch.ones(2, 2), torch.zeros(2, 2))
    meter.add("way", "none", torch.zeros(2, 2), torch.zeros(2, 2))
    assert (meter.of_modules("way")["gone"].share, meter.of_modules("way")["none"].share) == (
        0.0,
        1.0,
    )
