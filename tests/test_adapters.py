"""Adapters: initialised by seed and name, loaded strictly, and refused when they do nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from outsize.adapters.adapter import Adapter, AdapterShape, delta_norms
from outsize.adapters.health import WATCHED_UPDATES, HealthWatch, require_delta, require_finite
from outsize.base.errors import AdapterError, NotFinite
from outsize.base.table import ShapeTable, TensorSpec

TABLE = ShapeTable(
    tuple(
        TensorSpec(f"blocks.{i}.{name}.weight", (8, 6), role, block=i, is_linear=True)
        for i in range(2)
        for name, role in (("to_q", "attention"), ("up", "mlp"))
    )
)


def _module() -> nn.Module:
    block = lambda: nn.ModuleDict({"to_q": nn.Linear(6, 8), "up": nn.Linear(6, 8)})  # noqa: E731
    return nn.ModuleDict({"blocks": nn.ModuleList([block(), block()])})


def _adapter(
    roles: tuple[str, ...] = ("attention", "mlp"), seed: int = 1
) -> tuple[Adapter, dict[str, Tensor]]:
    adapter = Adapter(_module(), TABLE, AdapterShape(4, 8.0, roles))
    return adapter, adapter.materialise_(
        seed=seed, device=torch.device("cpu"), dtype=torch.bfloat16
    )


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    """Not on what else is adapted: then a resumed or differently placed run begins alike."""
    _, all_roles = _adapter()
    _, some = _adapter(("mlp",))
    _, other_seed = _adapter(seed=2)
    for name, value in some.items():
        assert torch.equal(value, all_roles[name])
    name = "blocks.0.to_q.lora_A"
    assert not torch.equal(all_roles[name], other_seed[name])
    assert not torch.equal(all_roles[name], all_roles["blocks.1.to_q.lora_A"])


def test_a_is_uniform_within_pefts_bound_and_unrounded_and_b_is_zero() -> None:
    adapter, initial = _adapter()
    a, b = initial["blocks.0.up.lora_A"], initial["blocks.0.up.lora_B"]
    assert a.dtype == torch.float32
    assert a.abs().max() <= 6**-0.5
    assert not b.any()
    computing = adapter.parameters()["blocks.0.up.lora_A"]
    assert torch.equal(computing, a.bfloat16())
    assert not torch.equal(computing.float(), a), "the masters keep what bf16 drops"


def test_only_the_roles_asked_for_are_adapted_and_none_is_an_error() -> None:
    adapter, _ = _adapter(("attention",))
    assert adapter.paths == ("blocks.0.to_q", "blocks.1.to_q")
    assert adapter.num_parameters == 2 * 4 * (6 + 8)
    with pytest.raises(AdapterError, match=r"roles modulation; this family has attention, mlp"):
        _adapter(("modulation",))


def test_values_that_do_not_fit_are_all_named() -> None:
    adapter, initial = _adapter()
    wrong = dict(initial)
    wrong.pop("blocks.0.up.lora_B")
    wrong["blocks.9.up.lora_A"] = torch.zeros(1)
    wrong["blocks.1.up.lora_A"] = torch.zeros(3, 3)
    with pytest.raises(AdapterError) as caught:
        adapter.load_(wrong)
    for part in (
        "missing blocks.0.up.lora_B",
        "unknown blocks.9.up.lora_A",
        "blocks.1.up.lora_A is (3, 3)",
    ):
        assert part in str(caught.value)


def test_delta_norms_equal_the_norm_of_the_whole_product() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        "m.lora_A": torch.randn(4, 30, generator=generator),
        "m.lora_B": torch.randn(20, 4, generator=generator),
    }
    expected = 0.5 * (values["m.lora_B"].double() @ values["m.lora_A"].double()).norm().item()
    assert delta_norms(values, {"m": 0.5})["m"] == pytest.approx(expected, rel=1e-12)


def test_a_tensor_that_never_gets_a_gradient_is_named_after_the_watched_updates() -> None:
    watch, one = HealthWatch(), torch.ones(2)
    for update in range(WATCHED_UPDATES):
        # at the first update A's gradient is zero by construction, since B is zero
        a = torch.zeros(2) if update == 0 else one
        silent = watch.look({"a": a, "b": one, "dead": torch.zeros(2)})
        assert silent == (["dead"] if update == WATCHED_UPDATES - 1 else [])
    assert watch.look({"a": None}) == [], "later it costs nothing"


def test_an_adapter_outside_the_graph_or_without_any_gradient_is_refused() -> None:
    with pytest.raises(AdapterError, match="no gradient reaches 1 of 2 adapter tensors, lost"):
        HealthWatch().look({"lost": None, "b": torch.ones(2)})
    watch = HealthWatch()
    for _ in range(WATCHED_UPDATES - 1):
        assert watch.look({"a": torch.zeros(2)}) == []
    with pytest.raises(AdapterError, match="every adapter gradient was zero"):
        watch.look({"a": torch.zeros(2)})


def test_a_delta_that_stays_zero_is_refused_and_one_that_partly_does_is_named() -> None:
    assert require_delta({"x": 1.0, "y": 0.0}) == ["y"]
    with pytest.raises(AdapterError, match="delta of all 2 adapted modules is still zero"):
        require_delta({"x": 0.0, "y": 0.0})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_or_gradient_that_is_no_number_names_the_tensor_and_the_pictures(bad: float) -> None:
    grads = {"good": torch.ones(2), "broken": torch.tensor([1.0, bad])}
    pictures = lambda step: [f"{step}.png"]  # noqa: E731
    with pytest.raises(NotFinite, match=r"first broken; .*3\.png"):
        require_finite(0.5, bad, grads, 3, pictures)
    with pytest.raises(NotFinite, match=rf"the loss of step 3 is {bad}.*3\.png"):
        require_finite(bad, 1.0, grads, 3, pictures)
    require_finite(0.5, 1.0, grads, 3, pictures)
