"""The arithmetic of int4; see int4.py for the format.

Dimensions: N rows, K columns, R rows of one chunk, G groups, g weights of a group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outsize.formats._nibbles import look_up, pack, pair_table, spans
from outsize.formats._slabs import refuse_non_finite

_MAX_CODE = 15
_PER_STEP = (
    1 / _MAX_CODE
)  # a factor: dividing by a Python number rounds differently on CUDA and on CPU
_tables: dict[torch.device, Tensor] = {}


def encode_rows(rows_RK: Tensor, first_row: int, *, group: int) -> dict[str, Tensor]:
    """Codes (R*K/2,) uint8, scales and minima (R*K/group,) fp16, of rows in any float dtype.

    Raises: FormatError naming the first row that is not finite or whose minimum or step exceeds fp16.
    """
    rows = len(rows_RK)
    groups_Gg = rows_RK.reshape(-1, group).float()
    low_G, high_G = groups_Gg.amin(dim=1), groups_Gg.amax(dim=1)
    refuse_non_finite(torch.stack([low_G, high_G], 1).view(rows, -1), first_row, "is not finite")
    minima_G = low_G.half()
    scales_G = ((high_G - minima_G.float()) * _PER_STEP).clamp_(min=0).half()
    refuse_non_finite(
        torch.stack([minima_G, scales_G], 1).view(rows, -1),
        first_row,
        f"holds {float(groups_Gg.abs().amax()):.3g}, too large for the fp16 scales of int4",
    )
    # A step that is 0 in fp16 has no codes to choose: the minimum stands for the whole group.
    steps_G1 = scales_G.float().where(scales_G > 0, torch.inf)[:, None]
    codes = ((groups_Gg - minima_G.float()[:, None]) / steps_G1).round_().clamp_(0, _MAX_CODE)
    return {"codes": pack(codes.to(torch.uint8).view(-1)), "scales": scales_G, "minima": minima_G}


def decode(
    parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype, *, group: int
) -> Tensor:
    """The matrix (N, K) in `dtype`. Memory beside it: 6 bytes per weight, on a CPU those of one piece only."""
    codes = parts["codes"].reshape(-1)
    scales_G1, minima_G1 = parts["scales"].view(-1, 1), parts["minima"].view(-1, 1)
    table = _table(codes.device)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    out_Gg = out.view(-1, group)
    for start, stop in spans(codes.numel(), group, codes.device.type):
        some = slice(2 * start // group, 2 * stop // group)
        values_Gg = look_up(table, codes[start:stop]).view(-1, group)
        out_Gg[some] = values_Gg.mul_(scales_G1[some].float()).add_(minima_G1[some].float())
    return out


def _table(device: torch.device) -> Tensor:
    if device not in _tables:
        _tables[device] = pair_table(torch.arange(16, dtype=torch.float32)).to(device)
    return _tables[device]
