"""The tiled loss against plain torch, which makes all logits: values, gradients, masks, memory, and a head that lies elsewhere."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from living_bytes import LivingBytes
from torch import Tensor

from outsize.objectives._head_tiles import HeadTiles
from outsize.objectives._products import gives_fp32
from outsize.objectives._tiles import tiled_cross_entropy, token_losses
from outsize.objectives.protocol import OBJECTIVES, Nats, OutputHead

TINY_TILES = 4096


def drawn(
    tokens: int = 40,
    words: int = 300,
    width: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    masked: float = 0.3,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states (2, tokens, width), weight, labels and bias. size: of logits, roughly; masked: share of tokens without a label."""
    generator = torch.Generator().manual_seed(tokens * words + width)
    hidden = torch.randn(2, tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(words, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
    labels = torch.randint(words, (2, tokens), generator=generator)
    labels[torch.rand(2, tokens, generator=generator) < masked] = -100
    bias = torch.randn(words, generator=generator, dtype=torch.float64)
    hidden = (size * hidden).to(dtype).requires_grad_()
    return hidden, weight.to(dtype), labels, bias.to(dtype)


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """What transformers computes: all logits, capped, in fp32; the mean over labels that are not -100."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def both(
    loss: Callable[..., Tensor], hidden: Tensor, *rest: Tensor, **named: Any
) -> tuple[Tensor, Tensor]:
    """A loss, and its gradient for hidden."""
    value = loss(hidden, *rest, **named)
    return value.detach(), torch.autograd.grad(value, hidden)[0]


def assert_equal(got: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], bound: float) -> None:
    """The loss relatively; the gradient by its norm, and no value off by more than the bound of the largest."""
    assert float(got[0]) == pytest.approx(float(truth[0]), rel=bound)
    error = (got[1].double() - truth[1].double()).abs()
    assert error.norm() <= bound * truth[1].double().norm()
    assert error.max() <= 10 * bound * truth[1].abs().max()


@pytest.mark.parametrize("softcap", [None, 30.0, 2.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tile_bytes", [1, TINY_TILES, 256 << 20])
def test_loss_and_gradient_are_plain_torchs_in_fp32(
    softcap: float | None, *, has_bias: bool, tile_bytes: int
) -> None:
    """1e-5, and one tile, many, and tiles of one token by one word."""
    hidden, weight, labels, bias = drawn(tokens=12, size=3.0)
    named = {"softcap": softcap, "bias": bias if has_bias else None}
    truth = both(plain, hidden, weight, labels, **named)
    got = both(tiled_cross_entropy, hidden, weight, labels, tile_bytes=tile_bytes, **named)
    assert got[0].dtype == torch.float32
    assert_equal(got, truth, 1e-5)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 30),
    words=st.integers(2, 90),
    tile_bytes=st.integers(1, 40_000),
    softcap=st.sampled_from([None, 5.0]),
)
def test_tiles_of_any_sides_give_the_same_in_float64(
    tokens: int, words: int, tile_bytes: int, softcap: float | None
) -> None:
    """Sides that divide neither tokens nor words; 1e-12."""
    hidden, weight, labels, _ = drawn(tokens, words, 7, dtype=torch.float64)
    labels[0, 0] = words - 1  # one is trained at least
    truth = both(plain, hidden, weight, labels, softcap=softcap)
    got = both(tiled_cross_entropy, hidden, weight, labels, softcap=softcap, tile_bytes=tile_bytes)
    assert_equal(got, truth, 1e-12)


def test_the_gradient_is_that_of_finite_differences() -> None:
    """Independent of torch's own formulas: central differences in float64."""
    hidden, weight, labels, bias = drawn(2, 12, 5, dtype=torch.float64)

    def loss(one: Tensor) -> Tensor:
        return tiled_cross_entropy(
            one, weight, labels, softcap=4.0, bias=bias, tile_bytes=200, denominator=3
        )

    assert torch.autograd.gradcheck(loss, hidden)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_bf16_is_nearer_to_the_truth_than_logits_rounded_to_bf16(softcap: float | None) -> None:
    """Sums are fp32: the loss to 1e-5 of float64's on the same rounded inputs, the gradient to its own rounding (2^-8).

    Logits in bf16, as in the usual recipe, cost more than ten times that on the same inputs.
    """
    hidden, weight, labels, _ = drawn(60, 500, 32, dtype=torch.bfloat16, size=8.0)
    wide = hidden.detach().double().requires_grad_()
    truth = both(plain, wide, weight.double(), labels, softcap=softcap)
    got = both(tiled_cross_entropy, hidden, weight, labels, softcap=softcap, tile_bytes=TINY_TILES)
    assert got[0].dtype == torch.float32
    assert got[1].dtype == torch.bfloat16
    assert float(got[0]) == pytest.approx(float(truth[0]), rel=1e-5)
    assert (got[1].double() - truth[1]).norm() <= 2**-8 * truth[1].norm()
    logits = F.linear(hidden.detach(), weight).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    usual = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert abs(float(usual - truth[0])) > 10 * abs(float(got[0] - truth[0]))


def test_a_token_that_is_predicted_well_keeps_its_gradient() -> None:
    """At 1 - p = 1e-9, p itself is 1 in fp32: a loss of log p, and a gradient of p - 1, would both be 0."""
    words, width = 6, 6
    hidden = torch.zeros(1, 1, width)
    hidden[..., 2] = 22.0
    hidden.requires_grad_()
    labels = torch.tensor([[2]])
    wide = hidden.detach().double().requires_grad_()
    truth = both(plain, wide, torch.eye(words, width).double(), labels)
    got = both(tiled_cross_entropy, hidden, torch.eye(words, width), labels)
    assert 1e-9 < float(truth[0]) < 2e-9
    assert_equal(got, truth, 1e-5)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_logits_too_large_for_their_exponential_are_no_infinity(size: float) -> None:
    hidden, weight, labels, _ = drawn(size=size)
    truth = both(plain, hidden, weight, labels)
    got = both(tiled_cross_entropy, hidden, weight, labels, tile_bytes=TINY_TILES)
    assert got[1].isfinite().all()
    assert_equal(got, truth, 1e-5)


def test_a_hidden_state_that_is_no_number_is_not_hidden() -> None:
    """The loop stops at a loss that is no number; one that came out finite would train on."""
    hidden, weight, labels, _ = drawn(masked=0.0)
    with torch.no_grad():
        hidden[0, 3, 1] = math.nan
    loss, grad = both(tiled_cross_entropy, hidden, weight, labels, tile_bytes=TINY_TILES)
    assert loss.isnan()
    assert grad[0, 3].isnan().all()


def test_tokens_that_are_not_trained_get_no_gradient_and_cost_nothing() -> None:
    hidden, weight, labels, _ = drawn()
    _, grad = both(tiled_cross_entropy, hidden, weight, labels)
    assert (grad[labels == -100] == 0).all()
    with torch.no_grad():
        hidden[labels == -100] = math.nan  # they are not even looked at
    assert both(tiled_cross_entropy, hidden, weight, labels)[0].isfinite()


def test_micro_batches_of_different_masks_add_up_to_the_whole() -> None:
    """The fault of many trainers: the mean of means weighs tokens of short answers more."""
    hidden, weight, labels, _ = drawn(masked=0.2)
    labels[1, 5:] = -100
    whole = both(plain, hidden, weight, labels)
    count = int((labels != -100).sum())
    parts = [
        both(tiled_cross_entropy, hidden, weight, one, denominator=count)
        for one in (
            torch.where(torch.arange(2).unsqueeze(1) == row, labels, -100) for row in range(2)
        )
    ]
    loss, grad = (sum(one[place] for one in parts) for place in range(2))
    assert_equal((loss, grad), whole, 1e-5)


def test_factors_weigh_tokens() -> None:
    hidden, weight, labels, _ = drawn(masked=0.0)
    factors = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0))
    each = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none")
    truth = (each * factors.flatten()).sum() / factors.sum()
    expected = truth.detach(), torch.autograd.grad(truth, hidden)[0]
    got = both(tiled_cross_entropy, hidden, weight, labels, weight_N=factors)
    assert_equal(got, expected, 1e-5)


def test_where_nothing_is_trained_the_mean_is_refused_and_a_share_is_zero() -> None:
    """With the denominator of a whole update a micro-batch may have nothing to say; alone it is a mistake of the data."""
    hidden, weight, _, _ = drawn()
    nothing = torch.full((2, 40), -100)
    with pytest.raises(ValueError, match="none of 80 tokens is trained"):
        tiled_cross_entropy(hidden, weight, nothing)
    loss, grad = both(tiled_cross_entropy, hidden, weight, nothing, denominator=7)
    assert float(loss) == 0
    assert (grad == 0).all()
    assert token_losses(hidden, weight, nothing).shape == (0,)


def test_a_vocabulary_of_one_word_is_certain() -> None:
    hidden, weight, _, _ = drawn(words=1)
    loss, grad = both(tiled_cross_entropy, hidden, weight, torch.zeros(2, 40, dtype=torch.int64))
    assert float(loss) == 0
    assert (grad == 0).all()


@pytest.mark.parametrize(("label", "named"), [(300, "label 300"), (-1, "label -1")])
def test_a_label_outside_the_vocabulary_is_named(label: int, named: str) -> None:
    hidden, weight, labels, _ = drawn()
    labels[1, 2] = label
    with pytest.raises(ValueError, match=f"{named} is outside a vocabulary of 300"):
        tiled_cross_entropy(hidden, weight, labels)


def test_shapes_that_do_not_fit_are_told() -> None:
    hidden, weight, labels, _ = drawn()
    with pytest.raises(ValueError, match=r"head \(16, 300\) do not fit"):
        tiled_cross_entropy(hidden, weight.T, labels)
    with pytest.raises(ValueError, match=r"labels \(2, 39\)"):
        tiled_cross_entropy(hidden, weight, labels[:, 1:])


def test_a_head_that_would_be_trained_is_refused() -> None:
    """It would get no gradient, and nobody would notice."""
    hidden, weight, labels, _ = drawn()
    with pytest.raises(ValueError, match="the head is frozen here"):
        tiled_cross_entropy(hidden, weight.requires_grad_(), labels)


def test_losses_of_tokens_are_plain_torchs_in_their_order() -> None:
    hidden, weight, labels, bias = drawn()
    got = token_losses(hidden, weight, labels, bias=bias, softcap=3.0, tile_bytes=TINY_TILES)
    logits = 3 * torch.tanh(F.linear(hidden, weight, bias) / 3)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(got, each[labels.flatten() != -100], rtol=1e-5, atol=1e-6)
    assert not got.requires_grad


class _Elsewhere(torch.Tensor):
    """A head that says it is on another device, which is what the loss goes by."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _Late:
    """Copies that happen when they are waited for, as on a card whose copying lags; a buffer is spoilt once it may be filled."""

    def __init__(self) -> None:
        self.num_copies = 0
        self._queued: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._opened: set[int] = set()

    def open_(self, track: int) -> None:
        self._opened.add(track)

    def copy(self, track: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        assert track in self._opened, "its last reader was not waited for"
        self._opened.remove(track)
        self._queued[track] = list(pairs)
        for target, _ in self._queued[track]:
            target.fill_(math.nan)

    def wait(self, track: int) -> None:
        for target, source in self._queued.pop(track):
            target.copy_(source.as_subclass(torch.Tensor))
            self.num_copies += 1


@pytest.mark.parametrize("is_late", [False, True])
def test_a_head_elsewhere_gives_the_same_and_is_brought_once(*, is_late: bool) -> None:
    """As many copies as tiles, whatever the number of tokens: the head crosses the bus once a loss."""
    hidden, weight, labels, bias = drawn(tokens=30)
    truth = both(plain, hidden, weight, labels, bias=bias, softcap=5.0)
    copies = _Late() if is_late else None
    got = both(
        tiled_cross_entropy, hidden, weight.as_subclass(_Elsewhere), labels, bias=bias,
        softcap=5.0, tile_bytes=70_000, copies=copies,
    )  # fmt: skip
    assert_equal(got, truth, 1e-5)
    if copies is not None:
        assert 2 <= copies.num_copies <= 6


def test_tiles_of_a_head_elsewhere_are_its_rows_in_order() -> None:
    weight = torch.arange(70.0).view(7, 10)
    tiles = HeadTiles(weight.as_subclass(_Elsewhere), None, 3, torch.zeros(1, 10), _Late())
    for _ in range(2):
        found = [(one.first, one.weight.clone()) for one in tiles]
        assert [first for first, _ in found] == [0, 3, 6]
        assert torch.equal(torch.cat([one for _, one in found]), weight)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_was_allowed(softcap: float | None, dtype: torch.dtype) -> None:
    """600 x 20000 logits are 46 MiB in fp32; a tile may take 2 MiB, and sums 16 bytes for each value of hidden."""
    hidden, weight, labels, _ = drawn(300, 20_000, 8, dtype=dtype, masked=0.0)
    tile_bytes = 2 << 20
    sums = 16 * hidden.numel() + 3 * hidden.numel() * hidden.element_size()
    small = 64 * labels.numel() * 8  # labels, places, the sums of each token
    with LivingBytes() as memory:
        loss = tiled_cross_entropy(hidden, weight, labels, softcap=softcap, tile_bytes=tile_bytes)
        loss.backward()
    assert tile_bytes / 8 < memory.largest <= tile_bytes
    assert memory.peak <= tile_bytes + sums + small


def test_products_on_a_processor_are_fp32() -> None:
    """What `product` would fall back to is a card's: here bf16 rows are multiplied in fp32."""
    assert not gives_fp32("cpu", torch.bfloat16)
    hidden, weight, labels, _ = drawn(dtype=torch.bfloat16)
    got = token_losses(hidden, weight, labels)
    logits = hidden.double() @ weight.double().T
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(got.double(), each[labels.flatten() != -100], rtol=1e-5, atol=1e-6)


def test_the_objective_is_found_by_its_name_and_computes_the_loss() -> None:
    objective = OBJECTIVES.load("next_token")()
    hidden, weight, labels, bias = drawn()
    head = OutputHead(weight=weight, bias=bias, softcap=5.0)
    truth = both(plain, hidden, weight, labels, bias=bias, softcap=5.0)
    count = int((labels != -100).sum())
    loss = objective.loss(hidden, head, labels, num_trained=count)
    assert_equal((loss.detach(), torch.autograd.grad(loss, hidden)[0]), truth, 1e-5)
    nats = objective.nats(hidden, head, labels)
    assert nats.num_tokens == count
    assert nats.mean == pytest.approx(float(truth[0]), rel=1e-5)
    assert nats.perplexity == pytest.approx(math.exp(float(truth[0])), rel=1e-4)


def test_costs_of_parts_add_up() -> None:
    whole = Nats(6.0, 2) + Nats(3.0, 1)
    assert whole == Nats(9.0, 3)
    assert whole.perplexity == pytest.approx(math.exp(3))
    assert math.isnan(Nats(0.0, 0).perplexity)
    assert Nats(1e6, 1).perplexity == math.inf


def test_the_objective_is_named_without_torch() -> None:
    """Plans and recipes ask for it before torch is needed."""
    program = "import sys; import outsize.objectives.next_token; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # fmt: skip
    assert found.stdout.strip() == "False"
