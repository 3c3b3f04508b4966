"""Rows that hold several documents: which tokens may see which.

A row of one document runs without a mask: causal attention is then a flag, and flash kernels take it. Padding behind the
document needs none either, since nothing before it looks there. Several documents get a mask of blocks along the diagonal.

Dimensions: B batch rows, T tokens of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def several_documents(segments_BT: Tensor | None, device: torch.device) -> Tensor | None:
    """The segments on the device, or None when every row holds one document with padding behind it at most.

    Looking at segments that lie on a device waits for it; on the host it costs nothing.
    """
    if segments_BT is None:
        return None
    begins = (segments_BT[:, 1:] != segments_BT[:, :-1]) & (segments_BT[:, 1:] >= 0)
    return segments_BT.to(device, non_blocking=True) if bool(begins.any()) else None


def attention_mask(
    segments_BT: Tensor | None, num_tokens: int, window: int | None, device: torch.device
) -> Tensor | None:
    """True where a token (row) sees another (column): (B or 1, 1, T, T) bool; None when the causal flag says it all.

    segments_BT: as several_documents gives them. window: how many tokens one sees, itself included.
    """
    import torch

    has_window = window is not None and window < num_tokens
    if segments_BT is None and not has_window:
        return None
    place = torch.arange(num_tokens, device=device)
    distance = place[:, None] - place[None, :]
    sees = distance >= 0
    if window is not None and has_window:
        sees = sees & (distance < window)
    if segments_BT is None:
        return sees[None, None]
    # padding sees padding, so that no row of the mask is empty and no softmax undefined
    return (sees & (segments_BT[:, :, None] == segments_BT[:, None, :]))[:, None]
