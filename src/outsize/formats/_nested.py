"""Double quantisation as bitsandbytes does it: the scales themselves in 8 bits, around their mean.

Quantising runs on the CPU whatever the device, as it follows bitsandbytes' CPU operator to the bit: that one rounds a
value to one of 65536 steps before it takes the nearest of the 256 entries. The mean is torch's, whose last bit may
depend on the number of threads above 32768 scales; it is stored, so decoding is exact everywhere.

Dimensions: G scales, B blocks of 256 of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 256
_STEPS = 65535  # the highest index of bitsandbytes' table of 65536 steps over [-1, 1]


def quantise_scales(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts with "scales" (G,) fp32 replaced by uint8 "scales", "nested_scales", "nested_table" and "offset"."""
    device, absmax_G = parts["scales"].device, parts["scales"].cpu()
    offset = absmax_G.mean()
    centred_B256 = F.pad(absmax_G - offset, (0, -len(absmax_G) % _BLOCK)).view(-1, _BLOCK)
    nested_B1 = centred_B256.abs().amax(dim=1, keepdim=True)
    units = (centred_B256 * (1.0 / nested_B1)).clamp_(-1, 1)
    steps = (
        ((units + 1) * 0.5 * _STEPS + 0.5).nan_to_num_(0).int()
    )  # 0 / 0 in a block of zeros, whose code is 0
    table = dynamic_table()
    codes = _code_of_each_step(table)[steps.long()].view(-1)[: len(absmax_G)]
    replaced = {
        "scales": codes,
        "nested_scales": nested_B1.view(-1),
        "nested_table": table,
        "offset": offset.view(1),
    }
    return {"codes": parts["codes"], **{name: part.to(device) for name, part in replaced.items()}}


def decode_scales(parts: Mapping[str, Tensor], *, by_bitsandbytes: bool) -> Tensor:
    """The scales (G,) in fp32."""
    codes, nested, table = parts["scales"], parts["nested_scales"], parts["nested_table"]
    if by_bitsandbytes:
        centred: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            codes, nested, table, _BLOCK, torch.float32
        )
    else:
        # Compiled, product and sum would become one multiply-add that rounds once, unlike bitsandbytes and unlike the same
        # code uncompiled. A product in fp64 is exact, so that it is rounded where it is made fp32.
        units = table.index_select(0, codes.int()).double()
        centred = (units * nested.repeat_interleave(_BLOCK)[: len(codes)].double()).float()
    return centred + parts["offset"]


def dynamic_table() -> Tensor:
    """The 256 values of an 8-bit float with a movable exponent, ascending, in [-1, 1].

    Source: 8-bit Approximations for Parallelism in Deep Learning, arXiv 1511.04561, as in bitsandbytes'
    create_dynamic_map: for each power of ten, the midpoints of 2**i equal steps of [0.1, 1], with both signs.
    """
    decades = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        decades.append(10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2.0))
    positive = torch.cat(decades)
    return torch.cat([positive, -positive, torch.tensor([0.0, 1.0])]).sort().values


def _code_of_each_step(table: Tensor) -> Tensor:
    """The nearest entry of each of the 65536 steps; of two as near, the lower."""
    steps = -1.0 + (2.0 * torch.arange(_STEPS + 1, dtype=torch.float32)) / torch.tensor(
        float(_STEPS)
    )
    return torch.bucketize(steps, 0.5 * (table[:-1] + table[1:])).to(torch.uint8)
