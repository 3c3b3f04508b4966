"""Compiled blocks: whole graphs, as few as there are ways to run, and the gradients of blocks that are not compiled.

Graphs are captured as always, and differentiated ahead of time where that is asked ("aot_eager"), but run operation by
operation: what the last stage makes of them needs a card, or a compiler for C++ and minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.config
from adapted_support import attach, loss_of
from engine_support import TinyBase, make_tiny, tiny_inputs
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from outsize.arithmetic.protocol import ARITHMETICS, Arithmetic
from outsize.formats.protocol import make_format
from outsize.layers.block import wrap_block
from outsize.layers.compiled import Transform, block_compiler
from outsize.layers.frozen import FrozenLinear
from outsize.layers.model import FrozenModel

WAYS = 2  # of running a block: upwards without a graph, downwards with one
# the compiler itself looks at a block's inputs, which are no leaves (torch 2.13)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _compiler_is_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a compiler sets for the whole process ends with the test."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    settings = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    before = {name: getattr(torch._dynamo.config, name) for name in settings}
    torch.compiler.reset()
    with torch._dynamo.config.patch(before):
        yield
    torch.compiler.reset()


class Mlp(nn.Module):
    """A block of two frozen linears with something between."""

    def __init__(self, arithmetic: Arithmetic, seed: int) -> None:
        super().__init__()
        fmt = make_format("plain")
        self.up, self.down = (
            FrozenLinear(
                *sizes, has_bias=True, fmt=fmt, compute=torch.float32, arithmetic=arithmetic
            )
            for sizes in ((32, 64), (64, 32))
        )
        generator = torch.Generator().manual_seed(seed)
        self.values: list[tuple[FrozenLinear, Tensor]] = []
        for layer in (self.up, self.down):
            size = (layer.out_features, layer.in_features)
            self.values.append((layer, torch.randn(size, generator=generator).bfloat16()))
            bias = torch.randn(layer.out_features, generator=generator)
            layer.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * self.down(nn.functional.gelu(self.up(x)))


class Blocks:
    """Binds a block's weights while it runs, as a model does."""

    def __init__(self, arithmetic: Arithmetic, transform: Transform | None) -> None:
        self.blocks = [Mlp(arithmetic, seed) for seed in range(3)]
        for number, block in enumerate(self.blocks):
            wrap_block(block, number, self, recomputes=True, transform=transform)

    def acquire(self, block: int) -> None:
        for layer, value in self.blocks[block].values:
            layer.bind(dict.fromkeys(layer.part_names, value))

    def release(self, block: int) -> None:
        for layer, _ in self.blocks[block].values:
            layer.bind(None)

    def gradient(self, tokens: int) -> Tensor:
        x = torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(tokens))
        y = x.requires_grad_()
        for block in self.blocks:
            y = block(y, scale=0.5)
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad


@pytest.mark.parametrize("name", ARITHMETICS.names())
def test_blocks_of_a_kind_share_their_graphs_whatever_the_size(name: str, tmp_path: Path) -> None:
    """The number of tokens is a variable from the first graph on, so no order of sizes leads to other graphs.

    Else a resumed run, whose first size may be another, would compute with other code than an unbroken one.
    """
    arithmetic = ARITHMETICS.load(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiler = block_compiler(tmp_path, is_one_size=False, backend=counter)
    compiled, eager = Blocks(arithmetic, compiler), Blocks(arithmetic, None)
    for tokens in (24, 48, 6):
        found, wanted = compiled.gradient(tokens), eager.gradient(tokens)
        assert (found - wanted).norm() / wanted.norm() < 1e-5
        assert counter.frame_count == WAYS


def test_a_single_size_is_compiled_as_a_constant(tmp_path: Path) -> None:
    """Faster code; another size would then be another graph."""
    counter = CompileCounterWithBackend("eager")
    compiler = block_compiler(tmp_path, is_one_size=True, backend=counter)
    blocks = Blocks(ARITHMETICS.load("bf16"), compiler)
    blocks.gradient(24)
    assert counter.frame_count == WAYS
    inputs = (node for graph in counter.graphs for node in graph.graph.nodes)
    sizes = {size for node in inputs if node.op == "placeholder" for size in _sizes(node)}
    assert all(isinstance(size, int) for size in sizes)
    assert 24 in sizes


def _sizes(node: torch.fx.Node) -> tuple[object, ...]:
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def test_too_many_graphs_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running uncompiled from then on would be another run than was planned, and slow without a word."""
    monkeypatch.setattr("outsize.layers.compiled._MAX_GRAPHS", 3)
    compiler = block_compiler(tmp_path, is_one_size=True, backend="eager")
    blocks = Blocks(ARITHMETICS.load("bf16"), compiler)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        list(map(blocks.gradient, range(8, 20)))


def test_a_block_that_breaks_its_graph_is_an_error(tmp_path: Path) -> None:
    class Breaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x + 1

    block = Breaking()
    block.forward = block_compiler(tmp_path, is_one_size=True, backend="eager")(block.forward)  # type: ignore[method-assign]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        block(torch.zeros(2))


# --- a whole base ----------------------------------------------------------------------------------


def gradients(
    base: TinyBase, model: FrozenModel, sizes: list[tuple[int, int]]
) -> Iterator[dict[str, Tensor]]:
    """Of the adapter, in a step for each size of the latent."""
    adapter = attach(base, model)
    for size in sizes:
        inputs = tiny_inputs(base)
        generator = torch.Generator().manual_seed(sum(size))
        shape = (*inputs["noisy_BCHW"].shape[:2], *size)
        inputs["noisy_BCHW"] = torch.randn(shape, generator=generator)
        loss_of(base, model, inputs).backward()
        step = {}
        for name, one in adapter.parameters().items():
            assert one.grad is not None
            step[name], one.grad = one.grad, None
        yield step


@pytest.mark.slow  # upstream's blocks take half a minute to capture
@pytest.mark.parametrize("name", ARITHMETICS.names())
def test_compiled_gradients_are_those_of_eager_blocks(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Upstream's blocks under PEFT: they capture whole, and no size of picture adds a graph to the first one's."""
    base = make_tiny(tmp_path_factory.mktemp("base"), "flux2", ("nf4", {}), variant="tiny@2+1")
    sizes, arithmetic = [(4, 6), (6, 8), (2, 6)], ARITHMETICS.load(name)
    wanted = list(gradients(base, base.open("stream", arithmetic=arithmetic), sizes))
    counter = CompileCounterWithBackend("aot_eager")
    compiler = block_compiler(tmp_path, is_one_size=False, backend=counter)
    model = base.open("stream", arithmetic=arithmetic, transform=compiler)
    counts = []
    for found, one in itertools.zip_longest(gradients(base, model, sizes), wanted):
        for key, right in one.items():
            difference = (found[key] - right).norm() / right.norm()
            assert difference < 1e-5, f"{key} differs by {difference}"
        counts.append(counter.frame_count)
    assert counts == counts[:1] * len(sizes)
