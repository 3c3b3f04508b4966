"""Triton kernels that decode nf4 in one pass at the rate of the card's memory, straight to bf16, fp16, fp32 or e4m3.

A byte holds two codes, so it is looked up once, in a table of 256 pairs. Values are computed in fp32 and rounded once: the
bits are those of the plain-torch reference. With scales that were divided by a row's (or a column group's) largest, the same
kernels give e4m3 operands for 8-bit products.

Operators of torch.library, so that torch.compile takes them without a break and sees through them.

Dimensions: N rows, K columns, G groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FLAT_BYTES = 1024  # codes decoded by one program
_TILE_ROWS, _TILE_BYTES = (
    64,
    128,
)  # a tile of the transposing kernel: whole 128-byte lines on both sides


@triton.jit
def _flat_kernel(
    codes, scales, pairs, out, num_bytes, HALF_GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_bytes
    byte = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    pair = tl.load(pairs + byte)
    first = (pair & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    second = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    scale = tl.load(scales + at // HALF_GROUP, mask=inside, other=0.0).to(tl.float32)
    values = tl.interleave(first * scale, second * scale).to(out.dtype.element_ty)
    to = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(out + to, values, mask=to < 2 * num_bytes)


@triton.jit
def _transposing_kernel(
    codes, scales, pairs, out, num_rows, row_bytes,
    HALF_GROUP: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    inside = (row < num_rows)[:, None] & (column < row_bytes)[None, :]
    at = row[:, None] * row_bytes + column[None, :]
    byte = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    pair = tl.load(pairs + byte)
    first = (pair & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    second = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    scale = tl.load(scales + at // HALF_GROUP, mask=inside, other=0.0).to(tl.float32)
    values = tl.trans(tl.interleave(first * scale, second * scale).to(out.dtype.element_ty))
    k = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    to = k[:, None] * num_rows + row[None, :]
    tl.store(out + to, values, mask=(k < 2 * row_bytes)[:, None] & (row < num_rows)[None, :])


@torch.library.triton_op("outsize::nf4_decode", mutates_args=())
def decode(
    codes: Tensor, scales: Tensor, pairs: Tensor, shape: list[int], group: int, dtype: torch.dtype
) -> Tensor:
    """The matrix (N, K) in `dtype`.

    Shapes: codes (N*K/2,) uint8, scales (N*K/group,) fp32 or fp16, pairs (256,) int64 as pair_table gives them.
    """
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    grid = (triton.cdiv(codes.numel(), _FLAT_BYTES),)
    torch.library.wrap_triton(_flat_kernel)[grid](
        codes, scales, pairs, out, codes.numel(), HALF_GROUP=group // 2, BLOCK=_FLAT_BYTES
    )
    return out


@torch.library.triton_op("outsize::nf4_decode_transposed", mutates_args=())
def decode_transposed(
    codes: Tensor, scales: Tensor, pairs: Tensor, shape: list[int], group: int, dtype: torch.dtype
) -> Tensor:
    """The transposed matrix (K, N) in `dtype`, contiguous; arguments as for `decode`."""
    rows, columns = shape
    out = torch.empty((columns, rows), dtype=dtype, device=codes.device)
    grid = (triton.cdiv(columns // 2, _TILE_BYTES), triton.cdiv(rows, _TILE_ROWS))
    torch.library.wrap_triton(_transposing_kernel)[grid](
        codes, scales, pairs, out, rows, columns // 2,
        HALF_GROUP=group // 2, ROWS=_TILE_ROWS, BYTES=_TILE_BYTES,
    )  # fmt: skip
    return out
