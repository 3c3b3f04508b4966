"""DoRA, rsLoRA and ranks by rule: the same numbers and gradients as PEFT's own over plain linears."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from engine_support import TinyBase, make_tiny, tiny_inputs
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from outsize.adapters.adapter import Adapter, AdapterShape
from outsize.app.attached import adapter_shape
from outsize.base.errors import RecipeError
from outsize.base.table import ShapeTable, TensorSpec
from outsize.layers.compiled import BlockCompiler
from outsize.layers.model import FrozenModel
from outsize.recipes.adapter import AdapterChoice, RankRule

ROLES = ("attention", "mlp")
RULED = AdapterChoice(
    rank=4, alpha=8.0, ranks=(RankRule(roles=("mlp",), rank=2), RankRule(match="*to_q", rank=3, alpha=5.0))
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("dora"), "flux2", ("nf4", {"group": 64}))


def shape_of(base: TinyBase, choice: AdapterChoice) -> AdapterShape:
    return adapter_shape(choice, base.family.table(base.variant))


def moved_values(initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """Away from where training begins: B from zero, lengths from those of W."""
    generator = torch.Generator().manual_seed(11)
    drawn = {}
    for name, one in initial.items():
        noise = torch.randn(one.shape, generator=generator)
        kind = name.rpartition(".")[2]
        drawn[name] = {
            "lora_A": one,
            "lora_B": 0.05 * noise,
            "magnitude": one * (1 + 0.1 * noise),
        }[kind]
    return drawn


def ours(base: TinyBase, model: FrozenModel, choice: AdapterChoice) -> Adapter:
    adapter = Adapter(model.module, base.family.table(base.variant), shape_of(base, choice))
    initial = adapter.materialise_(
        seed=3,
        device=torch.device("cpu"),
        dtype=torch.float32,
        row_squares=model.row_squares(adapter.paths) if adapter.needs_row_squares else None,
    )
    adapter.load_(moved_values(initial))
    return adapter


def theirs(plain: nn.Module, adapter: Adapter, choice: AdapterChoice) -> dict[str, nn.Parameter]:
    """PEFT's own adapter on the decoded weights, given our values; its parameters by our names."""
    ranks = {path: adapter.shape.of(path) for path in adapter.paths}
    config = LoraConfig(
        r=choice.rank,
        lora_alpha=choice.effective_alpha,
        target_modules=list(adapter.paths),
        rank_pattern={path: rank for path, (rank, _) in ranks.items()},
        alpha_pattern={path: alpha for path, (_, alpha) in ranks.items()},
        use_dora=choice.kind == "dora",
        use_rslora=choice.scaling == "sqrt_rank",
    )
    inject_adapter_in_model(config, plain)
    named: dict[str, nn.Parameter] = {}
    for path in adapter.paths:
        layer: Any = plain.get_submodule(path)
        named[f"{path}.lora_A"] = layer.lora_A["default"].weight
        named[f"{path}.lora_B"] = layer.lora_B["default"].weight
        if choice.kind == "dora":
            named[f"{path}.magnitude"] = layer.lora_magnitude_vector["default"].weight
    values = adapter.parameters()
    assert named.keys() == values.keys()
    with torch.no_grad():
        for name, one in named.items():
            one.copy_(values[name])
    return named


def loss_of(base: TinyBase, module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    target = torch.randn(inputs["noisy_BCHW"].shape, generator=torch.Generator().manual_seed(5))
    predicted: Tensor = base.family.predict(base.variant, module, **inputs)
    return (predicted - target).square().mean()


@pytest.mark.parametrize("ruled", [False, True], ids=["one rank", "ranks"])
@pytest.mark.parametrize("scaling", ["rank", "sqrt_rank"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_loss_and_gradients_equal_pefts_over_the_decoded_weights(
    base: TinyBase,
    kind: Literal["lora", "dora"],
    scaling: Literal["rank", "sqrt_rank"],
    *,
    ruled: bool,
) -> None:
    """fp32 on both sides; the lengths are summed in another order, hence 1e-5."""
    start = RULED if ruled else AdapterChoice(rank=4, alpha=8.0)
    choice = start.model_copy(update={"kind": kind, "scaling": scaling})
    model, plain, inputs = base.open("stream"), base.upstream(), tiny_inputs(base)
    adapter = ours(base, model, choice)
    reference = theirs(plain, adapter, choice)
    model.begin("train")
    loss = loss_of(base, model.module, inputs)
    loss.backward()
    expected = loss_of(base, plain, inputs)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, one in adapter.parameters().items():
        wanted = reference[name].grad
        assert one.grad is not None, name
        assert wanted is not None, name
        difference = (one.grad - wanted).norm() / wanted.norm()
        assert difference < 1e-5, f"{name} differs by {difference}"
        assert adapter.scale_of(adapter.paths[0]) > 0


def test_a_fresh_dora_adapter_is_the_base_to_the_bit_and_so_is_a_neutral_one(
    base: TinyBase,
) -> None:
    model, inputs = base.open("resident"), tiny_inputs(base)
    choice = AdapterChoice(rank=4, kind="dora")
    with torch.no_grad():
        model.begin("forward")
        before = base.family.predict(base.variant, model.module, **inputs)
        table = base.family.table(base.variant)
        adapter = Adapter(model.module, table, shape_of(base, choice))
        squares = model.row_squares(adapter.paths)
        initial = adapter.materialise_(
            seed=3, device=torch.device("cpu"), dtype=torch.float32, row_squares=squares
        )
        model.begin("forward")
        assert torch.equal(base.family.predict(base.variant, model.module, **inputs), before)
        adapter.load_(moved_values(initial))
        kept = {name: one.detach().clone() for name, one in adapter.parameters().items()}
        model.begin("forward")
        assert not torch.equal(base.family.predict(base.variant, model.module, **inputs), before)
        with adapter.neutral():
            model.begin("forward")
            assert torch.equal(base.family.predict(base.variant, model.module, **inputs), before)
    assert all(torch.equal(one, kept[name]) for name, one in adapter.parameters().items())


def test_lengths_begin_as_those_of_the_decoded_rows_and_stay_fp32_where_products_are_bf16(
    base: TinyBase,
) -> None:
    """bf16 has eight bits: most steps of a learning rate of 1e-4 would be rounded away."""
    model = base.open("stream")
    choice = AdapterChoice(rank=4, kind="dora")
    adapter = Adapter(model.module, base.family.table(base.variant), shape_of(base, choice))
    squares = model.row_squares(adapter.paths)
    initial = adapter.materialise_(
        seed=3, device=torch.device("cpu"), dtype=torch.bfloat16, row_squares=squares
    )
    decoded = base.decoded()
    for path in adapter.paths:
        expected = decoded[f"{path}.weight"].double().norm(dim=1).float()
        torch.testing.assert_close(initial[f"{path}.magnitude"], expected, rtol=1e-6, atol=0)
        assert adapter.parameters()[f"{path}.magnitude"].dtype == torch.float32
        assert adapter.parameters()[f"{path}.lora_A"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [pytest.param("lora", marks=pytest.mark.slow), "dora"])
def test_traced_blocks_give_the_bits_of_blocks_run_operation_by_operation(
    base: TinyBase, kind: Literal["lora", "dora"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are part of the graph: were they taken when it was traced, later updates would use old ones."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    compiler = BlockCompiler(tmp_path, compile_graph=lambda graph, examples: graph)  # noqa: ARG005
    choice = RULED.model_copy(update={"kind": kind})
    eager, traced = base.open("stream"), base.open("stream", make_runner=compiler)
    adapters = [ours(base, model, choice) for model in (eager, traced)]
    for step in range(2):
        losses = []
        for model in (eager, traced):
            model.begin("train")
            loss = loss_of(base, model.module, tiny_inputs(base, seed=step))
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        for name, one in adapters[0].parameters().items():
            other = adapters[1].parameters()[name]
            assert one.grad is not None, name
            assert other.grad is not None, name
            assert torch.equal(one.grad, other.grad), name
            for parameter in (one, other):  # the same update of both
                parameter.data -= 0.01 * parameter.grad
                parameter.grad = None


# --- ranks by rule -------------------------------------------------------------------------------

TABLE = ShapeTable(
    tuple(
        TensorSpec(f"blocks.{i}.{name}.weight", (8, 6), role, block=i, is_linear=True)
        for i in range(2)
        for name, role in (("attn.to_q", "attention"), ("attn.to_out", "attention"), ("up", "mlp"))
    )
)


def test_the_first_rule_that_fits_decides_and_rank_0_leaves_a_module_out() -> None:
    choice = AdapterChoice(
        rank=8,
        alpha=4.0,
        ranks=(
            RankRule(match="blocks.1.*", roles=("attention",), rank=0),
            RankRule(match="*.to_out", rank=2, alpha=3.0),
            RankRule(roles=("attention",), rank=16),
        ),
    )
    assert choice.adapted(TABLE) == {
        "blocks.0.attn.to_q": (16, 8.0),  # alpha half of the rank, as 4 is of 8
        "blocks.0.attn.to_out": (2, 3.0),
        "blocks.0.up": (8, 4.0),
        "blocks.1.up": (8, 4.0),
    }


def test_rslora_divides_by_the_root_of_the_rank() -> None:
    choice = AdapterChoice(rank=16, alpha=8.0, scaling="sqrt_rank")
    adapter = Adapter(
        nn.ModuleDict({"blocks": nn.ModuleList([_Block(), _Block()])}),
        TABLE,
        adapter_shape(choice, TABLE),
    )
    assert adapter.scale_of("blocks.0.up") == 8.0 / math.sqrt(16) == choice.scale_of(16, 8.0)


def test_a_rule_that_fits_nothing_is_named() -> None:
    """A misspelt pattern would otherwise train at another rank than was meant, in silence."""
    choice = AdapterChoice(
        ranks=(RankRule(match="*.to_q", rank=2), RankRule(match="*.to_k", rank=2))
    )
    with pytest.raises(RecipeError, match=r"adapter\.ranks\[1\] fits none of the 6 linears of the"):
        choice.adapted(TABLE)


def test_rules_that_leave_nothing_are_refused() -> None:
    choice = AdapterChoice(ranks=(RankRule(match="*", rank=0),))
    with pytest.raises(RecipeError, match="so nothing would be trained; there are attention, mlp"):
        choice.adapted(TABLE)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"to_q": nn.Linear(6, 8), "to_out": nn.Linear(6, 8)})
        self.up = nn.Linear(6, 8)


# --- in the type of cards ------------------------------------------------------------------------


def test_in_bf16_values_and_gradients_are_those_of_float64_to_bf16s_precision() -> None:
    """As on cards: W, A, B and activations in bf16, lengths in fp32. A step of 1e-4 of a length is felt."""
    generator = torch.Generator().manual_seed(2)
    table = ShapeTable((TensorSpec("up.weight", (48, 32), "mlp", block=0, is_linear=True),))
    module = nn.ModuleDict({"up": nn.Linear(32, 48)}).to(torch.bfloat16)
    weight = module["up"].weight.detach()
    adapter = Adapter(module, table, adapter_shape(AdapterChoice(rank=4, kind="dora"), table))
    squares = weight.float().norm(dim=1).square()
    initial = adapter.materialise_(
        seed=1, device=torch.device("cpu"), dtype=torch.bfloat16, row_squares={"up": squares}
    )
    adapter.load_(moved_values(initial))
    named = adapter.parameters()
    x = torch.randn(16, 32, generator=generator).bfloat16()
    layer: Any = module["up"]
    out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    down, up, lengths = (
        named[f"up.{name}"].detach().double().requires_grad_()
        for name in ("lora_A", "lora_B", "magnitude")
    )
    moved = weight.double() + up @ down
    scale = lengths / moved.detach().norm(dim=1)
    bias = layer.base_layer.bias.detach().double()
    wanted = (x.double() @ moved.T) * scale + bias
    wanted.square().sum().backward()
    assert (out.double() - wanted).norm() / wanted.norm() < 0.01
    for name, one in (("lora_A", down), ("lora_B", up), ("magnitude", lengths)):
        got = named[f"up.{name}"].grad
        assert got is not None
        assert got.dtype == named[f"up.{name}"].dtype
        assert one.grad is not None
        assert (got.double() - one.grad).norm() / one.grad.norm() < 0.02, name
    with torch.no_grad():
        before = layer(x)
        named["up.magnitude"] *= 1 + 2**-8  # half a step of bf16 at 1
        assert (layer(x) != before).float().mean() > 0.25
