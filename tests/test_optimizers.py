"""Optimisers over one flat tensor: as their libraries over many, resumed to the bit, and averages looked at without a trace."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.base.errors import MachineFault, RecipeError
from outsize.plan.names import check_names
from outsize.train.average import Average, decay_of
from outsize.train.loop import LoopSettings
from outsize.train.optimizers.protocol import (
    OPTIMIZERS,
    OptimizerSettings,
    make_optimizer,
    require_optimizer,
)
from outsize.train.update import Update

SHAPES = {"a": (5, 7), "b": (3, 300), "c": (11,)}
CASES: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("adamw", {}, 1e-2),
    ("adamw8bit", {}, 1e-2),
    ("prodigy", {}, 1.0),
    ("prodigy", {"d_coef": 2.0, "slice_p": 11, "bias_correction": True, "growth_rate": 1.02}, 1.0),
    ("schedulefree", {}, 1e-2),
    ("schedulefree", {"r": 1.0}, 1e-2),
)


def initial_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_update(
    name: str,
    options: dict[str, Any],
    rate: float,
    *,
    ema: float | None = None,
    decay: float = 0.01,
) -> Update:
    initial = initial_values()
    parameters = {key: nn.Parameter(one.clone()) for key, one in initial.items()}
    settings = OptimizerSettings(rate, (0.9, 0.99), 1e-8, decay)
    return Update(parameters, initial, name, settings, options, ema)


def gradients(step: int) -> dict[str, Tensor]:
    """A pull to 1 that changes with the step, so that estimates of distances have something to find."""
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def take_steps(update: Update, steps: range, rate: float) -> None:
    for step in steps:
        for name, noise in gradients(step).items():
            update.parameters[name].grad = (update.masters[name] - 1).detach() + 0.1 * noise
        update.collect_()
        update.step_(rate * min(1.0, (step + 1) / 3))


def saved(update: Update) -> tuple[dict[str, Tensor], dict[str, Tensor] | None, Any, Any]:
    """As a checkpoint holds it: tensors, and a skeleton that has been JSON."""
    tensors, skeleton = update.state()
    averaged = update.averaged()
    return (
        {name: one.detach().clone() for name, one in update.masters.items()},
        None if averaged is None else {name: one.clone() for name, one in averaged.items()},
        tensors,
        json.loads(json.dumps(skeleton, allow_nan=False)),
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize(("name", "options", "rate"), CASES, ids=str)
def test_a_resumed_optimizer_goes_on_to_the_same_bits(
    name: str, options: dict[str, Any], rate: float, ema: float | None
) -> None:
    """Masters, average and state, after a stop at every step; an average that rounds at each look would differ."""
    whole = make_update(name, options, rate, ema=ema)
    take_steps(whole, range(6), rate)
    for stop in range(6):
        first = make_update(name, options, rate, ema=ema)
        take_steps(first, range(stop), rate)
        masters, averaged, tensors, skeleton = saved(first)
        again = make_update(name, options, rate, ema=ema)
        with torch.no_grad():
            for key, master in again.masters.items():
                master.copy_(masters[key])
        again.load_state_(tensors, skeleton, averaged)
        take_steps(again, range(stop, 6), rate)
        assert all(same(*pair) for pair in zip(saved(again), saved(whole), strict=True))


def test_every_optimizer_is_resumed_here() -> None:
    """So that a new file cannot be forgotten."""
    assert {name for name, _, _ in CASES} == set(OPTIMIZERS.names())


@pytest.mark.parametrize(("name", "options", "rate"), CASES, ids=str)
def test_state_is_as_large_as_the_plug_in_says(
    name: str, options: dict[str, Any], rate: float
) -> None:
    """Plans count by it. Alignment and a handful of numbers come on top."""
    parameters = {"a": nn.Parameter(torch.randn(1 << 16))}
    settings = OptimizerSettings(rate, (0.9, 0.99), 1e-8, 0.0)
    update = Update(parameters, {"a": parameters["a"].detach()}, name, settings, options)
    parameters["a"].grad = torch.ones(1 << 16)
    update.collect_()
    update.step_(rate)
    tensors, _ = update.state()
    measured = sum(one.nbytes for one in tensors.values())
    stated = make_optimizer(name, options).state_bytes(1 << 16)
    # bitsandbytes keeps its two maps of 256 fp32 values beside the moments
    assert stated <= measured <= stated + 2 * 256 * 4 + 64


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("slice_p", [1])
def test_prodigy_over_a_flat_tensor_is_prodigy_over_many(slice_p: int, decay: float) -> None:
    """Its estimate is one number for all tensors; sums in another order differ by rounding."""
    from prodigyopt import Prodigy

    update = make_update("prodigy", {"slice_p": slice_p}, 1.0, decay=decay)
    many = {name: nn.Parameter(one.clone()) for name, one in initial_values().items()}
    library = Prodigy(
        list(many.values()), lr=1.0, betas=(0.9, 0.99), weight_decay=decay, slice_p=slice_p
    )
    for step in range(40):
        take_steps(update, range(step, step + 1), 1.0)
        for name, noise in gradients(step).items():
            many[name].grad = (many[name] - 1).detach() + 0.1 * noise
        library.param_groups[0]["lr"] = min(1.0, (step + 1) / 3)
        library.step()
    ours = update.optimizer.param_groups[0]
    assert ours["d"] > 100 * ours["d0"], "the estimate has moved, else this shows nothing"
    assert ours["d"] == pytest.approx(library.param_groups[0]["d"], rel=1e-4)
    for name, one in many.items():
        torch.testing.assert_close(update.masters[name], one.detach(), rtol=1e-3, atol=1e-5)


def test_schedulefree_shows_what_the_librarys_evaluation_mode_would_be() -> None:
    """And its own gradient is taken elsewhere, at y."""
    from schedulefree import AdamWScheduleFree

    update = make_update("schedulefree", {}, 1e-2)
    many = {name: nn.Parameter(one.clone()) for name, one in initial_values().items()}
    library = AdamWScheduleFree(
        list(many.values()), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01, warmup_steps=3
    )
    library.train()
    for step in range(10):
        take_steps(update, range(step, step + 1), 1e-2)
        for name, noise in gradients(step).items():
            many[name].grad = (many[name] - 1).detach() + 0.1 * noise
        library.step()
    for name, one in many.items():
        torch.testing.assert_close(update.masters[name], one.detach(), rtol=1e-5, atol=1e-6)
    library.eval()
    averaged = update.averaged()
    assert averaged is not None
    for name, one in many.items():
        torch.testing.assert_close(averaged[name], one.detach(), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(averaged[name], update.masters[name], atol=1e-4)


def test_the_moving_average_is_that_of_diffusers() -> None:
    from diffusers.training_utils import EMAModel

    parameters = [nn.Parameter(torch.zeros(4))]
    theirs = EMAModel(parameters, decay=0.95)
    ours = Average(parameters[0].detach(), 0.95)
    for step in range(60):
        with torch.no_grad():
            parameters[0] += math.sin(step)
        theirs.step(parameters)
        ours.follow_(parameters[0].detach())
    torch.testing.assert_close(ours.values, theirs.shadow_params[0], rtol=1e-6, atol=1e-6)
    assert decay_of(59, 0.95) == theirs.get_decay(60) == 60 / 69


@pytest.mark.parametrize("which", ["adamw", "schedulefree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_looking_at_the_average_changes_no_bit(which: str, dtype: torch.dtype) -> None:
    """Previews and evaluations happen between steps of a training that must not notice."""
    initial = initial_values()
    parameters = {key: nn.Parameter(one.to(dtype)) for key, one in initial.items()}
    settings = OptimizerSettings(1e-2, (0.9, 0.99), 1e-8, 0.01)
    ema = 0.9 if which == "adamw" else None
    update = Update(parameters, initial, which, settings, None, ema)
    take_steps_in(update, dtype)
    before = {name: one.detach().clone() for name, one in update.parameters.items()}
    masters = {name: one.detach().clone() for name, one in update.masters.items()}
    averaged = update.averaged()
    assert averaged is not None
    averaged = {name: one.clone() for name, one in averaged.items()}
    with update.shown("averaged"):
        for name, one in update.parameters.items():
            assert torch.equal(one, averaged[name].to(dtype))
            assert not torch.equal(one, before[name])
    with update.shown("raw"):
        assert all(torch.equal(one, before[name]) for name, one in update.parameters.items())
    assert all(torch.equal(one, before[name]) for name, one in update.parameters.items())
    assert all(torch.equal(one, masters[name]) for name, one in update.masters.items())
    take_steps_in(update, dtype)
    for name, one in update.parameters.items():  # they still are their masters, not copies of them
        assert torch.equal(one, update.masters[name].to(dtype))


def take_steps_in(update: Update, dtype: torch.dtype) -> None:
    for step in range(4):
        for name, noise in gradients(step).items():
            update.parameters[name].grad = noise.to(dtype)
        update.collect_()
        update.step_(1e-2)


def test_tensors_that_compute_in_fp32_are_their_masters_beside_others_that_are_rounded() -> None:
    """DoRA's lengths beside matrices in bf16."""
    initial = {"m": torch.randn(9), "w": torch.randn(4, 4)}
    parameters = {
        "m": nn.Parameter(initial["m"].clone()),
        "w": nn.Parameter(initial["w"].bfloat16()),
    }
    settings = OptimizerSettings(1e-3, (0.9, 0.99), 1e-8, 0.0)
    update = Update(parameters, initial, "adamw", settings)
    parameters["m"].grad, parameters["w"].grad = torch.ones(9), torch.ones(4, 4).bfloat16()
    update.collect_()
    update.step_(1e-3)
    assert torch.equal(parameters["m"], update.masters["m"])
    assert torch.equal(parameters["w"], update.masters["w"].bfloat16())
    torch.testing.assert_close(parameters["m"].detach(), initial["m"] - 1e-3, rtol=0, atol=1e-6)


# --- step sizes ----------------------------------------------------------------------------------


def settings_of(schedule: Any, *, warmup: int = 0, floor: float = 0.0) -> LoopSettings:
    return LoopSettings(100, 1, 2.0, schedule, floor, warmup, None, 10, 1)


@pytest.mark.parametrize("warmup", [0, 9])
def test_schedules_are_those_of_transformers(warmup: int) -> None:
    """Its lambdas for cosine and linear, times our warm-up, which begins above 0 and does not stretch the fall."""
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    makers = {"cosine": get_cosine_schedule_with_warmup, "linear": get_linear_schedule_with_warmup}
    for name, make in makers.items():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
        scheduler = make(optimizer, num_warmup_steps=0, num_training_steps=100)
        for step in range(100):
            warm = min(1.0, (step + 1) / (warmup + 1))
            expected = warm * scheduler.get_last_lr()[0]
            assert settings_of(name, warmup=warmup).rate_at(step) == pytest.approx(
                expected, abs=1e-12
            )
            optimizer.step()
            scheduler.step()


def test_a_falling_schedule_stops_at_its_floor() -> None:
    for name in ("cosine", "linear"):
        rates = [settings_of(name, floor=0.25).rate_at(step) for step in range(100)]
        assert rates[0] == 2.0
        assert rates[-1] == 0.5
        assert sorted(rates, reverse=True) == rates


# --- what does not go together -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"optimizer": "prodigy"}, r"train.learning_rate: is a factor on the step size that prodigy finds.*0.0001; set it to 1.0"),
        ({"optimizer": "schedulefree", "schedule": "cosine"}, "train.schedule: must be constant with schedulefree"),
        ({"optimizer": "schedulefree", "ema": 0.99}, "train.ema: must be null with schedulefree, which averages"),
        ({"optimizer": "schedulefree", "betas": [0.0, 0.99]}, "train.betas: must begin with a number above 0"),
        ({"optimizer_options": {"d_coef": 2.0}}, "train.optimizer_options: optimizer 'adamw': no option is called 'd_coef'"),
        ({"optimizer": "prodigy", "learning_rate": 1.0, "optimizer_options": {"d_coeff": 2.0}}, "did you mean 'd_coef'"),
        ({"optimizer": "prodigy", "learning_rate": 1.0, "optimizer_options": {"slice_p": 0}}, "slice_p must be positive"),
        ({"optimizer": "prodigy", "learning_rate": 1.0, "optimizer_options": {"growth_rate": 0.5}}, "growth_rate must be more than 1"),
        ({"optimizer": "prodgy"}, "did you mean 'prodigy'"),
    ],
)  # fmt: skip
def test_what_an_optimizer_cannot_work_with_is_said_before_anything_runs(
    train: dict[str, Any], message: str
) -> None:
    from outsize.recipes.load import recipe_from_json

    recipe = recipe_from_json(
        {
            "name": "x",
            "base": {"family": "flux2", "variant": "tiny", "source": "nowhere"},
            "data": {"sets": [{"folder": "pictures"}]},
            "train": train,
        },
        origin="recipe",
    )
    with pytest.raises(RecipeError, match=message):
        check_names(recipe)


@pytest.mark.parametrize(("name", "module"), [("prodigy", "prodigyopt"), ("schedulefree", "schedulefree")])  # fmt: skip
def test_a_missing_library_is_named_with_how_to_get_it(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    settings = OptimizerSettings(1.0, (0.9, 0.99), 1e-8, 0.0)
    told = rf"pip install {module}, or pip install 'outsize\[optim"
    with pytest.raises(MachineFault, match=told):
        make_optimizer(name)([nn.Parameter(torch.zeros(1))], settings)
    with pytest.raises(MachineFault, match=told):  # asked before anything is prepared
        require_optimizer(name)
    require_optimizer("adamw")


def test_prodigy_says_nothing_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The library prints how weights decay; a command's output is ours."""
    make_update("prodigy", {}, 1.0)
    assert capsys.readouterr().out == ""
