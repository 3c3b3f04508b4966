"""Products of 16-bit operands whose sums are kept in 32 bits: on tensor cores they are made so, and usually rounded at the end."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """A b, of matrices or of batches (N, rows, columns) of them, summed and given in fp32 (in fp64 for fp64).

    Where a device gives products of 16 bits in 16 bits only, they are rounded to these; on processors they are fp32 products.
    """
    if a.element_size() >= 4:
        return a @ b
    if a.device.type == "cpu":
        return a.float() @ b.float()
    if gives_fp32(a.device.type, a.dtype):
        multiply = torch.mm if a.ndim == 2 else torch.bmm
        return multiply(a, b, out_dtype=torch.float32)
    return (a @ b).float()


@lru_cache
def gives_fp32(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a 16-bit product keeps its fp32 sums there; found out by asking for one. torch from 2.8 on has it for CUDA.

    Ask once before anything is traced, where asking would compute nothing.
    """
    if device_type == "cpu":
        return False
    try:
        one = torch.ones(16, 16, dtype=dtype, device=device_type)
        kept = torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
        several = torch.bmm(one[None], one[None], out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return kept and several.dtype == torch.float32
