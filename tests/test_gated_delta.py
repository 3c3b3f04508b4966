"""The gated delta rule and its convolution against transformers' own, chunked and token by token, forward and gradients.

Truth in float64 is upstream's token-by-token loop: it asks for torch.float32 by name, so it is run with another name for it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from living_bytes import LivingBytes
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from outsize.families._gated_delta import causal_conv1d, gated_delta_rule, mix_tokens
from outsize.families._gated_delta_chunks import inverse_unit_lower

HEADS, SHARED, KEY, VALUE = 2, 3, 16, 8
NAMES = ("q", "k", "v", "g", "beta")


class _Wide(types.ModuleType):
    """torch, with float64 where float32 is asked for."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "torch", _Wide("torch"))


def drawn(
    tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float64, decay: float = 1.0
) -> list[Tensor]:
    """q, k, v, g, beta. decay: the largest -g."""
    generator = torch.Generator().manual_seed(tokens)
    heads = HEADS * SHARED

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    wide = [normal(batch, tokens, HEADS, KEY) for _ in range(2)]
    wide.append(normal(batch, tokens, heads, VALUE))
    g = -decay * normal(batch, tokens, heads).sigmoid()
    beta = normal(batch, tokens, heads).sigmoid()
    return [one.to(dtype).requires_grad_() for one in (*wide, g, beta)]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Upstream's loop, which decoding uses."""
    rule = upstream.torch_recurrent_gated_delta_rule
    return rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def document_by_document(given: list[Tensor], lengths: list[int]) -> Tensor:
    """The same for each document alone."""
    parts = zip(*(one.split(lengths, dim=1) for one in given), strict=True)
    return torch.cat([token_by_token(*part) for part in parts], dim=1)


def numbered(lengths: list[int]) -> Tensor:
    """Segments of documents of these lengths, in one row."""
    numbers = [torch.full((length,), number) for number, length in enumerate(lengths)]
    return torch.cat(numbers).int().unsqueeze(0)


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    """The output, and what a fixed random direction gives back."""
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, direction)]


def assert_close(got: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Norm of the difference by that of the truth, each tensor for itself."""
    for name, one, truth in zip(("out", *NAMES), got, expected, strict=False):
        error, size = (one.double() - truth.double()).norm(), truth.double().norm()
        # the gradient of g is 0 where there is one token: nothing is decayed
        assert error <= bound * size or size <= bound, f"{name}: {error:.2e} of {size:.2e}"


@pytest.mark.parametrize("tokens", [1, 5, 64, 150])
@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("decay", [0.01, 3.0])
@pytest.mark.usefixtures("in_float64")
def test_chunks_equal_token_by_token_in_float64(tokens: int, chunk: int, decay: float) -> None:
    """1e-12: some hundred roundings of 1e-16, amplified a little by the inverse."""
    inputs = drawn(tokens, batch=2, decay=decay)
    got = with_gradients(gated_delta_rule(*inputs, chunk=chunk), inputs)
    assert_close(got, with_gradients(token_by_token(*inputs), inputs), 1e-12)


@pytest.mark.parametrize("chunk", [64, 128])
def test_fp32_equals_upstreams_chunks_to_a_hundred_thousandth(chunk: int) -> None:
    inputs = drawn(300, dtype=torch.float32)
    got = with_gradients(gated_delta_rule(*inputs, chunk=chunk), inputs)
    rule = upstream.torch_chunk_gated_delta_rule
    q, k, v, g, beta = inputs
    out, _ = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert_close(got, with_gradients(out, inputs), 1e-5)


def test_bf16_inputs_are_rounded_once_as_upstream_rounds_them() -> None:
    """Both compute in fp32 and round the result: where they differ at all it is by one step of bf16, 2^-8."""
    q, k, v, g, beta = (one.detach() for one in drawn(130, dtype=torch.bfloat16))
    out = gated_delta_rule(q, k, v, g, beta)
    rule = upstream.torch_chunk_gated_delta_rule
    expected, _ = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-6)
    assert (out == expected).double().mean() > 0.99


@pytest.mark.parametrize(("spread", "bound"), [(None, 1e-2), (0.05, 5e-2)])
def test_factors_rounded_to_bf16_cost_what_rounding_does(
    spread: float | None, bound: float
) -> None:
    """As on cards: 2^-9 for each of some factors. Keys that are nearly one (cosine 0.997), without decay, cost most."""
    inputs = drawn(500, decay=1e-3 if spread else 1.0)
    if spread:
        with torch.no_grad():
            inputs[1].copy_(inputs[1][:, :1] + spread * inputs[1])
    wide = [one.detach().float().requires_grad_() for one in inputs]
    truth = with_gradients(gated_delta_rule(*inputs), inputs)
    out = gated_delta_rule(*wide, operands=torch.bfloat16)
    got = with_gradients(out, wide)
    assert_close(got, truth, bound)
    with pytest.raises(AssertionError):  # and it was rounded indeed
        assert_close(got, truth, 1e-4)


@pytest.mark.usefixtures("in_float64")
def test_queries_and_keys_may_come_normalised() -> None:
    inputs = drawn(40)
    q, k, v, g, beta = inputs
    rule = upstream.torch_recurrent_gated_delta_rule
    short = 0.3 * k  # a delta rule with keys longer than 1 grows without bound
    expected, _ = rule(q, short, v, g=g, beta=beta)
    assert_close([gated_delta_rule(q, short, v, g, beta, normalise=False)], [expected], 1e-12)


@pytest.fixture(scope="module")
def float64_for_all() -> Iterator[None]:
    """For hypothesis, which does not make a fixture anew for each example."""
    patch = pytest.MonkeyPatch()
    patch.setattr(upstream, "torch", _Wide("torch"))
    yield
    patch.undo()


@pytest.mark.usefixtures("float64_for_all")
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_packed_documents_equal_documents_alone(lengths: list[int]) -> None:
    """Shorter than the kernel, ending on a chunk's edge and reaching over several; forward and every gradient."""
    inputs = drawn(sum(lengths))
    got = with_gradients(gated_delta_rule(*inputs, numbered(lengths), chunk=16), inputs)
    expected = with_gradients(document_by_document(inputs, lengths), inputs)
    for name, one, truth in zip(("out", *NAMES), got, expected, strict=True):
        # gradients of g vanish in documents of one token: compared to the size of all of them
        torch.testing.assert_close(one, truth, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")  # fmt: skip


def test_packed_documents_in_fp32_equal_documents_alone_to_a_hundred_thousandth() -> None:
    lengths = [1, 70, 2, 3, 129, 64, 31]
    inputs = drawn(sum(lengths), dtype=torch.float32)
    got = with_gradients(gated_delta_rule(*inputs, numbered(lengths)), inputs)
    assert_close(got, with_gradients(document_by_document(inputs, lengths), inputs), 1e-5)


def test_rows_of_a_batch_have_boundaries_of_their_own() -> None:
    inputs = drawn(48, batch=2, dtype=torch.float32)
    segments = torch.cat([numbered([10, 38]), numbered([33, 15])])
    both = gated_delta_rule(*inputs, segments, chunk=16)
    for row, lengths in enumerate(([10, 38], [33, 15])):
        alone = document_by_document([one[row : row + 1] for one in inputs], lengths)
        assert_close([both[row : row + 1]], [alone], 1e-5)


def test_equal_numbers_with_another_between_are_two_documents() -> None:
    inputs = drawn(60, dtype=torch.float32)
    again = torch.tensor([3] * 20 + [-1] * 10 + [3] * 30).unsqueeze(0)
    out = gated_delta_rule(*inputs, again, chunk=16)
    assert_close([out], [document_by_document(inputs, [20, 10, 30])], 1e-5)


def test_a_neighbours_strong_decay_costs_a_document_no_digits_and_no_infinities() -> None:
    """Sums of logarithms of some thousands, were they shared, would leave three digits, or an overflow times zero."""
    lengths = [20, 44, 30]
    q, k, v, g, beta = drawn(sum(lengths), dtype=torch.float32, decay=0.1)
    with torch.no_grad():
        g[:, :20] *= 1e4
        g[:, 64:] *= 1e4
    inputs = [q, k, v, g, beta]
    got = with_gradients(gated_delta_rule(*inputs, numbered(lengths)), inputs)
    assert all(one.isfinite().all() for one in got)
    middle = [one[:, 20:64].detach().requires_grad_() for one in inputs]
    alone = token_by_token(*middle)
    # the direction of the whole row, cut
    direction = torch.randn(
        got[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    grads = torch.autograd.grad(alone, middle, direction[:, 20:64].float())
    assert_close([one[:, 20:64] for one in got], [alone, *grads], 2e-6)


def test_repeated_keys_without_decay_stay_exact() -> None:
    """One token over and over: the series 1 - L + L^2 ... would need 10^17 to cancel, and does not in fp32."""
    below = torch.ones(64, 64).tril(-1)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + below.double())
    torch.testing.assert_close(inverse_unit_lower(below).double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 8, 32, 128])
def test_the_inverse_is_that_of_lapack(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    below = torch.randn(3, 2, size, size, generator=generator, dtype=torch.float64).tril(-1) / 4
    exact = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + below)
    torch.testing.assert_close(inverse_unit_lower(below), exact, rtol=1e-9, atol=1e-9)


def test_heads_in_groups_are_heads_at_once() -> None:
    inputs = drawn(50, batch=2, dtype=torch.float32)
    once = with_gradients(gated_delta_rule(*inputs, chunk=16), inputs)
    grouped = with_gradients(gated_delta_rule(*inputs, chunk=16, pass_bytes=1), inputs)
    for one, other in zip(once, grouped, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def peak_bytes(rule: Callable[[], Tensor], inputs: list[Tensor]) -> int:
    """Most bytes alive at once in a forward and its gradient."""
    with LivingBytes() as memory:
        out = rule()
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    return memory.peak


def test_a_pass_takes_the_memory_that_it_was_counted_for() -> None:
    """All heads at once are within the count; one at a time take less; upstream's graph takes half as much again."""
    side = 64  # tokens of a chunk, and both widths: then neither kind of matrix is small
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 512, heads, side) for heads in (2, 2, 6)] + [(1, 512, 6)] * 2
    inputs = [torch.rand(one, generator=generator).requires_grad_() for one in shapes]
    q, k, v, beta, g = [*inputs[:4], -inputs[4]]
    counted = 4 * (512 // side) * 6 * (18 + 4) * side**2
    at_once = peak_bytes(lambda: gated_delta_rule(q, k, v, g, beta, pass_bytes=counted), inputs)
    one_by_one = peak_bytes(lambda: gated_delta_rule(q, k, v, g, beta, pass_bytes=1), inputs)
    rule = upstream.torch_chunk_gated_delta_rule
    usual = peak_bytes(
        lambda: rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0], inputs
    )
    assert 0.6 * counted < at_once <= counted
    assert one_by_one < 0.8 * at_once
    assert at_once < 0.8 * usual


def test_a_chunk_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match="a chunk of 48 tokens cannot be halved"):
        gated_delta_rule(*drawn(4), chunk=48)


def test_a_graph_traced_with_some_boundaries_serves_all_others() -> None:
    """Blocks are traced once for a size: nothing of the values of segments may be in the graph."""
    inputs = [one.detach() for one in drawn(40, dtype=torch.float32)]
    direction = torch.ones(1, 40, HEADS * SHARED, VALUE)

    def run(*flat: Tensor) -> list[Tensor]:
        leaves = [one.detach().requires_grad_() for one in flat[:5]]
        with torch.enable_grad():
            out = gated_delta_rule(*leaves, flat[5], chunk=16)
        return [out.detach(), *torch.autograd.grad(out, leaves, flat[6])]

    with torch.no_grad():
        traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)
        graph = traced(*inputs, numbered([40]), direction)
    for lengths in ([40], [16, 24], [3, 30, 7]):
        flat = (*inputs, numbered(lengths), direction)
        for one, other in zip(graph(*flat), run(*flat), strict=True):
            assert torch.equal(one, other)


def convolved(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Inputs (2, 6, tokens), a weight with four taps, a bias."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((2, 6, tokens), (6, 4), (6,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("activation", ["silu", None])
def test_the_convolution_is_upstreams(tokens: int, activation: str | None) -> None:
    inputs = convolved(tokens)
    got = with_gradients(causal_conv1d(*inputs, activation=activation), inputs)
    expected = with_gradients(upstream.causal_conv1d_fn(*inputs, activation=activation), inputs)
    assert_close(got, expected, 1e-6)


def test_the_convolution_in_bf16_is_within_a_step_of_upstreams() -> None:
    x, weight, bias = (one.detach() for one in convolved(40, torch.bfloat16))
    out = causal_conv1d(x, weight, bias)
    expected = upstream.causal_conv1d_fn(x, weight, bias, activation="silu")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-8)


def test_the_convolution_does_not_look_into_the_document_before() -> None:
    """Documents shorter than the kernel among them: two of one token in front."""
    lengths = [1, 1, 2, 3, 17, 5]
    inputs = convolved(sum(lengths))
    segments = numbered(lengths).expand(2, -1)
    got = with_gradients(causal_conv1d(*inputs, segments), inputs)
    x, weight, bias = inputs
    alone = [
        upstream.causal_conv1d_fn(part, weight, bias, activation="silu")
        for part in x.split(lengths, dim=-1)
    ]
    assert_close(got, with_gradients(torch.cat(alone, dim=-1), inputs), 1e-6)


def test_an_activation_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="silu, not 'gelu'"):
        causal_conv1d(*convolved(3), activation="gelu")


def linear_layer() -> torch.nn.Module:
    config = Qwen3_5TextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    torch.manual_seed(0)
    return upstream.Qwen3_5GatedDeltaNet(config, 0)


def test_a_whole_layer_is_upstreams_packed_or_not() -> None:
    """Gradients of the input and of every matrix, to 1e-5 in fp32.

    Left out are A_log and dt_bias, which are never trained: sums of terms that cancel, where upstream itself is 1e-5 off.
    """
    layer = linear_layer()
    lengths = [30, 2, 68]
    hidden = torch.randn(
        1, sum(lengths), 32, generator=torch.Generator().manual_seed(2)
    ).requires_grad_()
    leaves = [hidden, *(one for one in layer.parameters() if one.ndim > 1)]
    got = with_gradients(mix_tokens(layer, hidden), leaves)
    for one, truth in zip(got, with_gradients(layer(hidden), leaves), strict=True):
        assert (one - truth).norm() <= 1e-5 * truth.norm()
    packed = with_gradients(mix_tokens(layer, hidden, numbered(lengths)), leaves)
    alone = torch.cat([layer(part) for part in hidden.split(lengths, dim=1)], dim=1)
    for one, truth in zip(packed, with_gradients(alone, leaves), strict=True):
        assert (one - truth).norm() <= 1e-5 * truth.norm()
