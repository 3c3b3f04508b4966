"""From rounded gradients to fp32 masters and back, as on a card, where adapters compute in bf16."""

import pytest
import torch
from torch import nn

from outsize.train.optimizers.protocol import OptimizerSettings
from outsize.train.update import Update

NAMES = ("a", "b", "c")


@pytest.fixture
def update() -> Update:
    generator = torch.Generator().manual_seed(0)
    initial = {name: torch.randn(5, 7, generator=generator) for name in NAMES}
    parameters = {name: nn.Parameter(one.bfloat16()) for name, one in initial.items()}
    settings = OptimizerSettings(1e-2, (0.9, 0.99), 1e-8, 0.0)
    return Update(parameters, initial, "adamw", settings)


def give_gradients(update: Update, *, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grads = {name: torch.randn(5, 7, generator=generator).bfloat16() for name in NAMES}
    for name, one in grads.items():
        update.parameters[name].grad = one.clone()
    return grads


def test_micro_batches_add_up_in_fp32(update: Update) -> None:
    """A sum in bf16 would lose what small gradients add."""
    first = give_gradients(update, seed=1)
    update.collect_()
    second = give_gradients(update, seed=2)
    update.collect_()
    for name in NAMES:
        grad = update.grads()[name]
        assert grad is not None
        assert grad.dtype == torch.float32
        assert torch.equal(grad, first[name].float() + second[name].float())
        assert update.parameters[name].grad is None


def test_a_parameter_without_a_gradient_leaves_its_master_without_one(update: Update) -> None:
    """So that the health watch can say which tensors the graph does not reach."""
    give_gradients(update, seed=1)
    update.parameters["b"].grad = None
    update.collect_()
    assert update.grads()["b"] is None
    assert update.grads()["c"] is not None


def test_parameters_are_their_masters_rounded(update: Update) -> None:
    """What computes and what is saved must not drift apart."""
    before = {name: one.detach().clone() for name, one in update.masters.items()}
    give_gradients(update, seed=3)
    update.collect_()
    update.step_(1e-2)
    for name in NAMES:
        assert not torch.equal(update.masters[name], before[name])
        assert torch.equal(update.parameters[name], update.masters[name].bfloat16())
