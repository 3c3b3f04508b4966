"""The arithmetic of fp8; see fp8.py for the format.

Dimensions: N rows, K columns, R rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outsize.formats._rows import row_spans
from outsize.formats._slabs import Complete, EncodeChunk, SlabEncoder, refuse_non_finite

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SMALLEST = 2.0**-126  # of fp32's normal numbers: some devices take a smaller scale for 0
_HELD = 2**22  # numbers that are encoded at once where a matrix was held
_SMALLEST_E4M3_SCALE = 1e-30  # stands for that of a column of zeros


def make_encoder(shape: tuple[int, ...], values: str, *, is_by_row: bool) -> Encoder:
    """An encoder of a matrix (N, K) with a scale for each row, or one for all."""
    dtype = _DTYPES[values]

    def encode_chunk(rows_RK: Tensor, first_row: int) -> dict[str, Tensor]:
        wide_RK = rows_RK.float()
        absmax_R = wide_RK.abs().amax(dim=1)
        refuse_non_finite(absmax_R, first_row, "is not finite")
        if not is_by_row:
            held = rows_RK if rows_RK.element_size() == 2 else wide_RK
            return {"codes": held, "absmax": absmax_R}
        scales_R = _scales(absmax_R, dtype)
        return {"codes": _codes(wide_RK, scales_R[:, None], dtype), "scales": scales_R}

    def complete(flat: dict[str, Tensor]) -> dict[str, Tensor]:
        if not is_by_row:
            flat = _encode_held(flat["codes"], flat["absmax"], dtype)
        return {"codes": flat["codes"].view(shape), "scales": flat["scales"]}

    return Encoder(shape, encode_chunk, complete, keeps=dtype if is_by_row else None)


class Encoder(SlabEncoder):
    """Takes rows, or rows that are in the type already, which are not rounded again.

    keeps: that type; None where scales are for the whole matrix.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        encode_chunk: EncodeChunk,
        complete: Complete,
        *,
        keeps: torch.dtype | None,
    ) -> None:
        super().__init__(shape, encode_chunk, complete)
        self.keeps = keeps

    def push_codes(self, codes_RK: Tensor, scales_R: Tensor) -> None:
        """The next rows in the type that is kept, and their scales in fp32.

        Raises: FormatError as `push`.
        """
        self._require_next(codes_RK)
        for start, stop in row_spans((len(codes_RK), codes_RK.shape[1]), "cpu"):
            largest_R = codes_RK[start:stop].float().abs().amax(dim=1) * scales_R[start:stop]
            refuse_non_finite(largest_R, self._done, "is not finite")
            self._keep(
                stop - start, {"codes": codes_RK[start:stop], "scales": scales_R[start:stop]}
            )


def _scales(absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """What the largest number of the type stands for; 0 where that is too small to divide by."""
    # a factor: dividing by a Python number rounds differently on CUDA and on CPU
    scales = absmax * (1.0 / torch.finfo(dtype).max)
    return scales.where(scales >= _SMALLEST, 0.0)


def _codes(wide: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest 8-bit float of each number over its scale; ties to even, as torch casts."""
    largest = torch.finfo(dtype).max
    divisors = scales.where(scales > 0, torch.inf)
    return (wide / divisors).clamp_(-largest, largest).to(dtype)


def _encode_held(held: Tensor, absmax_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Encode into the memory of what was held, from the front: codes are narrower and overtake nothing."""
    scales = _scales(absmax_N.amax().view(1), dtype)
    codes = held.view(torch.uint8)[: held.numel()].view(dtype)
    for start in range(0, held.numel(), _HELD):
        some = slice(start, start + _HELD)
        codes[some] = _codes(held[some].float(), scales, dtype)
    return {"codes": codes, "scales": scales}


def decode(parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The matrix (N, K) in `dtype`. Memory beside it: 4 bytes per weight, on a CPU those of one piece only."""
    codes_NK, scales = parts["codes"].view(shape), parts["scales"].view(-1, 1)
    out_NK = torch.empty(shape, dtype=dtype, device=codes_NK.device)
    for start, stop in row_spans(shape, codes_NK.device.type):
        by_row = scales if len(scales) == 1 else scales[start:stop]
        out_NK[start:stop] = codes_NK[start:stop].float().mul_(by_row)
    return out_NK


def e4m3_scales(parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Scales (N, 1) of the codes as they are, and (K, 1) with which each column fits e4m3."""
    codes_NK, scales_N1 = parts["codes"].view(shape), parts["scales"].view(-1, 1)
    rows_N1 = scales_N1.expand(shape[0], 1).contiguous()
    absmax_K = torch.zeros(shape[1], device=codes_NK.device)
    step = max(1, _HELD // shape[1])
    for start in range(0, shape[0], step):
        some = slice(start, start + step)
        magnitudes = codes_NK[some].float().abs_().mul_(rows_N1[some])
        absmax_K = torch.maximum(absmax_K, magnitudes.amax(0))
    largest = torch.finfo(torch.float8_e4m3fn).max
    columns_K = absmax_K.clamp_min(_SMALLEST_E4M3_SCALE).div(largest)
    return rows_N1, columns_K.view(-1, 1)


def transposed_e4m3(codes_NK: Tensor, scales: Tensor, column_scales: Tensor) -> Tensor:
    """The transpose (K, N) in e4m3, each of its rows divided by its scale (K, 1); scales: (N,) or (1,) of the codes."""
    values_NK = codes_NK.float() * scales.view(-1, 1) / column_scales.view(1, -1)
    largest = torch.finfo(torch.float8_e4m3fn).max
    return values_NK.clamp(-largest, largest).to(torch.float8_e4m3fn).t().contiguous()
