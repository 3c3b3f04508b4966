"""A whole base in every arithmetic: it trains as in the compute type, and nothing but its frozen products differs."""

from __future__ import annotations

import math

import pytest
import torch
from adapted_support import attach, loss_of
from engine_support import TinyBase, make_tiny, tiny_inputs

from outsize.adapters.health import require_finite
from outsize.arithmetic.protocol import ARITHMETICS, Arithmetic
from outsize.base.errors import NotFinite
from outsize.layers.frozen import FrozenLinear
from outsize.layers.model import FrozenModel

NAMES = ARITHMETICS.names()


def load(name: str) -> Arithmetic:
    found: Arithmetic = ARITHMETICS.load(name)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("base"), "flux2", ("nf4", {"group": 64}))


def losses_of_training(base: TinyBase, model: FrozenModel, num_steps: int) -> list[float]:
    parameters = list(attach(base, model).parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    inputs, losses = tiny_inputs(base), []
    for _ in range(num_steps):
        loss = loss_of(base, model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_a_base_trains_in_it_as_in_the_compute_type(name: str, base: TinyBase) -> None:
    """The loss falls along the same curve: apart by a twentieth of what was learnt, at every step."""
    found = losses_of_training(base, base.open("stream", arithmetic=load(name)), 6)
    wanted = losses_of_training(base, base.open("stream"), 6)
    learnt = wanted[0] - wanted[-1]
    assert learnt > 0.01 * wanted[0]
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < learnt / 20


@pytest.mark.parametrize("name", NAMES)
def test_adapter_and_norms_are_left_alone(name: str, base: TinyBase) -> None:
    """Only products with frozen matrices change their type; nothing else is any different."""
    plain, model = base.open("resident"), base.open("resident", arithmetic=load(name))
    attach(base, plain)
    adapter = attach(base, model)
    kinds = {key: (one.dtype, one.shape) for key, one in model.module.named_parameters()}
    assert kinds == {key: (one.dtype, one.shape) for key, one in plain.module.named_parameters()}
    loss_of(base, model, tiny_inputs(base)).backward()
    for one in adapter.parameters().values():
        assert one.grad is not None
        assert one.grad.dtype == torch.float32
    used = {type(one.arithmetic) for one in model.module.modules() if isinstance(one, FrozenLinear)}
    assert used == {type(load(name))}


@pytest.mark.parametrize("name", NAMES)
def test_a_spoiled_activation_stops_the_training(name: str, base: TinyBase) -> None:
    """It must reach the loss as what it is, where the loop refuses it; not be clipped to the largest of few bits."""
    model = base.open("stream", arithmetic=load(name))
    adapter = attach(base, model)
    inputs = tiny_inputs(base)
    inputs["conditions"]["text"][0, 3, 5] = math.inf
    loss = loss_of(base, model, inputs)
    assert not loss.isfinite()
    with pytest.raises(NotFinite):
        require_finite(loss.item(), 1.0, adapter.parameters(), 0, lambda _: ["a.png"])


@pytest.mark.parametrize("name", NAMES)
def test_streamed_equals_resident_bit_for_bit(name: str, base: TinyBase) -> None:
    """Placement changes no number in any arithmetic."""
    results = []
    for placement in ("resident", "stream"):
        model = base.open(placement, arithmetic=load(name))
        adapter = attach(base, model)
        loss_of(base, model, tiny_inputs(base)).backward()
        results.append({key: one.grad for key, one in adapter.parameters().items()})
    for key, one in results[0].items():
        assert one is not None
        assert torch.equal(one, results[1][key]), key
