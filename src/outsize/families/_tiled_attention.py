"""Causal attention in plain torch without a matrix of all pairs: exact, for heads of any width.

Flash kernels end at heads 256 wide, and what torch has beyond (for the 512 of Gemma's full layers) multiplies at a tenth of a
card's rate or makes all pairs at once. Here some queries at a time meet all the keys they may see: two large products with a
softmax between them, and five products backward. Keys that no query of a tile sees are left out, so about half of all pairs
is never computed, and with a window nearly all that lie outside of it. Query heads that share a key head lie below one
another in one product; their keys are never repeated.

Backward makes the scores transposed, as its products want them: that they are not the same operation as forward's also keeps a
traced block (layers/_merging.py) from holding all of them from recompute to gradient.

Dimensions: B batch rows, H query heads, G key heads, R = H / G, T tokens, D width of a head; P = B G; L keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from outsize.objectives._products import wide_product

TILE_BYTES = 256 << 20  # of fp32 scores; backward has two such matrices and two in 16 bits
# Queries of a tile, as a part of the keys they reach: a sixteenth of all pairs (an eighth with a window) is computed in
# vain, and shapes, each of which is compiled, stay few.
_PART, _PART_OF_WINDOW = 8, 4
_LEAST_ROWS = 128
_ALIGNED = (
    64  # keys of a tile begin at a multiple of it, so that products read and write aligned rows
)


class Tile(NamedTuple):
    """Pairs p of batch row and key head, query tokens [first, last), keys [low, last)."""

    pairs: slice
    first: int
    last: int
    low: int


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    starts_BT: Tensor | None = None,
    tile_bytes: int = TILE_BYTES,
) -> Tensor:
    """What each query reads, (B, H, T, D) in its dtype.

    Shapes: query (B, H, T, D), key and value (B, G, T, D); starts_BT integers, the first token of each token's document.
    window: tokens that one sees, itself included. Scores and sums are fp32 (fp64 for fp64), weights of values in query's dtype.
    Memory: tile_bytes twice forward and four times backward, less where it is compiled; the logarithm of each query's sum.
    No tile has fewer than 128 queries of one key head's query heads, even if it is larger then.
    """
    out: Tensor = _Attention.apply(query, key, value, starts_BT, scale, window, tile_bytes)  # type: ignore[no-untyped-call] # torch's own
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by place
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts_BT: Tensor | None,
        scale: float,
        window: int | None,
        tile_bytes: int,
    ) -> Tensor:
        q, k, v = _by_pair(query, key.shape[1]), key.flatten(0, 1), value.flatten(0, 1)
        starts, shared = _of_pairs(starts_BT, key.shape[1]), q.shape[1]
        rows: list[tuple[list[Tensor], list[Tensor]]] = []
        for tile in tiles(q.shape, window, tile_bytes):
            if tile.first == 0:
                rows.append(([], []))
            keys, values = (one[tile.pairs, tile.low : tile.last] for one in (k, v))
            own, others, begins = _places(tile, starts, shared, q.device)
            hidden = _hidden(own.unsqueeze(-1), others, _column(begins), window)
            scores = wide_product(_queries(q, tile), keys.mT).mul_(scale)
            scores = scores.masked_fill_(hidden, float("-inf"))
            sums = scores.logsumexp(-1)
            weights = scores.sub_(sums.unsqueeze(-1)).exp_().to(q.dtype)
            rows[-1][0].append(_by_head(torch.bmm(weights, values), shared))
            rows[-1][1].append(_by_head(sums, shared))
        out = torch.cat([torch.cat(reads, 2) for reads, _ in rows]).view_as(query)
        sums = torch.cat([torch.cat(several, 2) for _, several in rows])
        ctx.save_for_backward(query, key, value, starts_BT, out, sums)
        ctx.options = scale, window, tile_bytes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, starts_BT, out, sums = ctx.saved_tensors
        scale, window, tile_bytes = ctx.options
        heads, shared = key.shape[1], query.shape[1] // key.shape[1]
        q, k, v = _by_pair(query, heads), key.flatten(0, 1), value.flatten(0, 1)
        starts, d_read = _of_pairs(starts_BT, heads), _by_pair(d_out, heads)
        # what a query's own output says of its gradient: its softmax keeps the sum of weights at one
        means = (d_out * out).sum(-1, dtype=sums.dtype).view_as(sums)
        found: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = []
        for tile in tiles(q.shape, window, tile_bytes):
            if tile.first == 0:
                found.append(([], [], []))
            own, own_d = _queries(q, tile), _queries(d_read, tile)
            keys, values = (one[tile.pairs, tile.low : tile.last] for one in (k, v))
            at = (tile.pairs, slice(None), slice(tile.first, tile.last))
            places, others, begins = _places(tile, starts, shared, q.device)
            hidden = _hidden(places, others.unsqueeze(-1), _row(begins), window)
            weights = wide_product(keys, own.mT).mul_(scale)
            weights = weights.sub_(_row(sums[at].flatten(1, 2)))
            weights = weights.masked_fill_(hidden, float("-inf")).exp_()
            d_weights = wide_product(values, own_d.mT).sub_(_row(means[at].flatten(1, 2)))
            d_scores = d_weights.mul_(weights).mul_(scale).to(q.dtype)
            around = (0, 0, tile.low, q.shape[2] - tile.last)
            found[-1][0].append(_by_head(torch.bmm(d_scores.mT, keys), shared))
            found[-1][1].append(F.pad(wide_product(d_scores, own), around))
            found[-1][2].append(F.pad(wide_product(weights.to(q.dtype), own_d), around))
        d_q = torch.cat([torch.cat(parts, 2) for parts, _, _ in found]).view_as(query)
        d_k = torch.cat([_sum(parts) for _, parts, _ in found]).to(key.dtype).view_as(key)
        d_v = torch.cat([_sum(parts) for _, _, parts in found]).to(value.dtype).view_as(value)
        return d_q, d_k, d_v, None, None, None, None


def tiles(shape: torch.Size, window: int | None, tile_bytes: int) -> Iterator[Tile]:
    """All tiles of (P, R, T, D) queries; those of the same pairs follow one another from the first token on."""
    pairs, shared, tokens, _ = shape
    reach = tokens if window is None else min(window, tokens)
    part = _PART if reach == tokens else _PART_OF_WINDOW
    rows = -(-reach // part // _ALIGNED) * _ALIGNED
    rows = min(max(rows, _LEAST_ROWS), tokens)
    while rows > _LEAST_ROWS and _num_bytes(shared, rows, reach, tokens) > tile_bytes:
        rows //= 2
    at_once = max(1, tile_bytes // _num_bytes(shared, rows, reach, tokens))
    for first_pair in range(0, pairs, at_once):
        for first in range(0, tokens, rows):
            low = 0 if window is None else max(0, first - window + 1) // _ALIGNED * _ALIGNED
            yield Tile(
                slice(first_pair, min(first_pair + at_once, pairs)),
                first,
                min(first + rows, tokens),
                low,
            )


def _num_bytes(shared: int, rows: int, reach: int, tokens: int) -> int:
    """Of one key head's scores, in the largest tile."""
    return 4 * shared * rows * min(reach + rows, tokens)


def _by_pair(x: Tensor, heads: int) -> Tensor:
    """(B, H, T, D) -> (P, R, T, D)."""
    batch, query_heads, tokens, width = x.shape
    return x.reshape(batch * heads, query_heads // heads, tokens, width)


def _by_head(x: Tensor, shared: int) -> Tensor:
    """(pairs, R rows, ...) -> (pairs, R, rows, ...)."""
    return x.reshape(len(x), shared, -1, *x.shape[2:])


def _of_pairs(starts_BT: Tensor | None, heads: int) -> Tensor | None:
    """(P, T)."""
    return None if starts_BT is None else starts_BT.repeat_interleave(heads, dim=0)


def _queries(q: Tensor, tile: Tile) -> Tensor:
    """(pairs, R rows, D), head by head."""
    return q[tile.pairs, :, tile.first : tile.last].flatten(1, 2)


def _places(
    tile: Tile, starts: Tensor | None, shared: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each query of a tile, head by head, its place (R rows) and its document's (pairs, R rows); of keys theirs (L)."""
    own = torch.arange(tile.first, tile.last, device=device).repeat(shared)
    others = torch.arange(tile.low, tile.last, device=device)
    if starts is None:
        return own, others, None
    return own, others, starts[tile.pairs, tile.first : tile.last].repeat(1, shared)


def _hidden(own: Tensor, others: Tensor, begins: Tensor | None, window: int | None) -> Tensor:
    """Where a query sees no key, as these are laid out."""
    hidden = others > own
    if window is not None:
        hidden = hidden | (others <= own - window)
    return hidden if begins is None else hidden | (others < begins)


def _column(x: Tensor | None) -> Any:
    return None if x is None else x.unsqueeze(-1)


def _row(x: Tensor | None) -> Any:
    return None if x is None else x.unsqueeze(1)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for one in parts[1:]:
        total = total + one
    return total
