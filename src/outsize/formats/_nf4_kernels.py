"""The arithmetic of nf4, twice: plain torch, the reference, which runs anywhere; and bitsandbytes' kernels.

Encoding is plain torch everywhere, so that a store's bytes do not depend on the device that made it. It gives the bytes
of bitsandbytes' CPU operator; bitsandbytes' CUDA encoder may differ from those by one code where a weight lies exactly
between two values (two of its fifteen boundaries are one rounding off, and it is built with fast division).

Dimensions: N rows, K columns, R rows of one chunk, G groups, g weights of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outsize.formats._hadamard import turn_rows
from outsize.formats._nf4_search import best_scales
from outsize.formats._nf4_values import VALUES
from outsize.formats._nibbles import look_up, pack, pair_table, spans
from outsize.formats._slabs import refuse_non_finite

_CELLS_PER_UNIT = (
    32  # [-1, 1] in cells so narrow (1/32) that none holds two boundaries (0.079 apart at least)
)
_decode_tables: dict[torch.device, Tensor] = {}
_encode_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}


def encode_rows(
    rows_RK: Tensor,
    first_row: int,
    *,
    group: int,
    is_half: bool,
    is_searched: bool = False,
    is_turned: bool = False,
) -> dict[str, Tensor]:
    """Codes (R*K/2,) uint8 and scales (R*K/group,) fp32, or fp16 if is_half, of rows in any float dtype.

    is_searched: scales are those that lose least. is_turned: the rows are turned first.
    Raises: FormatError naming the first row that is not finite, or whose scale exceeds fp16.
    """
    rows = len(rows_RK)
    wide_RK = turn_rows(rows_RK.float()) if is_turned else rows_RK.float()
    groups_Gg = wide_RK.reshape(-1, group)
    absmax_G = groups_Gg.abs().amax(dim=1)
    refuse_non_finite(absmax_G.view(rows, -1), first_row, "is not finite")
    scales_G = absmax_G.half() if is_half else absmax_G
    if is_half:
        refuse_non_finite(
            scales_G.view(rows, -1),
            first_row,
            f"holds {float(absmax_G.amax()):.3g}, too large for fp16 scales; set scales to fp32",
        )
    if is_searched:
        absmax_G = best_scales(groups_Gg, absmax_G, _values_of, is_half=is_half)
        scales_G = absmax_G.half() if is_half else absmax_G
    codes = _codes_of(_units(groups_Gg, absmax_G[:, None]).view(-1))
    return {"codes": pack(codes), "scales": scales_G}


def _units(groups_Gg: Tensor, scales_G1: Tensor) -> Tensor:
    """Weights over their scale, in [-1, 1]."""
    # As bitsandbytes does it: multiply by the reciprocal, which 1e-38 keeps finite for a group of zeros.
    # Where a device takes so small a number for 0, the reciprocal is infinite: such a group is zeros to it.
    inverse_G1 = (1.0 / scales_G1.clamp(min=1e-38)).nan_to_num_(posinf=0.0)
    return (groups_Gg * inverse_G1).clamp_(-1, 1)


def _values_of(groups_Gg: Tensor, scales_G1: Tensor) -> Tensor:
    """The value that the code of each weight stands for, before scaling."""
    codes = _codes_of(_units(groups_Gg, scales_G1).view(-1)).int()
    table = torch.tensor(VALUES, device=codes.device)
    return table.index_select(0, codes).view(groups_Gg.shape)


def _codes_of(units: Tensor) -> Tensor:
    """Code 0..15 of each value in [-1, 1], (n,) uint8: the number of boundaries below it.

    The same as torch.bucketize, six times faster: a cell gives the boundaries below it and the one it may hold.
    """
    below, boundary = _encode_table(units.device)
    cells = units.add(1).mul_(_CELLS_PER_UNIT).int()
    is_above = units.gt(boundary.index_select(0, cells))
    return below.index_select(0, cells).add_(is_above.view(torch.uint8))


def _encode_table(device: torch.device) -> tuple[Tensor, Tensor]:
    if device not in _encode_tables:
        values = torch.tensor(VALUES)
        bounds = (values[:-1] + values[1:]) / 2
        cells = bounds.add(1).mul_(_CELLS_PER_UNIT).int()  # rounds exactly as in _codes_of
        every_cell = torch.arange(2 * _CELLS_PER_UNIT + 1, dtype=torch.int32)
        below = torch.searchsorted(cells, every_cell).to(torch.uint8)
        boundary = torch.full(every_cell.shape, torch.inf)
        boundary[cells.long()] = bounds
        _encode_tables[device] = below.to(device), boundary.to(device)
    return _encode_tables[device]


def decode_by_torch(
    codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, group: int
) -> Tensor:
    """The reference. Memory beside the result: 6 bytes per weight, on a CPU those of one piece only."""
    flat = codes.reshape(-1)
    table = decode_table(flat.device)
    out = torch.empty(shape, dtype=dtype, device=flat.device)
    out_Gg, scales_G1 = out.view(-1, group), scales.view(-1, 1)
    for start, stop in spans(flat.numel(), group, flat.device.type):
        some = slice(2 * start // group, 2 * stop // group)
        out_Gg[some] = look_up(table, flat[start:stop]).view(-1, group).mul_(scales_G1[some])
    return out


def decode_by_bitsandbytes(
    codes: Tensor,
    scales: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    group: int,
    quant_type: str,
) -> Tensor:
    """The operator of bitsandbytes, which must have been imported; torch.compile takes it as it is."""
    result: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes, scales.contiguous(), group, quant_type, shape, dtype
    )
    return result


def decode_table(device: torch.device) -> Tensor:
    """What each byte of two codes stands for: pair_table of the values, on a device."""
    if device not in _decode_tables:
        _decode_tables[device] = pair_table(torch.tensor(VALUES)).to(device)
    return _decode_tables[device]
