"""The engine against upstream: same outputs, same gradients, whatever format and placement."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import FORMATS, TinyBase, make_tiny, tiny_inputs
from torch import nn

from outsize.adapters.adapter import Adapter, AdapterShape

FAMILY_NAMES = ("flux1", "flux2")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], TinyBase]:
    root = tmp_path_factory.mktemp("bases")
    return {
        (family, number): make_tiny(root / f"{family}{number}", family, fmt)
        for family in FAMILY_NAMES
        for number, fmt in enumerate(FORMATS)
    }


CASES = [(family, number) for family in FAMILY_NAMES for number in range(len(FORMATS))]


def _predict(base: TinyBase, module: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return base.family.predict(base.variant, module, **inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_forward_equals_upstream_on_the_same_decoded_weights(
    bases: dict[tuple[str, int], TinyBase], case: tuple[str, int], placement: str
) -> None:
    base = bases[case]
    inputs = tiny_inputs(base)
    model = base.open(placement)
    with torch.no_grad():
        model.begin("forward")
        ours = _predict(base, model.module, inputs)
        theirs = _predict(base, base.upstream(), inputs)
    assert torch.equal(ours, theirs)


def _attach(base: TinyBase, module: nn.Module, rank: int = 4) -> Adapter:
    table = base.family.table(base.variant)
    adapter = Adapter(module, table, AdapterShape(rank, 8.0, ("attention", "mlp")))
    adapter.materialise_(seed=3, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, one in adapter.parameters().items():
            if name.endswith("lora_B"):  # away from zero, so that A gets a gradient as well
                one.copy_(torch.randn(one.shape, generator=generator) * 0.02)
    return adapter


@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapter_gradients_equal_those_of_plain_diffusers_and_peft(
    bases: dict[tuple[str, int], TinyBase], case: tuple[str, int]
) -> None:
    """Recompute under one acquisition changes when things are computed, never what."""
    base = bases[case]
    inputs = tiny_inputs(base)
    target = torch.randn(inputs["noisy_BCHW"].shape, generator=torch.Generator().manual_seed(5))
    model, plain = base.open("stream"), base.upstream()
    ours, theirs = _attach(base, model.module), _attach(base, plain)
    losses = []
    for module, begin in ((model.module, lambda: model.begin("train")), (plain, lambda: None)):
        begin()
        loss = (_predict(base, module, inputs) - target).float().pow(2).mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, one in theirs.parameters().items():
        got = ours.parameters()[name].grad
        assert got is not None, name
        assert one.grad is not None, name
        difference = (got - one.grad).norm() / one.grad.norm()
        assert difference < 1e-5, f"{name} differs by {difference}"


def test_a_disabled_adapter_is_the_base_exactly(bases: dict[tuple[str, int], TinyBase]) -> None:
    base = bases["flux2", 0]
    inputs = tiny_inputs(base)
    model = base.open("resident")
    with torch.no_grad():
        before = _predict(base, model.module, inputs)
        adapter = _attach(base, model.module)
        changed = _predict(base, model.module, inputs)
        with adapter.disabled():
            after = _predict(base, model.module, inputs)
    assert not torch.equal(before, changed)
    assert torch.equal(before, after)


def test_weights_overwritten_before_backward_are_noticed(
    bases: dict[tuple[str, int], TinyBase],
) -> None:
    """A slot that is filled again too early must stop the run, not give another block's gradient."""
    from outsize.layers.frozen import FrozenLinear

    base = bases["flux2", 0]
    model = base.open("resident")
    block = model.module.get_submodule(base.family.block_paths(base.variant)[0])
    linear = next(one for one in block.modules() if isinstance(one, FrozenLinear))
    model.acquire(0)
    x = torch.randn(3, linear.in_features, requires_grad=True)
    y = linear(x).sum()
    model.placement.acquire(0).fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    model.release(0)


def test_a_linear_cannot_run_outside_its_block(bases: dict[tuple[str, int], TinyBase]) -> None:
    from outsize.layers.frozen import FrozenLinear

    model = bases["flux2", 0].open("resident")
    linear = next(one for one in model.module.modules() if isinstance(one, FrozenLinear))
    with pytest.raises(AssertionError, match="only while its block is acquired"):
        linear(torch.randn(2, linear.in_features))


def test_a_closed_model_holds_no_weight_whoever_still_knows_it(tmp_path: Path) -> None:
    """A variable that outlives its `with` block kept a text encoder's token table on the card beside the base."""
    base = make_tiny(tmp_path, "flux2", ("nf4", {}))
    model = base.open("resident")
    held = [weakref.ref(one) for one in model.module.parameters() if not one.is_meta]
    held += [weakref.ref(one) for one in model.module.buffers() if not one.is_meta]
    assert held
    model.close()
    assert [one for one in held if one() is not None] == []
