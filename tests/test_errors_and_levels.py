"""How errors count and which levels are drawn: against the formulas of those who named them, written plainly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from outsize.base.errors import RecipeError
from outsize.objectives._errors import Errors
from outsize.objectives.flow_matching import FlowMatching
from outsize.recipes.load import recipe_from_json

SIGMAS = torch.tensor([1 / 1000, 0.05, 0.3, 0.5, 0.77, 0.999])


def errors_like(error: Tensor, sigma: float, kind: str, c: float, schedule: str) -> Tensor:
    """sd-scripts (library/train_util.py, conditional_loss and get_huber_threshold_if_needed), in fp64, with sigma as t / 1000.

    Its `huber` and `smooth_l1` are our pseudo_huber and smooth_l1; mae and torch's Huber are those of torch.
    """
    if schedule == "exponential":
        c = math.exp(math.log(c) * sigma)  # alpha = -log(c) / T; exp(-alpha t)
    elif schedule == "snr":
        # (1 - c) / (1 + s)^2 + c with s = noise / signal, sqrt((1 - a) / a) there and sigma / (1 - sigma) on straight lines
        c = (1 - c) / (1 + sigma / (1 - sigma)) ** 2 + c
    zero = torch.zeros_like(error)
    return {
        "mse": lambda: error**2,
        "mae": lambda: torch.nn.functional.l1_loss(error, zero, reduction="none"),
        # scaled so that small errors count as squares
        "huber": lambda: 2 * torch.nn.functional.huber_loss(error, zero, reduction="none", delta=c),
        "pseudo_huber": lambda: 2 * c * (torch.sqrt(error**2 + c**2) - c),
        "smooth_l1": lambda: 2 * (torch.sqrt(error**2 + c**2) - c),
    }[kind]()


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
@pytest.mark.parametrize("kind", ["mse", "mae", "huber", "pseudo_huber", "smooth_l1"])
def test_errors_count_as_in_the_programs_that_named_them(kind: Any, schedule: Any) -> None:
    """Value and gradient, from errors far below c to far above it."""
    errors = Errors(kind=kind, c=0.1, c_schedule=schedule)
    for sigma in SIGMAS.tolist():
        plain = torch.logspace(-4, 1, 40, dtype=torch.float64)
        plain = torch.cat([-plain, plain]).requires_grad_()
        ours = plain.detach().float().requires_grad_()
        wanted = errors_like(plain, sigma, kind, 0.1, schedule)
        got = errors.of(ours, torch.tensor([sigma]))
        wanted.sum().backward()
        got.sum().backward()
        assert plain.grad is not None
        torch.testing.assert_close(got, wanted.float(), rtol=2e-5, atol=1e-12)
        torch.testing.assert_close(ours.grad, plain.grad.float(), rtol=2e-5, atol=1e-7)


def test_gradients_of_masks_weights_regularisation_and_huber_equal_a_plain_reference() -> None:
    """All at once: a batch of a masked picture and one for regularisation of half the weight, by hand in fp64."""
    generator = torch.Generator().manual_seed(3)
    clean, noise = torch.randn(2, 2, 3, 4, 4, generator=generator)
    sigma, matrix = torch.tensor([0.25, 0.7]), torch.randn(3, 3, generator=generator)
    mask = torch.rand(2, 1, 4, 4, generator=generator)
    mask[1] = 1.0
    set_weight = torch.tensor([1.0, 0.5])
    objective = FlowMatching(
        errors=Errors(kind="huber", c=0.4, c_schedule="snr", weighting="cosmap")
    )
    ours, theirs = matrix.clone().requires_grad_(), matrix.double().requires_grad_()
    loss = objective.loss(
        lambda noisy, _: torch.einsum("dc,bchw->bdhw", ours, noisy),
        clean, sigma, noise, set_weight.view(-1, 1, 1, 1) * mask, torch.float32,
    )  # fmt: skip
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        s = sigma[b].double()
        x, e = clean[b].double(), noise[b].double()
        error = torch.einsum("dc,chw->dhw", theirs, (1 - s) * x + s * e) - (e - x)
        c = (1 - 0.4) * (1 - s) ** 2 + 0.4
        size = error.abs()
        counted = torch.where(size <= c, error**2, 2 * c * size - c**2)
        level = 2 / (math.pi * (1 - 2 * s + 2 * s**2))
        total = total + level * set_weight[b] * (mask[b].double() * counted).mean() / 2
    total.backward()
    assert theirs.grad is not None
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sigma_sqrt", "cosmap"])
def test_weightings_are_those_of_diffusers(name: Any) -> None:
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    found = Errors(weighting=name).factor(SIGMAS)
    assert found is not None
    torch.testing.assert_close(found, compute_loss_weighting_for_sd3(name, SIGMAS))


@pytest.mark.parametrize("name", ["bell", "half_bell"])
def test_bells_are_those_of_ai_toolkit(name: Any) -> None:
    """Its thousand weights: exp(-2 (x - 1/2)^2) less its least, scaled to a mean of 1; the half one stays up below half noise."""
    x = torch.arange(1000, dtype=torch.float64) / 1000  # place i belongs to t = 1000 - i
    bell = torch.exp(-2 * (x - 0.5) ** 2)
    bell = (bell - bell.min()) * 1000 / (bell - bell.min()).sum()
    if name == "half_bell":
        bell[500:] = bell.max()
    found = Errors(weighting=name).factor((1000 - torch.arange(1000)) / 1000)
    assert found is not None
    torch.testing.assert_close(found.double(), bell, rtol=0, atol=2e-5)


def test_ai_toolkits_measured_weights_are_kept_to_one_per_cent() -> None:
    """Facts of its 1000-entry table: mean 1, highest at place 124, lowest near the end, some values between."""
    places = torch.arange(1000)
    found = Errors(weighting="ai_toolkit").factor((1000 - places) / 1000)
    assert found is not None
    assert found.mean().item() == pytest.approx(1.0, abs=2e-3)
    assert int(found.argmax()) == 124
    known = {0: 0.9057, 50: 1.3748, 124: 1.5227, 250: 1.3647, 496: 0.9314, 998: 0.4454}
    for place, weight in known.items():
        assert found[place].item() == pytest.approx(weight, rel=0.01), place


# --- laws ----------------------------------------------------------------------------------------


def levels(num: int = 3000, **settings: Any) -> Tensor:
    sigma, _ = FlowMatching(**settings).draw(range(num), (1,), 0.4)
    return sigma.double()


def quantile_gap(drawn: Tensor, expected: Tensor) -> float:
    """The largest distance between two distributions' functions (Kolmogorov and Smirnov's), of equally many draws."""
    both = torch.cat([drawn, expected]).sort().values
    below = [
        torch.searchsorted(one.sort().values, both, right=True) / len(one)
        for one in (drawn, expected)
    ]
    return float((below[0] - below[1]).abs().max())


def same_law(drawn: Tensor, expected: Tensor) -> None:
    """2.2 sqrt(2 / n): exceeded by one in ten thousand pairs of samples of one law."""
    assert quantile_gap(drawn, expected) < 2.2 * math.sqrt(2 / len(drawn))


def test_the_mode_law_is_that_of_diffusers() -> None:
    """Its u is the place in a schedule that falls from pure noise."""
    from diffusers.training_utils import compute_density_for_timestep_sampling

    for scale in (1.29, -0.5):
        u = compute_density_for_timestep_sampling("mode", 3000, mode_scale=scale, generator=torch.Generator().manual_seed(1))  # fmt: skip
        same_law(levels(law="mode", mode_scale=scale), 1 - u.double())


def test_content_favours_noise_and_style_does_not() -> None:
    u = torch.rand(3000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    same_law(levels(law="content"), 1 - u**3)
    same_law(levels(law="style"), u**3)


def test_a_given_shift_is_the_schedulers() -> None:
    """Shift s / (1 + (shift - 1) s), as FlowMatchEulerDiscreteScheduler with its own `shift` of 3."""
    plain = levels(num=200, law="logit_normal")
    shifted = levels(num=200, law="shifted", shift=3.0)
    torch.testing.assert_close(shifted, 3 * plain / (1 + 2 * plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("law", ["uniform", "logit_normal", "shifted", "mode", "content", "style"])
def test_a_range_keeps_the_law_within_it(law: Any) -> None:
    """Neither clamped to its ends, where draws would heap up, nor stretched."""
    whole = levels(num=12000, law=law)
    inside = whole[(whole >= 0.4) & (whole <= 0.8)][:2000]
    ranged = levels(num=len(inside), law=law, lowest=0.4, highest=0.8)
    assert ((ranged >= 0.4) & (ranged <= 0.8)).all()
    assert quantile_gap(ranged, inside) < 2.2 * math.sqrt(2 / len(inside))


def test_a_whole_range_draws_what_was_drawn_before_there_were_ranges() -> None:
    """So that runs go on."""
    drawn, noise = FlowMatching(law="uniform").draw([7], (2,), 0.0)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(drawn[0], torch.rand((), generator=generator, dtype=torch.float64).float())
    assert torch.equal(noise[0], torch.randn((2,), generator=generator))


def test_a_range_that_a_law_hardly_draws_is_an_error_not_a_hang() -> None:
    objective = FlowMatching(
        law="logit_normal", mean=-8.0, std=0.1, lowest=0.9, highest=0.95
    )  # fmt: skip
    with pytest.raises(RecipeError, match=r"drew no noise level from 0\.9 to 0\.95 in 10000 draws"):
        objective.draw([1], (1,), 0.0)


# --- recipes -------------------------------------------------------------------------------------


def train_section(train: dict[str, Any]) -> Any:
    return recipe_from_json(
        {
            "name": "x",
            "base": {"family": "flux2", "variant": "tiny", "source": "nowhere"},
            "data": {"sets": [{"folder": "pictures"}]},
            "train": train,
        },
        origin="recipe",
    )


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"loss": {"weighting": "min_snr_gamma"}}, "weighs noise predictions by their signal-to-noise ratio; these bases predict the velocity"),
        ({"loss": {"weighting": "debiased"}}, "weighs noise predictions"),
        ({"loss": {"weighting": "logit_normal"}}, "says which levels are drawn: set train.timesteps.law"),
        ({"loss": {"weighting": "cosmapp"}}, "must be 'none', 'sigma_sqrt', 'cosmap'"),
        ({"loss": {"c": 1.5, "c_schedule": "snr"}}, "c must be below 1 where it falls with the noise, found 1.5"),
        ({"timesteps": {"lowest": 0.5, "highest": 0.5}}, "from lowest 0.5 to highest 0.5 there must be at least 0.001"),
        ({"timesteps": {"law": "uniform", "shift": 3.0}}, "shift has no meaning for the law uniform"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_here_is_refused_with_the_reason(
    train: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        train_section(train)


def test_every_setting_of_the_loss_is_a_number_of_the_run() -> None:
    """Runs that count errors otherwise are not gone on with."""
    plain = train_section({}).numbers_digest()
    others: list[dict[str, Any]] = [
        {"loss": {"kind": "huber"}},
        {"loss": {"weighting": "bell"}},
        {"timesteps": {"lowest": 0.1}},
        {"timesteps": {"shift": 3.0}},
        {"ema": 0.99},
        {"optimizer": "schedulefree"},
        {"optimizer_options": {"r": 1.0}},
    ]
    digests = {train_section(one).numbers_digest() for one in others}
    assert len(digests) == len(others)
    assert plain not in digests
