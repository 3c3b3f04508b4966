"""The next token, drawn from logits: seeded, on the host, so that a card's kernels decide nothing but the logits."""

from __future__ import annotations

import torch
from torch import Tensor


def generator_of(seed: int) -> torch.Generator:
    """What a text's tokens are drawn with."""
    return torch.Generator().manual_seed(seed)


def draw_token(
    logits_V: Tensor, *, temperature: float, top_p: float, generator: torch.Generator
) -> int:
    """A token by its probability at a temperature, among the likeliest that together have top_p; at 0 the likeliest.

    Shapes: logits_V (V), on any device, finite. One number is drawn for each token, so two texts with one seed part only
    where their probabilities do.
    """
    logits = logits_V.detach().to("cpu", torch.float64)
    if temperature == 0:
        return int(logits.argmax())
    order = torch.sort(logits / temperature, descending=True, stable=True)
    shares = torch.softmax(order.values, dim=0)
    before = shares.cumsum(0) - shares
    shares = torch.where(before < top_p, shares, torch.zeros(()).double())  # the first stays
    edges = shares.cumsum(0)
    drawn = torch.rand((), generator=generator, dtype=torch.float64) * edges[-1]
    place = min(int(torch.searchsorted(edges, drawn, right=True)), int((shares > 0).sum()) - 1)
    return int(order.indices[place])
