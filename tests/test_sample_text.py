"""Drawing a token from logits: against counts that follow from the probabilities themselves."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.sample.text import draw_token, generator_of

LOGITS = st.lists(st.floats(-8, 8), min_size=1, max_size=12)


def drawn(logits: list[float], count: int, *, temperature: float, top_p: float) -> list[int]:
    generator = generator_of(3)
    values = torch.tensor(logits)
    return [
        draw_token(values, temperature=temperature, top_p=top_p, generator=generator)
        for _ in range(count)
    ]


@settings(deadline=None, max_examples=60)
@given(LOGITS, st.floats(0.1, 3), st.floats(0.01, 1))
def test_only_the_likeliest_that_make_up_top_p_are_drawn(
    logits: list[float], temperature: float, top_p: float
) -> None:
    """The smallest set whose probability reaches top_p, counted here one by one; never none."""
    weights = [math.exp(float(torch.tensor(one)) / temperature) for one in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    total, least = 0.0, 0.0
    for i in order:
        least = weights[i]
        total += weights[i] / sum(weights)
        if total >= top_p + 1e-9:
            break
    # of tokens as likely as the last of them any may stand for it
    allowed = {i for i, weight in enumerate(weights) if weight >= least * (1 - 1e-6)}
    assert set(drawn(logits, 20, temperature=temperature, top_p=top_p)) <= allowed


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    """At temperature 2 the logits 0, 2 ln 2 and 2 ln 5 weigh 1, 2 and 5."""
    logits = [0.0, 2 * math.log(2), 2 * math.log(5)]
    found = drawn(logits, 4000, temperature=2.0, top_p=1.0)
    for token, share in enumerate((1 / 8, 2 / 8, 5 / 8)):
        # four standard deviations of a share over 4000 draws
        assert abs(found.count(token) / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)


def test_without_temperature_the_likeliest_is_taken_and_nothing_is_drawn() -> None:
    generator = generator_of(0)
    before = generator.get_state()
    found = draw_token(torch.tensor([0.1, 3.0, 2.9]), temperature=0, top_p=0.5, generator=generator)
    assert found == 1
    assert generator.get_state().equal(before)


def test_a_seed_gives_the_same_tokens_again() -> None:
    assert drawn([0.0] * 9, 30, temperature=1, top_p=1) == drawn(
        [0.0] * 9, 30, temperature=1, top_p=1
    )
    generators = [generator_of(seed) for seed in (1, 2)]
    texts = [
        [draw_token(torch.zeros(9), temperature=1, top_p=1, generator=one) for _ in range(20)]
        for one in generators
    ]
    assert texts[0] != texts[1]
