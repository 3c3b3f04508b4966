"""The arithmetic of int8; see int8.py for the format.

Dimensions: N rows, K columns, R rows of one chunk, G groups (or rows), g weights of a group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outsize.formats._rows import row_spans
from outsize.formats._slabs import refuse_non_finite

_MAX_CODE = 127
_PER_STEP = (
    1 / _MAX_CODE
)  # a factor: dividing by a Python number rounds differently on CUDA and on CPU
_SMALLEST = 2.0**-126  # of fp32's normal numbers: some devices take a smaller scale for 0


def encode_rows(rows_RK: Tensor, first_row: int, *, group: int | None) -> dict[str, Tensor]:
    """Codes (R*K,) int8 and scales of rows in any float dtype: (R*K/group,) bf16, or (R,) fp32 without a group.

    Raises: FormatError naming the first row that is not finite.
    """
    num_rows, num_columns = rows_RK.shape
    groups_Gg = rows_RK.reshape(-1, group or num_columns).float()
    absmax_G = groups_Gg.abs().amax(dim=1)
    refuse_non_finite(absmax_G.view(num_rows, -1), first_row, "is not finite")
    scales_G = absmax_G * _PER_STEP
    scales_G = scales_G.where(scales_G >= _SMALLEST, 0.0)
    if group is not None:
        scales_G = scales_G.bfloat16()
    # A step that is 0 has no codes to choose: zeros stand for the whole group.
    steps_G1 = scales_G.float().where(scales_G > 0, torch.inf)[:, None]
    codes = (groups_Gg / steps_G1).round_().clamp_(-_MAX_CODE, _MAX_CODE)
    return {"codes": codes.to(torch.int8).view(-1), "scales": scales_G}


def decode(parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The matrix (N, K) in `dtype`. Memory beside it: 4 bytes per weight, on a CPU those of one piece only."""
    codes_NK = parts["codes"].view(shape)
    scales_NG1 = parts["scales"].view(shape[0], -1, 1)
    out_NK = torch.empty(shape, dtype=dtype, device=codes_NK.device)
    groups_NGg = codes_NK.view(shape[0], scales_NG1.shape[1], -1)
    for start, stop in row_spans(shape, codes_NK.device.type):
        values_RGg = groups_NGg[start:stop].float().mul_(scales_NG1[start:stop].float())
        out_NK[start:stop] = values_RGg.view(stop - start, -1)
    return out_NK
