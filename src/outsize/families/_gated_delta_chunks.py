"""The gated delta rule over chunks, with its gradient written out; `_gated_delta.py` says what for.

With the decays of a chunk, d between two of its tokens, a from its start to a token, e from a token to its end, c through it:

    L = beta_i (k_i k_j) d_ij below the diagonal,   T = (1 + L)^-1 beta_j,   E = (q_i k_j) d_ij
    W = T a k,   M = c - (e k)' W,   N = (e k)' T v          the state behind is M S + N
    X = T (v - a k S),   out = a q S + E X                  X: what the chunk writes, token by token

Backwards the same chain runs from the last chunk to the first, with M transposed:

    dS = M' dS_behind + F,   F = (a q)' d_out - W' E' d_out

Dimensions: N chunks, B batch, H key heads, R value heads of each, C tokens, K and V widths of keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outsize.objectives._products import wide_product

_LEAF = 16  # side of the blocks whose inverse is built of whole products: smaller ones only make more launches


class Reach(NamedTuple):
    """Which acts on which within documents: bools over (N, B, 1, 1, ...), where N and B are 1 without segments.

    pairs (..., C, C): the row's token sees the column's. enters (..., C): a token sees the state that comes in. leaves (..., C):
    a token acts on the state that goes out. passes (...): the state that comes in acts on it.
    """

    pairs: Tensor
    enters: Tensor
    leaves: Tensor
    passes: Tensor


class DeltaRule(torch.autograd.Function):
    """All heads of a group over all chunks.

    operands: the type to which factors of products are rounded, that of q for none; sums, decays, the inverse and the chain
    from chunk to chunk stay in q's.
    Shapes: q, k (N, B, H, C, K), q scaled, in the type to compute in; v (N, B, H, R, C, V) of any; beta, log_decay (N, B, H, R, C);
    then the fields of a Reach. Gives (N, B, H, R, C, V).
    """

    @staticmethod
    def forward(ctx: Any, operands: torch.dtype, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *reach: Tensor) -> Tensor:  # noqa: PLR0917 - autograd passes them by place  # fmt: skip
        decay, mm = _decays(log_decay, Reach(*reach)), _Multiply(operands)
        alike = _alike(k, beta, decay)
        inverse = inverse_unit_lower(alike)
        mix = mm.operand(inverse * beta.unsqueeze(-2))
        value = v.to(q.dtype)
        enter_k, leave_k = _keys(mm, k, decay)
        transition = _transition(mm, mm(mix, enter_k), leave_k, decay)
        step = mm(leave_k.mT, mm(mix, value))
        state = _before(mm, transition, step)
        del transition, leave_k, step
        written = mm(mix, value - mm(enter_k, state))
        attention = mm(q, k.mT).unsqueeze(3) * decay.pair
        out = mm(attention, written) + mm(decay.enter * q.unsqueeze(3), state)
        ctx.save_for_backward(q, k, v, beta, log_decay, inverse, state, *reach)
        ctx.operands = operands
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, log_decay, inverse, state, *reach = ctx.saved_tensors
        decay, mm = _decays(log_decay, Reach(*reach)), _Multiply(ctx.operands)
        mix = mm.operand(inverse * beta.unsqueeze(-2))
        attention = mm(q, k.mT).unsqueeze(3) * decay.pair
        enter_k, leave_k = _keys(mm, k, decay)
        d_written = mm(attention.mT, d_out)
        d_behind = _d_behind(mm, q, decay, d_out, d_written, mm(mix, enter_k), leave_k)
        d_written = d_written + mm(leave_k, d_behind)
        del leave_k

        remainder = v.to(q.dtype) - mm(enter_k, state)
        written = mm(mix, remainder)
        del enter_k
        d_remainder = mm(mix.mT, d_written)
        d_mix = mm(d_written, remainder.mT)
        d_attention = mm(d_out, written.mT)
        del remainder, d_written
        # what each way from a token to a state costs, for the key or query and for its decay
        by_query, by_key = mm(d_out, state.mT), mm(d_remainder, state.mT)
        to_behind = mm(written, d_behind.mT)
        d_q = (decay.enter * by_query).sum(3)
        d_k = (decay.leave * to_behind - decay.enter * by_key).sum(3)
        d_enter = (by_query * q.unsqueeze(3) - by_key * k.unsqueeze(3)).sum(-1)
        d_leave = (to_behind * k.unsqueeze(3)).sum(-1)
        d_through = (state * d_behind).sum((-2, -1), dtype=q.dtype)
        del by_query, by_key, to_behind

        alike = _alike(k, beta, decay)
        d_alike = -(inverse.mT @ (d_mix * beta.unsqueeze(-2)) @ inverse.mT)
        d_beta = (d_mix * inverse).sum(-2) + _by_beta(k, decay, d_alike)
        d_keys = (d_alike.tril(-1) * beta.unsqueeze(-1) * decay.pair).sum(3)
        d_queries = (d_attention * decay.pair).sum(3)
        d_k = d_k + mm(d_keys + d_keys.mT, k) + mm(d_queries.mT, q)
        d_q = d_q + mm(d_queries, k)
        of_pairs = d_alike * alike + d_attention * attention
        d_log = _d_log(decay, of_pairs, d_enter, d_leave, d_through)
        return None, d_q, d_k, d_remainder.to(v.dtype), d_beta, d_log, *(None for _ in reach)


class _Multiply:
    """Products of matrices (..., rows, columns) of the same batches, rounded to a type before and summed in the wide one."""

    def __init__(self, operands: torch.dtype) -> None:
        self._operands = operands

    @property
    def kept(self) -> torch.dtype:
        """The type in which states are kept: nearly all that is done with them is multiplying."""
        return self._operands

    def operand(self, x: Tensor) -> Tensor:
        """What is kept of something that is only multiplied with."""
        return x.to(self._operands)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """A b, in fp32 where operands are narrower."""
        a, b = self.operand(a), self.operand(b)
        if self._operands.itemsize >= 4:
            return a @ b
        product = wide_product(a.flatten(0, -3), b.flatten(0, -3))
        return product.view(*a.shape[:-1], b.shape[-1])


class _Decays(NamedTuple):
    """pair (N, B, H, R, C, C), zero above the diagonal; enter, leave (..., C, 1); through (..., 1, 1)."""

    pair: Tensor
    enter: Tensor
    leave: Tensor
    through: Tensor


def _decays(log_decay: Tensor, reach: Reach) -> _Decays:
    """Masked before exp: a sum that began in another document says nothing, and may overflow."""
    last = log_decay[..., -1:]
    pairs = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)
    none = float("-inf")
    return _Decays(
        pairs.masked_fill(~reach.pairs, none).exp(),
        log_decay.masked_fill(~reach.enters, none).exp().unsqueeze(-1),
        (last - log_decay).masked_fill(~reach.leaves, none).exp().unsqueeze(-1),
        last.masked_fill(~reach.passes.unsqueeze(-1), none).exp().unsqueeze(-1),
    )


def _keys(mm: _Multiply, k: Tensor, decay: _Decays) -> tuple[Tensor, Tensor]:
    """Keys as they meet the state that comes in, and as they write the one that goes out."""
    return mm.operand(decay.enter * k.unsqueeze(3)), mm.operand(decay.leave * k.unsqueeze(3))


def _alike(k: Tensor, beta: Tensor, decay: _Decays) -> Tensor:
    """L: how much of what one token writes a later one of its chunk finds. Unrounded: its inverse is steep where keys repeat."""
    return ((k @ k.mT).unsqueeze(3) * decay.pair * beta.unsqueeze(-1)).tril(-1)


def _by_beta(k: Tensor, decay: _Decays, d_alike: Tensor) -> Tensor:
    return ((k @ k.mT).unsqueeze(3) * decay.pair * d_alike.tril(-1)).sum(-1)


def _transition(mm: _Multiply, w: Tensor, leave_k: Tensor, decay: _Decays) -> Tensor:
    """M, (N, B, H, R, K, K)."""
    unit = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return decay.through * unit - mm(leave_k.mT, w)


def _d_behind(mm: _Multiply, q: Tensor, decay: _Decays, d_out: Tensor, d_written: Tensor, w: Tensor, leave_k: Tensor) -> Tensor:  # noqa: PLR0917 - all of a formula  # fmt: skip
    """The gradient of the state behind each chunk, (N, B, H, R, K, V)."""
    step = mm((decay.enter * q.unsqueeze(3)).mT, d_out) - mm(w.mT, d_written)
    return _behind(mm, _transition(mm, w, leave_k, decay), step)


def _d_log(
    decay: _Decays, of_pairs: Tensor, d_enter: Tensor, d_leave: Tensor, d_through: Tensor
) -> Tensor:
    """The gradient of the logarithms of decays, (N, B, H, R, C)."""
    left = d_leave * decay.leave.squeeze(-1)
    d_log = of_pairs.sum(-1) - of_pairs.sum(-2) + d_enter * decay.enter.squeeze(-1) - left
    at_end = left.sum(-1) + d_through * decay.through[..., 0, 0]
    return torch.cat([d_log[..., :-1], d_log[..., -1:] + at_end.unsqueeze(-1)], dim=-1)


def _before(mm: _Multiply, transition: Tensor, step: Tensor) -> Tensor:
    """The state before each chunk, where each makes M S + N of it: (N, B, H, R, K, V), zeros before the first."""
    torch.ops.outsize.chain_(step, transition, False)
    return torch.cat([torch.zeros_like(step[:1]), step[:-1]]).to(mm.kept)


def _behind(mm: _Multiply, transition: Tensor, step: Tensor) -> Tensor:
    """The gradient of the state behind each chunk, where before it is M' D + F: zeros behind the last."""
    torch.ops.outsize.chain_(step, transition, True)
    return torch.cat([step[1:], torch.zeros_like(step[:1])]).to(mm.kept)


# One operator, so that a traced block has one node for it and not one for each chunk, and so that states lie where they belong.
_library = torch.library.Library("outsize", "FRAGMENT")  # type: ignore[no-untyped-call] # torch's stub
_library.define(  # type: ignore[no-untyped-call] # as above
    "chain_(Tensor(a!) step, Tensor transition, bool is_backward) -> ()"
)


@torch.library.impl(_library, "chain_", "CompositeExplicitAutograd")
def _chain_(step: Tensor, transition: Tensor, is_backward: bool) -> None:  # noqa: FBT001 - as it is called
    """Make each N of (N, ..., K, V) what its chunk leaves, M times what the one before left + N; the one thing that is sequential.

    is_backward: from the last to the first, M transposed. Carried on unrounded: a state remembers through many chunks.
    """
    flat_M, flat_N = transition.flatten(1, -3), step.flatten(1, -3)
    if is_backward:
        for number in range(len(step) - 2, 0, -1):
            flat_N[number].baddbmm_(flat_M[number].mT, flat_N[number + 1])
    else:
        for number in range(1, len(step) - 1):
            flat_N[number].baddbmm_(flat_M[number], flat_N[number - 1])


@torch.library.register_fake("outsize::chain_", lib=_library)  # type: ignore[untyped-decorator] # as above
def _(step: Tensor, transition: Tensor, is_backward: bool) -> None:  # noqa: FBT001 - as above
    """Nothing is returned, and shapes stay."""


def inverse_unit_lower(below: Tensor) -> Tensor:
    """(1 + below)^-1 for strictly lower triangular `below` (..., C, C), C a power of two.

    Two inverted halves give the whole: the corner between them is - second corner first. Like substitution row by row it
    forms nothing larger than the inverse itself, while the series 1 - L + L^2 ... grows to 10^17 where keys repeat.
    """
    size = below.shape[-1]
    leaf = min(_LEAF, size)
    inverse = _inverse_leaves(_blocks(below, leaf))
    while inverse.shape[-1] < size:
        side = inverse.shape[-1]
        corner = _blocks(below, 2 * side)[..., side:, :side]
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ corner @ first)
        top = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([top, torch.cat([corner, second], dim=-1)], dim=-2)
    return inverse.squeeze(-3)


def _blocks(matrix: Tensor, side: int) -> Tensor:
    """The blocks on the diagonal, (..., C / side, side, side)."""
    num = matrix.shape[-1] // side
    cut = matrix.reshape(*matrix.shape[:-2], num, side, num, side)
    return cut.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _inverse_leaves(below: Tensor) -> Tensor:
    """The same on whole small matrices: the inverse of a block diagonal gives that of one with blocks twice as large."""
    size = below.shape[-1]
    place = torch.arange(size, device=below.device)
    inverse = torch.eye(size, dtype=below.dtype, device=below.device)
    side = 1
    while side < size:
        rows = place // side
        is_corner = (rows.unsqueeze(-1) == rows + 1) & (rows % 2 == 0)
        corner = below * is_corner
        # with ones alone on the diagonal the products are the corner itself
        inverse = inverse - (corner if side == 1 else inverse @ corner @ inverse)
        side *= 2
    return inverse.expand_as(below)
