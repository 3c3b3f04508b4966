"""Rows that hold several documents: which tokens may see which, in the form that each way of attending takes.

A row of one document needs nothing said: causal attention is a flag. Padding behind the document needs nothing either, since
nothing before it looks there. Several documents are told to kernels by where they begin; only where those must be given a
mask is one made, of blocks along the diagonal.

Dimensions: B batch rows, T tokens of a row, W documents at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.families._attention import Way

# Tokens a document has on average at least, in the shortest list of boundaries that holds them all. Its length is a shape, and
# every shape is compiled, so there are few; a list that is too long costs kernels that begin and have nothing to do.
_MEAN_TOKENS = (128, 16, 1)


def several_documents(segments_BT: Tensor | None) -> Tensor | None:
    """The segments, or None when every row holds one document with padding behind it at most.

    Looking at segments that lie on a device waits for it; on the host it costs nothing.
    """
    if segments_BT is None:
        return None
    begins = (segments_BT[:, 1:] != segments_BT[:, :-1]) & (segments_BT[:, 1:] >= 0)
    return segments_BT if bool(begins.any()) else None


def reach(
    way: Way, segments_BT: Tensor | None, num_tokens: int, window: int | None, device: torch.device
) -> Tensor | None:
    """What a way of attending is told: see `_attention.py`. segments_BT: as several_documents gives them."""
    if way == "masked":
        on_device = None if segments_BT is None else segments_BT.to(device, non_blocking=True)
        return attention_mask(on_device, num_tokens, window, device)
    if segments_BT is None:
        return None
    told = boundaries(segments_BT) if way == "flash" else starts(segments_BT)
    return told.to(device, non_blocking=True)


def boundaries(segments_BT: Tensor) -> Tensor:
    """Where documents begin in rows put one after another, then the end, repeated: (W + 1) int32, on the host."""
    import torch

    batch, tokens = segments_BT.shape
    begins = _begins(segments_BT).flatten().nonzero().squeeze(1)
    sizes = (max(batch, batch * tokens // mean) for mean in _MEAN_TOKENS)
    most = next(one for one in sizes if one >= len(begins))
    found = torch.full((most + 1,), batch * tokens, dtype=torch.int32)
    found[: len(begins)] = begins
    return found


def starts(segments_BT: Tensor) -> Tensor:
    """Of each token the place in its row where its document begins: (B, T) int32, on the host."""
    import torch

    places = torch.arange(segments_BT.shape[1], dtype=torch.int32)
    return places.where(_begins(segments_BT), 0).cummax(dim=1).values


def _begins(segments_BT: Tensor) -> Tensor:
    """True where another document than before begins, or a row, or its padding."""
    import torch

    segments = segments_BT.cpu()
    changes = segments[:, 1:] != segments[:, :-1]
    return torch.nn.functional.pad(changes, (1, 0), value=True)


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
