"""Attention of the language families, by what a device is good at; all ways give the same up to rounding.

- `flash`: torch's flash kernel, which knows windows, shared keys and packed documents and makes no mask: on cards, for heads up
  to 256 wide, where a small trial gives what attention is.
- `tiled`: `_tiled_attention.py`, on cards for all that flash does not take.
- `masked`: torch's scaled_dot_product_attention, as upstream calls it: on processors, and wherever a cache is read.

Upstream's layers ask for the function by the name in their configuration. What they hand on as attention_mask is then ours:
None for rows of one document; `Reach`'s boundaries (1-D) for flash or starts (2-D) for tiles where rows hold several; a
mask (4-D) as upstream has it. Nothing but a mask is as large as the square of a row.

Dimensions: B batch rows, T tokens of a row, H query heads, G key heads, D width of a head, W documents at most.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from outsize.families._tiled_attention import tiled_attention
from outsize.objectives._products import gives_fp32

NAME = "outsize"
Way = Literal["flash", "tiled", "masked"]

_WIDEST = 256  # of flash kernels' heads
_TOLERANCE = 0.02  # relative, in the norm: a few times what bf16 rounds; a wrong window or document is beyond 0.1


def register() -> str:
    """Let transformers know our attention; the name to give as attn_implementation."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attend(  # noqa: PLR0917 - upstream's order
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What the queries (B, H, T, D) read, (B, T, H, D), and no weights. key, value (B, G, T, D)."""
    way = way_of(query.device, query.dtype, query.shape[-1])
    has_cache = key.shape[2] != query.shape[2]
    is_mask = attention_mask is not None and attention_mask.ndim == 4
    if way == "masked" or has_cache or is_mask:
        return _masked(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    assert dropout == 0, "attention without a mask drops nothing"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = None if sliding_window is None or sliding_window >= query.shape[2] else sliding_window
    if way == "flash":
        turned = (one.transpose(1, 2) for one in (query, key, value))
        return flash(*turned, scale=scale, window=window, boundaries=attention_mask), None
    out = tiled_attention(query, key, value, scale=scale, window=window, starts_BT=attention_mask)
    return out.transpose(1, 2).contiguous(), None


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    boundaries: Tensor | None = None,
) -> Tensor:
    """Causal attention by torch's flash kernel: (B, T, H, D) from (B, T, H, D) and (B, T, G, D), 16 bits.

    boundaries: int32 (W + 1), where documents begin in the rows put one after another, then the end, repeated; none is longer
    than a row. window: tokens that one sees, itself included.
    """
    batch, tokens = query.shape[:2]
    if boundaries is not None:
        query, key, value = (one.flatten(0, 1) for one in (query, key, value))
    # the operator below scaled_dot_product_attention: that one hands on neither windows nor documents
    out: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - torch's name
        query,
        key,
        value,
        boundaries,
        boundaries,
        tokens,
        tokens,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return out if boundaries is None else out.view(batch, tokens, *out.shape[1:])


def way_of(device: torch.device, dtype: torch.dtype, width: int) -> Way:
    """How heads of a width attend there. Must have been asked once before a block is traced, since it may try kernels."""
    return _way(device.type, device.index, dtype, width)


@lru_cache
def _way(kind: str, index: int | None, dtype: torch.dtype, width: int) -> Way:
    if kind == "cpu":
        return "masked"
    device = torch.device(kind if index is None else f"{kind}:{index}")
    gives_fp32(kind, dtype)  # asked here, as it too is found out by trying
    if (
        width <= _WIDEST
        and width % 8 == 0
        and dtype.itemsize == 2
        and _flash_works(device, dtype, width)
    ):
        return "flash"
    return "tiled"


def _flash_works(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether flash gives what attention is, gradients too: with a window, with packed documents, and with both."""
    try:
        return all(
            _distance(device, dtype, width, window, is_packed=is_packed) < _TOLERANCE
            for window, is_packed in ((None, False), (9, False), (None, True), (9, True))
        )
    except (RuntimeError, TypeError, NotImplementedError):
        return False  # not built in, not for this card, or with other arguments in this torch


def _distance(
    device: torch.device, dtype: torch.dtype, width: int, window: int | None, *, is_packed: bool
) -> float:
    """Relative difference of flash and tiled attention in fp32, output and gradients, on two small rows."""
    generator = torch.Generator().manual_seed(1)
    tokens, ends = 64, [0, 5, 40, 64, 101, 128, 128, 128]
    shapes = ((2, tokens, 4, width), (2, tokens, 2, width), (2, tokens, 2, width))
    inputs = [torch.randn(one, generator=generator).to(device, dtype) for one in shapes]
    d_out = torch.randn(shapes[0], generator=generator).to(device, dtype)
    boundaries = torch.tensor(ends, dtype=torch.int32, device=device) if is_packed else None
    starts = [max(end for end in ends if end <= place) % tokens for place in range(2 * tokens)]
    starts_BT = torch.tensor(starts, device=device).view(2, tokens) if is_packed else None
    scale, found = width**-0.5, []
    with torch.enable_grad():
        own = [one.detach().requires_grad_() for one in inputs]
        out = flash(*own, scale=scale, window=window, boundaries=boundaries)
        found.append([out.detach(), *torch.autograd.grad(out, own, d_out)])
        own = [one.detach().float().requires_grad_() for one in inputs]
        turned = [one.transpose(1, 2) for one in own]
        out = tiled_attention(*turned, scale=scale, window=window, starts_BT=starts_BT)
        out = out.transpose(1, 2)
        found.append([out.detach(), *torch.autograd.grad(out, own, d_out.float())])
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(*found, strict=True))


def _masked(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Upstream's own, which decides by itself when keys are shared and when the causal flag says it all."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **others)
    return out
