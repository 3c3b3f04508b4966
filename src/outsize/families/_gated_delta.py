"""The linear attention of Qwen3.5 in plain torch: the gated delta rule and its convolution, packed documents kept apart.

Every head has a state, a matrix of key width by value width. A token decays it, corrects what its key finds there towards
its value, and reads it with its query:

    S = exp(g) S,   S = S + beta k (v - k S),   o = q S

Token by token that is a chain of T tiny products. Here a chunk of tokens is done at once (arXiv 2412.06464): what its tokens
do to one another is a unit triangular matrix, whose inverse two halves at a time give (`inverse_unit_lower`). A chunk then
maps the state before it to the state behind it by one matrix, `S' = M S + N`, and all M and N come out of a few large
products. So what stays sequential is one product of key width squared per chunk, up and again down; everything else runs over
all chunks at once (`_gated_delta_chunks.py`). The gradient is written out: it keeps the inverse and the states, and
derives the rest again.

Documents are kept apart by masks on decays: a pair of tokens, or a token and the state that comes in, act on one another only
within one run of equal segment numbers. Logarithms of decays are summed from the start of the run, in fp64, since a sum
that starts in another document would lose digits to it. No shape and no branch depends on values, so it can be traced.

Dimensions: B batch, T tokens, D channels, H key heads, R value heads of each, K and V their widths, N chunks, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outsize.families._gated_delta_chunks import DeltaRule, Reach
from outsize.objectives._products import gives_fp32

CHUNK = 64
PASS_BYTES = 4 << 30
_EPSILON = 1e-6  # upstream's, below the norm of queries and keys


def gated_delta_rule(  # noqa: PLR0917 - upstream's order
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor | None = None,
    *,
    chunk: int = CHUNK,
    normalise: bool = True,
    pass_bytes: int = PASS_BYTES,
    operands: torch.dtype | None = None,
) -> Tensor:
    """What the queries read: (B, T, HR, V) in v's dtype.

    Shapes: q, k (B, T, H, K); v (B, T, HR, V), value head i read by key head i // R; g and beta (B, T, HR), g <= 0 the
        logarithm of a decay; segments (B, T) integers, a change begins a new state.
    Computes in fp32 (fp64 for fp64), as upstream does. operands: the type to which factors of products are rounded; None: bf16
        where inputs are bf16 on a card with such products, as flash-linear-attention has it, else none.
    normalise: queries and keys to length 1 first.
    Memory: heads are done in groups of about pass_bytes of temporaries; between forward and backward the states stay,
        T / chunk x HR x K x V values, and the inverses, T x chunk x HR.
    Raises: ValueError for a chunk that is no power of two.
    """
    if chunk & (chunk - 1) or chunk < 1:
        raise ValueError(f"a chunk of {chunk} tokens cannot be halved down to one: use 64 or 128")
    tokens, key_heads, width = k.shape[1:]
    shared = v.shape[2] // key_heads
    chunk = min(chunk, 1 << (tokens - 1).bit_length())
    compute = torch.promote_types(q.dtype, torch.float32)
    rounded = _operands(v) if operands is None else operands
    q, k = q.to(compute), k.to(compute)
    if normalise:
        q, k = _unit(q), _unit(k)
    q_all, k_all, v_all = (_chunked(one, chunk) for one in (q * width**-0.5, k, v))
    reach = _reach(segments, tokens, chunk, q.device)
    decay_all = _log_decays(_chunked(g, chunk), reach).to(compute)
    beta_all = _chunked(beta, chunk).to(compute)
    outs = []
    for first, last in _groups(q_all, v_all, rounded, pass_bytes):
        keys = (one[:, :, first:last] for one in (q_all, k_all))
        values = (_by_key_head(one, first, last, shared) for one in (v_all, beta_all, decay_all))
        out: Tensor = DeltaRule.apply(rounded, *keys, *values, *reach)  # type: ignore[no-untyped-call] # torch's own
        outs.append(out.flatten(2, 3))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    # (N, B, HR, C, V) -> (B, T, HR, V)
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens].to(v.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    segments: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """Each channel's weighted sum of a token and those before it in its document, activated: (B, D, T) in x's dtype.

    Shapes: x (B, D, T), weight (D, taps), bias (D), segments (B, T). Summed in fp32, rounded once to the weight's dtype.
    Shifts and sums, not a convolution: they join into one kernel where blocks are compiled.
    Raises: ValueError for an activation other than silu.
    """
    if activation not in {"silu", None}:
        raise ValueError(f"the convolution knows silu, not {activation!r}")
    tokens, taps = x.shape[-1], weight.shape[-1]
    compute = torch.promote_types(weight.dtype, torch.float32)
    wide = F.pad(x.to(compute), (taps - 1, 0))
    scales = weight.to(compute).unsqueeze(-1)
    runs = None if segments is None else F.pad(_runs(segments), (taps - 1, 0), value=-1)
    out = x.to(compute) * scales[:, taps - 1]
    for tap in range(taps - 1):
        shifted = wide[..., tap : tap + tokens]
        if runs is not None:
            same = runs[:, tap : tap + tokens] == runs[:, taps - 1 :]
            shifted = shifted.masked_fill(~same.unsqueeze(1), 0)
        out = out + shifted * scales[:, tap]
    if bias is not None:
        out = out + bias.to(compute).unsqueeze(-1)
    out = out.to(weight.dtype)
    return (out if activation is None else F.silu(out)).to(x.dtype)


def mix_tokens(layer: Any, hidden_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
    """What upstream's Qwen3_5GatedDeltaNet.forward computes without a cache, for packed rows as well: (B, T, D)."""
    batch, tokens, _ = hidden_BTD.shape
    mixed_BDT = causal_conv1d(
        layer.in_proj_qkv(hidden_BTD).transpose(1, 2),
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        segments,
        layer.activation,
    )
    widths = [layer.key_dim, layer.key_dim, layer.value_dim]
    q, k, v = torch.split(mixed_BDT.transpose(1, 2), widths, dim=-1)
    g = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(hidden_BTD).float() + layer.dt_bias)
    read = gated_delta_rule(
        q.reshape(batch, tokens, -1, layer.head_k_dim),
        k.reshape(batch, tokens, -1, layer.head_k_dim),
        v.reshape(batch, tokens, -1, layer.head_v_dim),
        g,
        layer.in_proj_b(hidden_BTD).sigmoid(),
        segments,
    )
    gate = layer.in_proj_z(hidden_BTD).reshape(-1, layer.head_v_dim)
    normed = layer.norm(read.reshape(-1, layer.head_v_dim), gate)
    return layer.out_proj(normed.reshape(batch, tokens, -1))  # type: ignore[no-any-return]


def _operands(v: Tensor) -> torch.dtype:
    """What factors of products are rounded to, where nobody says. fp16 would lose small ones, so it computes in fp32."""
    is_narrow = v.dtype == torch.bfloat16 and gives_fp32(v.device.type, v.dtype)
    return v.dtype if is_narrow else torch.promote_types(v.dtype, torch.float32)


def _reach(segments: Tensor | None, tokens: int, chunk: int, device: torch.device) -> Reach:
    if segments is None:
        runs_NBC = torch.zeros(1, 1, chunk, dtype=torch.int64, device=device)
        before_NB = runs_NBC[..., 0]
    else:
        padding = -tokens % chunk
        runs_BT = F.pad(_runs(segments), (0, padding), value=-1)
        runs_NBC = runs_BT.view(len(runs_BT), -1, chunk).transpose(0, 1)
        before_NB = F.pad(runs_NBC[:-1, :, -1], (0, 0, 1, 0), value=-1)
    order = torch.arange(chunk, device=device)
    pairs = (runs_NBC.unsqueeze(-1) == runs_NBC.unsqueeze(-2)) & (order.unsqueeze(-1) >= order)
    enters = runs_NBC == before_NB.unsqueeze(-1)
    leaves = runs_NBC == runs_NBC[..., -1:]
    passes = runs_NBC[..., -1] == before_NB
    return Reach(*(one[:, :, None, None] for one in (pairs, enters, leaves, passes)))


def _runs(segments: Tensor) -> Tensor:
    """(B, T): 0, 1, 2 ... for runs of equal numbers; two documents with one number between them stay two."""
    begins = segments[:, 1:] != segments[:, :-1]
    return F.pad(begins.to(torch.int64).cumsum(dim=1), (1, 0))


def _log_decays(g: Tensor, reach: Reach) -> Tensor:
    """(N, B, HR, C) fp64: the sum of g from the start of the token's run in its chunk up to it."""
    return g.double() @ reach.pairs[:, :, 0, 0].double().transpose(-1, -2)


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """(B, T, heads, ...) -> (N, B, heads, C, ...), zeros behind the last token."""
    padding = -x.shape[1] % chunk
    padded = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, padding))
    cut = padded.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return cut.transpose(0, 1).transpose(2, 3).contiguous()


def _by_key_head(x: Tensor, first: int, last: int, shared: int) -> Tensor:
    """(N, B, HR, C, ...) -> (N, B, H, R, C, ...), of some key heads."""
    some = x[:, :, first * shared : last * shared]
    return some.reshape(*x.shape[:2], last - first, shared, *x.shape[3:])


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _EPSILON)


def _groups(q: Tensor, v: Tensor, operands: torch.dtype, pass_bytes: int) -> list[tuple[int, int]]:
    """Ranges of key heads that are done together; equally many each, so that a compiled block has their kernels once."""
    num_chunks, batch, heads, chunk, width = q.shape
    shared, value_width = v.shape[2] // heads, v.shape[-1]
    # backward at its peak, counted in its code: matrices of each kind that are alive at once, about half of them operands
    both = q.element_size() + operands.itemsize
    of_tokens = chunk * (6 * width + 6 * value_width + 6 * chunk)
    of_states = 4 * width * value_width
    head_bytes = num_chunks * batch * shared * (of_tokens + of_states) * both // 2
    most = max(1, min(heads, pass_bytes // head_bytes))
    at_once = next(one for one in range(most, 0, -1) if heads % one == 0)
    return [(first, first + at_once) for first in range(0, heads, at_once)]
