"""Triton kernels that decode nf4 in one pass at the rate of the card's memory, straight to bf16, fp16, fp32 or e4m3.

Values are computed in fp32 and rounded once: the bits are those of the plain-torch reference. With scales that were divided
by a row's (or a column group's) largest, the results are e4m3 operands for 8-bit products; matrix units want both operands
with the summed dimension last, hence the transposed one. All is one launch for a matrix: small blocks are bound by launches.

Registered as torch's operators, so that tracing writes them down as one node and compilers see through them.

Dimensions: N rows, K columns, G groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FLAT_BYTES = 4096  # codes decoded by one program
_TILE_ROWS, _TILE_GROUPS = 128, 2  # of the transposing kernel: lines of 128 bytes are written
_E4M3 = torch.float8_e4m3fn


@triton.jit
def _flat_kernel(
    codes, scales, row_scales, values, out, num_bytes, groups_per_row,
    HALF_GROUP: tl.constexpr, BLOCK: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_bytes
    byte = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    group = (at // HALF_GROUP).to(tl.int32)
    scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    if IS_SCALED:
        scale /= tl.load(row_scales + group // groups_per_row, mask=inside, other=1.0)
    first, second = tl.load(values + (byte >> 4)) * scale, tl.load(values + (byte & 15)) * scale
    both = tl.interleave(first, second).to(out.dtype.element_ty)
    to = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(out + to, both, mask=to < 2 * num_bytes)


@triton.jit
def _e4m3_bits(codes, values, scale):
    value = (tl.load(values + codes) * scale).to(tl.float8e4nv)
    return value.to(tl.uint8, bitcast=True).to(tl.uint32)


@triton.jit
def _transposing_kernel(
    codes, scales, column_scales, values, out, num_rows, row_bytes,
    HALF_GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # Four rows at a time become the four bytes of a word, so that words are what is transposed and written.
    word = tl.program_id(1) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = tl.arange(0, HALF_GROUP)
    num_groups = row_bytes // HALF_GROUP
    words_per_line = num_rows // 4
    inside = word < words_per_line
    for g in tl.static_range(GROUPS):
        group = tl.program_id(0) * GROUPS + g
        here = inside & (group < num_groups)
        of_column = tl.load(
            column_scales + group * (2 * HALF_GROUP), mask=group < num_groups, other=1.0
        )
        firsts = tl.zeros((ROWS // 4, HALF_GROUP), tl.uint32)
        seconds = tl.zeros((ROWS // 4, HALF_GROUP), tl.uint32)
        for j in tl.static_range(4):
            row = word.to(tl.int64) * 4 + j
            at = row[:, None] * row_bytes + group * HALF_GROUP + column[None, :]
            byte = tl.load(codes + at, mask=here[:, None], other=0).to(tl.int32)
            scale = tl.load(scales + row * num_groups + group, mask=here, other=0.0).to(tl.float32)
            scale = (scale / of_column)[:, None]
            firsts |= _e4m3_bits(byte >> 4, values, scale) << (8 * j)
            seconds |= _e4m3_bits(byte & 15, values, scale) << (8 * j)
        k = (group * HALF_GROUP + column).to(tl.int64) * 2
        to = k[:, None] * words_per_line + word[None, :]
        tl.store(out + to, tl.trans(firsts), mask=here[None, :])
        tl.store(out + to + words_per_line, tl.trans(seconds), mask=here[None, :])


@torch.library.triton_op("outsize::nf4_decode", mutates_args=())
def decode(
    codes: Tensor, scales: Tensor, values: Tensor, shape: list[int], group: int, dtype: torch.dtype
) -> Tensor:
    """The matrix (N, K) in `dtype`.

    Shapes: codes (N*K/2,) uint8, scales (N*K/group,) fp32 or fp16, values (16,) fp32.
    """
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    grid = (triton.cdiv(codes.numel(), _FLAT_BYTES),)
    torch.library.wrap_triton(_flat_kernel)[grid](
        codes, scales, scales, values, out, codes.numel(), shape[1] // group,
        HALF_GROUP=group // 2, BLOCK=_FLAT_BYTES, IS_SCALED=False,
    )  # fmt: skip
    return out


@torch.library.triton_op("outsize::nf4_decode_rows", mutates_args=())
def decode_rows(
    codes: Tensor, scales: Tensor, row_scales: Tensor, values: Tensor, shape: list[int], group: int
) -> Tensor:
    """The matrix (N, K) in e4m3, each row divided by its scale.

    Shapes: as for `decode`; row_scales (N, 1) fp32, at least a 448th of the row's largest.
    """
    out = torch.empty(shape, dtype=_E4M3, device=codes.device)
    grid = (triton.cdiv(codes.numel(), _FLAT_BYTES),)
    torch.library.wrap_triton(_flat_kernel)[grid](
        codes, scales, row_scales, values, out, codes.numel(), shape[1] // group,
        HALF_GROUP=group // 2, BLOCK=_FLAT_BYTES, IS_SCALED=True,
    )  # fmt: skip
    return out


@torch.library.triton_op("outsize::nf4_decode_columns", mutates_args=())
def decode_columns(
    codes: Tensor,
    scales: Tensor,
    column_scales: Tensor,
    values: Tensor,
    shape: list[int],
    group: int,
) -> Tensor:
    """The transposed matrix (K, N) in e4m3, contiguous, each column of the matrix divided by its scale.

    Shapes: as for `decode`, N a multiple of 16; column_scales (K, 1) fp32, the same within a group, at least a 448th of the
    largest. With N = 8, which no matrix unit takes, Triton 3.6 compiled the store wrongly on an H200.
    """
    rows, columns = shape
    words = torch.empty((columns, rows // 4), dtype=torch.int32, device=codes.device)
    grid = (triton.cdiv(columns // group, _TILE_GROUPS), triton.cdiv(rows, _TILE_ROWS))
    torch.library.wrap_triton(_transposing_kernel)[grid](
        codes, scales, column_scales, values, words, rows, columns // 2,
        HALF_GROUP=group // 2, ROWS=_TILE_ROWS, GROUPS=_TILE_GROUPS,
    )  # fmt: skip
    return words.view(_E4M3)
