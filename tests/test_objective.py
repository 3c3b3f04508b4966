"""Rectified flow against closed forms: moments of the laws, the loss and its gradient, and exact repetition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from outsize.base.errors import RecipeError
from outsize.objectives.flow_matching import FlowMatching
from outsize.objectives.protocol import OBJECTIVES

NUM = 2000


def levels(objective: FlowMatching, mu: float = 0.0, num: int = NUM) -> Tensor:
    """Noise levels of many samples, fp64."""
    sigma, _ = objective.draw(range(num), (1,), mu)
    assert sigma.dtype == torch.float32
    assert ((sigma > 0) & (sigma < 1)).all()
    return sigma.double()


def assert_moments(values: Tensor, mean: float, variance: float) -> None:
    """Within four standard errors of a normal sample's moments: one failure in ten thousand laws."""
    num = len(values)
    assert values.mean().item() == pytest.approx(mean, abs=4 * math.sqrt(variance / num))
    assert values.var().item() == pytest.approx(variance, rel=4 * math.sqrt(2 / num))


def test_the_uniform_law_has_mean_a_half_and_variance_a_twelfth() -> None:
    assert_moments(levels(FlowMatching(law="uniform")), 1 / 2, 1 / 12)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.5)])
def test_the_logit_of_the_logit_normal_law_is_normal(mean: float, std: float) -> None:
    drawn = torch.logit(levels(FlowMatching(law="logit_normal", mean=mean, std=std)))
    assert_moments(drawn, mean, std**2)


def test_a_positive_mean_draws_more_noise() -> None:
    """The common trainer's table runs the other way round; sigma 1 is pure noise here and in sampling."""
    assert levels(FlowMatching(law="logit_normal", mean=1.0), num=500).mean() > 0.6


@pytest.mark.parametrize("mu", [0.0, 1.15, 2.02])
def test_the_shifted_law_moves_the_logit_by_mu(mu: float) -> None:
    """e^mu / (e^mu + 1/s - 1) is sigmoid(logit(s) + mu): a logit-normal law with another mean."""
    drawn = torch.logit(levels(FlowMatching(law="shifted", mean=0.2, std=0.9), mu))
    assert_moments(drawn, 0.2 + mu, 0.9**2)


def test_a_shifted_draw_equals_the_schedulers_shift_of_the_unshifted_draw() -> None:
    """FlowMatchEulerDiscreteScheduler's own formula on the same draws; fp32 rounding apart."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    plain = levels(FlowMatching(law="logit_normal"), num=200)
    shifted = levels(FlowMatching(law="shifted"), mu=1.3, num=200)
    expected = scheduler.time_shift(1.3, 1.0, plain)
    torch.testing.assert_close(shifted, expected, rtol=1e-6, atol=1e-7)


def test_mu_moves_only_the_shifted_law() -> None:
    for law in ("uniform", "logit_normal"):
        assert torch.equal(
            levels(FlowMatching(law=law), 3.0, 50), levels(FlowMatching(law=law), 0.0, 50)
        )


def test_draws_depend_on_each_samples_seed_alone() -> None:
    """Not on its place in the batch, on the batch's size, or on anybody's use of the global generator."""
    objective = FlowMatching()
    sigma, noise = objective.draw([5, 2**62 + 1, 5], (4, 6, 3), 0.7)
    torch.manual_seed(123)
    torch.rand(7)
    state = torch.get_rng_state()
    again_sigma, again_noise = objective.draw([2**62 + 1], (4, 6, 3), 0.7)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(sigma[1:2], again_sigma)
    assert torch.equal(noise[1:2], again_noise)
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])


def test_noise_is_standard_normal() -> None:
    _, noise = FlowMatching().draw([1, 2], (16, 32, 32), 0.0)
    assert noise.dtype == torch.float32
    assert_moments(noise.double().flatten(), 0.0, 1.0)


def test_the_loss_is_the_weighted_mean_of_each_samples_error() -> None:
    """With a prediction of zero it is mean_b w_b mean((noise - x)^2), in closed form."""
    clean, noise = torch.full((2, 3, 4, 4), 2.0), torch.zeros(2, 3, 4, 4)
    noise[1] = -1.0
    weight = torch.tensor([0.5, 3.0])
    loss = FlowMatching().loss(
        lambda noisy, _: torch.zeros_like(noisy),
        clean,
        torch.tensor([0.1, 0.9]),
        noise,
        weight,
        torch.float32,
    )
    assert loss.item() == (0.5 * 4 + 3.0 * 9) / 2
    assert loss.dtype == torch.float32


def test_the_model_sees_the_mixture_in_the_compute_type_and_the_level_in_fp32() -> None:
    """x_t is mixed in fp32 and rounded once; a bf16 mixture would differ."""
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 2, 3, 8, 8, generator=generator)
    sigma = torch.tensor([0.30103, 0.98765])
    seen: list[Any] = []

    def predict(noisy: Tensor, level: Tensor) -> Tensor:
        seen.extend((noisy, level))
        return noisy

    FlowMatching().loss(predict, clean.bfloat16(), sigma, noise, torch.ones(2), torch.bfloat16)
    noisy, level = seen
    mixed = (1 - sigma)[:, None, None, None] * clean.bfloat16().float()
    assert torch.equal(noisy, (mixed + sigma[:, None, None, None] * noise).bfloat16())
    assert torch.equal(level, sigma)
    assert level.dtype == torch.float32


def test_loss_and_gradient_equal_those_of_diffusers_training_script() -> None:
    """Its formula, written plainly in fp64: mean(w (pred - (noise - x))^2), with one weight for all."""
    generator = torch.Generator().manual_seed(3)
    clean, noise = torch.randn(2, 2, 3, 4, 4, generator=generator)
    sigma, matrix = torch.tensor([0.25, 0.7]), torch.randn(3, 3, generator=generator)
    ours, theirs = matrix.clone().requires_grad_(), matrix.double().requires_grad_()

    def predict(noisy: Tensor, _level: Tensor) -> Tensor:
        return torch.einsum("dc,bchw->bdhw", ours, noisy)

    loss = FlowMatching().loss(predict, clean, sigma, noise, torch.ones(2), torch.float32)
    loss.backward()
    sigmas = sigma.double()[:, None, None, None]
    mixed = (1.0 - sigmas) * clean.double() + sigmas * noise.double()
    prediction = torch.einsum("dc,bchw->bdhw", theirs, mixed)
    error = (prediction - (noise.double() - clean.double())) ** 2
    expected = error.reshape(2, -1).mean(1).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-5, atol=1e-6)


def test_a_wrong_law_or_deviation_is_refused() -> None:
    wrong: Any = "cosine"
    with pytest.raises(RecipeError, match="'cosine'"):
        FlowMatching(law=wrong)
    with pytest.raises(RecipeError, match="std > 0"):
        FlowMatching(std=0.0)


def test_the_plugin_is_found_by_its_files_name() -> None:
    assert OBJECTIVES.names() == ("flow_matching", "next_token")
    assert OBJECTIVES.load("flow_matching")(law="uniform") == FlowMatching(law="uniform")
