"""Cross-entropy over a large vocabulary without its logits, and its gradient for the hidden states, in one pass over the head.

At 8192 tokens the logits of 262144 words are 8 GiB in fp32, and their gradient as much. Here they exist as tiles of some tokens by
some words. A token's loss is log(1 + others / own), where `own` is the exponential of the logit at its label and `others`
the sum over all other words; its gradient is

    (1 - p) (sum over others of e_v f_v W_v / others  -  f_label W_label),   1 - p = others / (own + others)

with f the derivative of the softcap, 1 where there is none. Numerator and `others` are sums that can be carried from tile to
tile under the largest logit so far, as attention carries its own. So every tile is made once, used for the loss and for
the gradient, and forgotten: two products in all. Doing the gradient later would cost a third, and a head in host memory would cross
the bus twice; doing it in forward costs the gradient itself, which is as small as the hidden states. Since the label
stands apart, a token that is predicted well loses no digits to 1 - p.

The head is frozen: it gets no gradient. Dimensions: N tokens, D width, V words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outsize.objectives._head_tiles import HeadTiles, operand_type
from outsize.objectives._products import wide_product
from outsize.objectives.protocol import TileCopies

IGNORED = -100
TILE_BYTES = 256 << 20
_TOKENS_AT_ONCE = 2048  # rows at which a product is limited by arithmetic, not by reading the head
_WORDS_AT_LEAST = 256  # below, a product is too narrow: rather fewer tokens


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    weight_N: Tensor | None = None,
    denominator: float | None = None,
    tile_bytes: int = TILE_BYTES,
    copies: TileCopies | None = None,
) -> Tensor:
    """Sum of the losses of trained tokens over `denominator`, a scalar with gradient for `hidden`.

    Shapes: hidden (..., D), labels (...) int64, -100 where nothing is trained; weight (V, D) on hidden's device or in host
        memory; bias (V); weight_N (...) factors of tokens. fp32, fp64 for fp64 hidden.
    denominator: tokens trained in the whole update, so that a token counts the same in whichever micro-batch it lies; None
        is the number (or the sum of factors) in this call.
    copies: brings tiles of a head in host memory beside the computation; None copies in line.
    labels on the CPU spare the host a wait for the device, which must say how many are trained.
    Memory: about tile_bytes; 16 D bytes for each of 2048 tokens, and where the head is in host memory 6 to 8 D for every other;
        the rows of trained tokens and their gradient, in hidden's dtype.
    Raises: ValueError for shapes that do not fit, a head that asks for a gradient, a label outside the vocabulary, and where
        nothing is trained and no denominator is given. With a denominator that is a loss of 0, with a gradient of 0.
    """
    _check(hidden, weight, labels, bias)
    places, trained = _trained(labels, len(weight), hidden.device)
    factors = None if weight_N is None else _sent(weight_N.flatten(), hidden.device)[places]
    if denominator is None:
        denominator = float(len(trained) if factors is None else factors.sum())
        if denominator == 0:
            raise ValueError(
                f"none of {labels.numel()} tokens is trained: their mean loss is undefined;"
                " give the denominator of the whole update, or leave the batch out"
            )
    maker = _Maker(weight, bias, softcap, tile_bytes, copies)
    flat = hidden.reshape(-1, hidden.shape[-1])
    losses: Tensor = _Losses.apply(flat, places, trained, maker)  # type: ignore[no-untyped-call] # torch's own
    total = losses.sum() if factors is None else (losses * factors).sum()
    return total / denominator


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    tile_bytes: int = TILE_BYTES,
    copies: TileCopies | None = None,
) -> Tensor:
    """The loss of each trained token in nats, (number of trained tokens), in their order; no gradient. See above."""
    _check(hidden, weight, labels, bias)
    with torch.no_grad():
        places, trained = _trained(labels, len(weight), hidden.device)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
        maker = _Maker(weight, bias, softcap, tile_bytes, copies)
        return maker.run(rows, trained, has_gradient=False)[0]


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    width = hidden.shape[-1]
    if hidden.shape[:-1] != labels.shape or weight.ndim != 2 or weight.shape[1] != width:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, labels {tuple(labels.shape)} and head {tuple(weight.shape)} do not"
            " fit: wanted are (..., D), (...) and (V, D)"
        )
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError("the head is frozen here, but asks for a gradient: detach it")


def _trained(labels: Tensor, num_words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places and labels of the trained tokens, on `device`. Labels that lie there make the host wait for it."""
    flat = labels.flatten()
    places = (flat != IGNORED).nonzero().squeeze(1)
    trained = flat[places]
    if len(trained):
        lowest, highest = (int(one) for one in trained.aminmax())
        if lowest < 0 or highest >= num_words:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"label {wrong} is outside a vocabulary of {num_words}")
    return _sent(places, device), _sent(trained, device)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what is queued there."""
    if values.device.type != "cpu" or device.type == "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class _Losses(torch.autograd.Function):
    """Losses of the rows of `flat` (all tokens, D) at `places` (N); the gradient waits since forward."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, places: Tensor, labels: Tensor, maker: _Maker) -> Tensor:
        rows = flat.index_select(0, places)
        losses, grad = maker.run(rows, labels, has_gradient=ctx.needs_input_grad[0])
        ctx.save_for_backward(grad, places)
        ctx.num_tokens = len(flat)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        grad, places = ctx.saved_tensors
        found = grad.new_zeros(ctx.num_tokens, grad.shape[1])
        scaled = (grad * grad_losses.unsqueeze(1)).to(grad.dtype)
        return found.index_copy_(0, places, scaled), None, None, None


class _Maker:
    """The pass over tokens and head, in tiles."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        tile_bytes: int,
        copies: TileCopies | None,
    ) -> None:
        self._weight, self._bias, self._cap = weight, bias, softcap
        self._tile_bytes, self._copies = tile_bytes, copies

    def run(
        self, rows: Tensor, labels: Tensor, *, has_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Losses (N), and the gradient of each for its row, (N, D) in rows' dtype, if asked for."""
        tokens, words = self._sides(rows)
        compute = torch.promote_types(rows.dtype, torch.float32)
        losses = torch.empty(len(rows), dtype=compute, device=rows.device)
        grad = torch.empty_like(rows) if has_gradient else None
        spans = [
            slice(first, min(first + tokens, len(rows))) for first in range(0, len(rows), tokens)
        ]
        is_remote = self._weight.device != rows.device
        # a head that must be brought is brought once, for all tokens; one that is there may be read again
        for group in [spans] if is_remote else [[one] for one in spans]:
            sums = [_Sums(rows[one], labels[one], self._cap, has_gradient) for one in group]
            for tile in HeadTiles(self._weight, self._bias, words, rows, self._copies):
                for one in sums:
                    one.add_(tile.first, tile.weight, tile.bias)
            for span, one in zip(group, sums, strict=True):
                losses[span] = one.losses()
                if grad is not None:
                    grad[span] = one.grad()
        return losses, grad

    def _sides(self, rows: Tensor) -> tuple[int, int]:
        """Tokens and words of a tile."""
        word_bytes = HeadTiles.word_bytes(self._weight, rows)
        # logits in the type of sums, twice where there is a softcap, and as operands of the second product
        wide = max(4, rows.element_size())
        of_pair = (1 if self._cap is None else 2) * wide + rows.element_size()
        tokens = max(1, min(len(rows), _TOKENS_AT_ONCE))
        least = min(len(self._weight), _WORDS_AT_LEAST)
        if self._tile_bytes < least * (tokens * of_pair + word_bytes):
            tokens = max(1, min(tokens, (self._tile_bytes // least - word_bytes) // of_pair))
        words = max(1, self._tile_bytes // (tokens * of_pair + word_bytes))
        return tokens, min(words, len(self._weight))


class _Sums:
    """What some tokens know after some words."""

    def __init__(self, rows: Tensor, labels: Tensor, cap: float | None, has_gradient: bool) -> None:  # noqa: FBT001
        self._rows, self._labels, self._cap = rows.to(operand_type(rows)), labels, cap
        wide = torch.promote_types(rows.dtype, torch.float32)
        self._others = torch.zeros(len(rows), dtype=wide, device=rows.device)
        self._own = torch.zeros_like(self._others)
        self._top = torch.full_like(self._others, torch.finfo(wide).min)
        self._mean = torch.zeros_like(rows, dtype=wide) if has_gradient else None
        self._label_row = torch.zeros_like(self._rows) if has_gradient else None

    def add_(self, first: int, weight: Tensor, bias: Tensor | None) -> None:
        """Take words from `first` on into account. weight (words, D), bias (words)."""
        place = self._labels - first
        is_here = (place >= 0) & (place < len(weight))
        place = place.clamp(0, len(weight) - 1)
        logits = wide_product(self._rows, weight.mT)
        if bias is not None:
            logits += bias
        tanh = None
        if self._cap is not None:
            tanh = logits.div_(self._cap).tanh_()
            logits = tanh * self._cap
        self._take_label_(logits, place, is_here)
        top = torch.maximum(self._top, logits.amax(dim=1))
        shrink = torch.exp(self._top - top)
        exponents = logits.sub_(top.unsqueeze(1)).exp_()
        self._others = self._others * shrink + exponents.sum(dim=1)
        self._top = top
        if self._mean is None or self._label_row is None:
            return
        if tanh is not None:
            exponents.addcmul_(exponents, tanh.square_(), value=-1)
        self._mean.mul_(shrink.unsqueeze(1)).add_(
            wide_product(exponents.to(self._rows.dtype), weight)
        )
        found = weight.index_select(0, place).to(self._label_row.dtype)
        self._label_row = torch.where(is_here.unsqueeze(1), found, self._label_row)

    def losses(self) -> Tensor:
        """log(1 + others / own), (N)."""
        behind = self._behind()
        return torch.logaddexp(behind, torch.zeros_like(behind))

    def grad(self) -> Tensor:
        """(N, D), of each token's loss for its row."""
        assert self._mean is not None
        assert self._label_row is not None
        # the largest logit of others adds 1: less than that is there only where there are no others
        mean = self._mean.div_(self._others.clamp_min(1).unsqueeze(1))
        slope = torch.ones_like(self._own)
        if self._cap is not None:
            slope -= (self._own / self._cap).square()
        mean.addcmul_(self._label_row.to(mean.dtype), slope.unsqueeze(1), value=-1)
        return mean.mul_(torch.sigmoid(self._behind()).unsqueeze(1))

    def _behind(self) -> Tensor:
        """log(others / own)."""
        return self._others.log() + (self._top - self._own)

    def _take_label_(self, logits: Tensor, place: Tensor, is_here: Tensor) -> None:
        """Set the logit of the label aside: in the tile it then counts for nothing."""
        column = place.unsqueeze(1)
        own = logits.gather(1, column).squeeze(1)
        self._own = torch.where(is_here, own, self._own)
        logits.scatter_(1, column, own.masked_fill(is_here, float("-inf")).unsqueeze(1))
