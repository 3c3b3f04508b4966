"""Compiled blocks: as few graphs as there are kinds and sizes, and the bits of blocks that run operation by operation.

Graphs are traced and run as they are; what inductor makes of them needs a card, or a compiler for C++ and minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_support import attach, loss_of
from engine_support import TinyBase, make_tiny, tiny_inputs
from torch import Tensor, nn

from outsize.arithmetic.protocol import ARITHMETICS, Arithmetic
from outsize.formats import _hadamard, _int4_kernels, _nf4_kernels
from outsize.formats.protocol import Format, make_format
from outsize.layers.block import EagerRunner, wrap_block
from outsize.layers.compiled import BlockCompiler
from outsize.layers.frozen import FrozenLinear
from outsize.layers.model import FrozenModel

WAYS = 2  # of running a block: up, and down again


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlockCompiler:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(
            name, ""
        )  # what a compiler sets for the whole process ends with the test
    return BlockCompiler(tmp_path, compile_graph=lambda graph, examples: graph)  # noqa: ARG005


class Mlp(nn.Module):
    """A block of two frozen linears with something between, and a gain that learns."""

    def __init__(
        self, arithmetic: Arithmetic, seed: int, power: int, *, fmt: Format | None = None
    ) -> None:
        super().__init__()
        fmt, self.power = fmt or make_format("plain"), power
        self.up, self.down = (
            FrozenLinear(
                *sizes, has_bias=True, fmt=fmt, compute=torch.float32, arithmetic=arithmetic
            )
            for sizes in ((64, 128), (128, 64))
        )
        self.gain = nn.Parameter(torch.full((64,), 0.5))
        generator = torch.Generator().manual_seed(seed)
        self.values: list[tuple[FrozenLinear, Mapping[str, Tensor]]] = []
        for layer in (self.up, self.down):
            size = (layer.out_features, layer.in_features)
            encoder = fmt.encoder(size)
            encoder.push(torch.randn(size, generator=generator))
            self.values.append((layer, encoder.finish()))
            bias = torch.randn(layer.out_features, generator=generator)
            layer.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        hidden = nn.functional.gelu(self.up(x)).pow(self.power)
        return x + scale * self.gain * self.down(hidden)


class Blocks:
    """Binds a block's weights while it runs, as a model does."""

    def __init__(
        self,
        compiler: BlockCompiler | None,
        *,
        name: str = "bf16",
        fmt: str = "plain",
        options: Mapping[str, object] | None = None,
        powers: tuple[int, ...] = (1, 1, 1),
    ) -> None:
        arithmetic = ARITHMETICS.load(name)
        made = make_format(fmt, options)
        self.blocks = [Mlp(arithmetic, seed, power, fmt=made) for seed, power in enumerate(powers)]
        runner: Any = compiler or EagerRunner
        for number, block in enumerate(self.blocks):
            wrap_block(block, number, self, recomputes=True, make_runner=runner)

    def acquire(self, block: int) -> None:
        for layer, parts in self.blocks[block].values:
            layer.bind(parts)

    def release(self, block: int) -> None:
        for layer, _ in self.blocks[block].values:
            layer.bind(None)

    def gradients(self, tokens: int, scale: Any = 0.5) -> list[Tensor]:
        """Of the input and of every gain, the latter added to what was there."""
        x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(tokens))
        y = x.requires_grad_()
        for block in self.blocks:
            y = block(y, scale=scale)
        y.square().sum().backward()
        found = [x.grad, *(block.gain.grad for block in self.blocks)]
        assert all(one is not None for one in found)
        return [one.clone() for one in found if one is not None]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", ARITHMETICS.names())
def test_blocks_of_a_kind_share_their_graphs_and_every_size_has_its_own(
    name: str, compiler: BlockCompiler
) -> None:
    """A graph for several sizes would depend on which came first, and a resumed run differ from an unbroken one."""
    compiled, eager = Blocks(compiler, name=name), Blocks(None, name=name)
    for number, tokens in enumerate((24, 48, 24), start=1):
        assert equal(compiled.gradients(tokens), eager.gradients(tokens))
        assert compiler.num_graphs == WAYS * min(number, 2)


def test_blocks_that_differ_in_a_plain_attribute_are_of_two_kinds(compiler: BlockCompiler) -> None:
    """Python's values are baked into a graph; sharing it would compute the first block's over and over."""
    powers = (1, 2, 1)
    compiled, eager = Blocks(compiler, powers=powers), Blocks(None, powers=powers)
    assert equal(compiled.gradients(8), eager.gradients(8))
    assert compiler.num_graphs == 2 * WAYS


def test_plain_arguments_are_part_of_the_graph(compiler: BlockCompiler) -> None:
    compiled, eager = Blocks(compiler), Blocks(None)
    for scale in (0.5, 0.25):
        assert equal(compiled.gradients(8, scale), eager.gradients(8, scale))
    assert compiler.num_graphs == 2 * WAYS


def test_an_argument_that_no_graph_can_hold_is_named(compiler: BlockCompiler) -> None:
    class Odd(float):
        __slots__ = ()

    class Other:
        def __mul__(self, other: Tensor) -> Tensor:
            return other * 0.5

    with pytest.raises(TypeError, match="called with a Other, which no graph can hold"):
        Blocks(compiler).gradients(8, Other())
    assert equal(Blocks(compiler).gradients(8, Odd(0.5)), Blocks(None).gradients(8))


def test_keeping_activations_is_no_way_to_run_a_compiled_block(compiler: BlockCompiler) -> None:
    """Its graph of the way up has no gradients: without recompute nothing would be learned."""
    blocks = Blocks(None)
    block = Mlp(ARITHMETICS.load("bf16"), 0, 1)
    blocks.blocks[:] = [block]
    wrap_block(block, 0, blocks, recomputes=False, make_runner=compiler)
    with pytest.raises(AssertionError, match="runs again in backward"):
        blocks.gradients(8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nf4", {}),
        ("nf4", {"scale_search": True, "rotation": "hadamard"}),
        ("int4", {}),
        ("int8", {}),
        ("int8", {"group": 32}),
        ("fp8", {}),
        ("fp8", {"values": "e5m2", "scales": "tensor"}),
    ],
    ids=str,
)
def test_a_format_that_is_first_used_in_a_compiled_block_keeps_its_values(
    name: str,
    options: dict[str, object],
    compiler: BlockCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a format looks up is made at first use, and kept; made within a trace it would have no values, for everybody."""
    monkeypatch.setattr(_nf4_kernels, "_decode_tables", {})
    monkeypatch.setattr(_int4_kernels, "_tables", {})
    monkeypatch.setattr(_hadamard, "_tables", {})
    found = Blocks(compiler, fmt=name, options=options).gradients(8)
    assert equal(found, Blocks(None, fmt=name, options=options).gradients(8))


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


@pytest.mark.parametrize("family", [pytest.param("flux1", marks=pytest.mark.slow), "flux2"])
@pytest.mark.parametrize("name", ARITHMETICS.names())
def test_compiled_gradients_are_those_of_eager_blocks_bit_for_bit(
    family: str, name: str, compiler: BlockCompiler, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Upstream's blocks under PEFT, streamed, from several formats: every graph serves weights that it was not traced with."""
    base = make_tiny(tmp_path_factory.mktemp("base"), family, ("nf4", {"scales": "double"}))
    sizes, arithmetic = [(4, 4), (6, 8), (4, 4)], ARITHMETICS.load(name)
    wanted = list(gradients(base, base.open("stream", arithmetic=arithmetic), sizes))
    model = base.open("stream", arithmetic=arithmetic, make_runner=compiler)
    counts = []
    for found, right in zip(gradients(base, model, sizes), wanted, strict=True):
        assert found.keys() == right.keys()
        assert [key for key in right if not torch.equal(found[key], right[key])] == []
        counts.append(compiler.num_graphs)
    assert counts[1] == 2 * counts[0] == counts[2]


def test_the_first_and_the_last_block_share_the_graphs_of_the_others(
    compiler: BlockCompiler, tmp_path: Path
) -> None:
    """Nobody needs the gradients of the first one's inputs, and those of the last double one come as slices."""
    base = make_tiny(tmp_path, "flux2", ("nf4", {}))
    model = base.open("resident", make_runner=compiler)
    next(gradients(base, model, [(4, 4)]))
    assert compiler.num_graphs == WAYS * len({"double", "single"})
