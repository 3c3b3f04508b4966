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

    Shapes: q, k (N, B, H, C, K), q scaled, in the type to compute in; v (N, B, H, R, C, V) of any; beta, log_decay (N, B, H, R, C);
    then the fields of a Reach. Gives (N, B, H, R, C, V).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *reach: Tensor) -> Tensor:  # noqa: PLR0917 - autograd passes them by place  # fmt: skip
        decay = _decays(log_decay, Reach(*reach))
        alike = _alike(k, beta, decay)
        inverse = inverse_unit_lower(alike)
        mix = inverse * beta.unsqueeze(-2)
        value = v.to(q.dtype)
        enter_k, leave_k = decay.enter * k.unsqueeze(3), decay.leave * k.unsqueeze(3)
        transition = _transition(mix @ enter_k, leave_k, decay)
        state = _chain(transition, leave_k.mT @ (mix @ value))
        del transition, leave_k
        written = mix @ (value - enter_k @ state)
        attention = (q @ k.mT).unsqueeze(3) * decay.pair
        out = attention @ written + (decay.enter * q.unsqueeze(3)) @ state
        ctx.save_for_backward(q, k, v, beta, log_decay, inverse, state, *reach)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, log_decay, inverse, state, *reach = ctx.saved_tensors
        decay = _decays(log_decay, Reach(*reach))
        mix = inverse * beta.unsqueeze(-2)
        attention = (q @ k.mT).unsqueeze(3) * decay.pair
        enter_k, leave_k = decay.enter * k.unsqueeze(3), decay.leave * k.unsqueeze(3)
        d_written = attention.mT @ d_out
        d_behind = _d_behind(q, decay, d_out, d_written, mix @ enter_k, leave_k)
        d_written = d_written + leave_k @ d_behind
        del leave_k

        remainder = v.to(q.dtype) - enter_k @ state
        written = mix @ remainder
        del enter_k
        d_remainder = mix.mT @ d_written
        d_mix = d_written @ remainder.mT
        d_attention = d_out @ written.mT
        del remainder, d_written
        # what each way from a token to a state costs, for the key or query and for its decay
        by_query, by_key = d_out @ state.mT, d_remainder @ state.mT
        to_behind = written @ d_behind.mT
        d_q = (decay.enter * by_query).sum(3)
        d_k = (decay.leave * to_behind - decay.enter * by_key).sum(3)
        d_enter = (by_query * q.unsqueeze(3) - by_key * k.unsqueeze(3)).sum(-1)
        d_leave = (to_behind * k.unsqueeze(3)).sum(-1)
        d_through = (state * d_behind).sum((-2, -1))
        del by_query, by_key, to_behind

        alike = _alike(k, beta, decay)
        d_alike = -(inverse.mT @ (d_mix * beta.unsqueeze(-2)) @ inverse.mT)
        d_beta = (d_mix * inverse).sum(-2) + _by_beta(k, decay, d_alike)
        d_keys = (d_alike.tril(-1) * beta.unsqueeze(-1) * decay.pair).sum(3)
        d_queries = (d_attention * decay.pair).sum(3)
        d_k = d_k + (d_keys + d_keys.mT) @ k + d_queries.mT @ q
        d_q = d_q + d_queries @ k
        of_pairs = d_alike * alike + d_attention * attention
        d_log = _d_log(decay, of_pairs, d_enter, d_leave, d_through)
        return d_q, d_k, d_remainder.to(v.dtype), d_beta, d_log, *(None for _ in reach)


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


def _alike(k: Tensor, beta: Tensor, decay: _Decays) -> Tensor:
    """L: how much of what one token writes a later one of its chunk finds."""
    return ((k @ k.mT).unsqueeze(3) * decay.pair * beta.unsqueeze(-1)).tril(-1)


def _by_beta(k: Tensor, decay: _Decays, d_alike: Tensor) -> Tensor:
    return ((k @ k.mT).unsqueeze(3) * decay.pair * d_alike.tril(-1)).sum(-1)


def _transition(w: Tensor, leave_k: Tensor, decay: _Decays) -> Tensor:
    """M, (N, B, H, R, K, K)."""
    unit = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return decay.through * unit - leave_k.mT @ w


def _d_behind(q: Tensor, decay: _Decays, d_out: Tensor, d_written: Tensor, w: Tensor, leave_k: Tensor) -> Tensor:  # noqa: PLR0917 - all of a formula  # fmt: skip
    """The gradient of the state behind each chunk, (N, B, H, R, K, V)."""
    step = (decay.enter * q.unsqueeze(3)).mT @ d_out - w.mT @ d_written
    return _chain(_transition(w, leave_k, decay).mT, step, is_backward=True)


def _d_log(
    decay: _Decays, of_pairs: Tensor, d_enter: Tensor, d_leave: Tensor, d_through: Tensor
) -> Tensor:
    """The gradient of the logarithms of decays, (N, B, H, R, C)."""
    left = d_leave * decay.leave.squeeze(-1)
    d_log = of_pairs.sum(-1) - of_pairs.sum(-2) + d_enter * decay.enter.squeeze(-1) - left
    at_end = left.sum(-1) + d_through * decay.through[..., 0, 0]
    return torch.cat([d_log[..., :-1], d_log[..., -1:] + at_end.unsqueeze(-1)], dim=-1)


def _chain(transition: Tensor, step: Tensor, *, is_backward: bool = False) -> Tensor:
    """What stands before each chunk, where each makes M S + N of it: (N, B, H, R, K, V), zeros before the first.

    is_backward: from the last chunk to the first. The one thing that is sequential.
    """
    flat_M, flat_N = transition.flatten(1, 3), step.flatten(1, 3)
    order = list(range(len(step)))
    if is_backward:
        order.reverse()
    state = torch.zeros_like(flat_N[0])
    states = [state]
    for number in order[:-1]:
        state = torch.baddbmm(flat_N[number], flat_M[number], state)
        states.append(state)
    if is_backward:
        states.reverse()
    return torch.stack(states).view_as(step)


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
