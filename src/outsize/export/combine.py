"""Several adapters as one, and an adapter of lower rank: exact sums of low-rank pairs, and their best approximations.

A sum of pairs is a pair: B A + B' A' = [B B'] [A; A'], so adding adapters rounds nothing but their scales. Lowering a
rank needs no matrix of the weight's size: with B = Q R and A' = Q' R' the singular values of B A are those of the small
core R R'' (r, r), and its singular vectors, turned by Q and Q', are those of the delta (Eckart and Young).

Dimensions: r rank, N out_features, K in_features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outsize.base.errors import AdapterError
from outsize.dialects.protocol import AdapterWeights, LoraPair

if TYPE_CHECKING:
    from torch import Tensor


def combined(weighted: Sequence[tuple[AdapterWeights, float]]) -> AdapterWeights:
    """The adapter whose deltas are the weighted sum of those of several.

    One adapter alone keeps its factors, and the weight goes into its alpha. Of several, scale and weight are multiplied
    into each B, all in fp32; ranks add up.
    Raises: AdapterError naming every module whose shapes differ between them, or when nothing is left.
    """
    if len(weighted) == 1 and weighted[0][1] != 0:
        ((one, weight),) = weighted
        return AdapterWeights(one.pairs, one.rank, one.alpha * weight, subjects=one.subjects)
    parts: dict[str, list[LoraPair]] = {}
    for adapter, weight in weighted:
        if weight != 0:
            for module, pair in adapter.pairs.items():
                B = (pair.B.double() * (adapter.scale * weight)).float()
                parts.setdefault(module, []).append(LoraPair(pair.A.float(), B))
    faults = [
        f"{module}: {', '.join(f'{one.B.shape[0]} x {one.A.shape[1]}' for one in several)}"
        for module, several in parts.items()
        if len({(one.B.shape[0], one.A.shape[1]) for one in several}) > 1
    ]
    if faults:
        listed = "\n  ".join(faults)
        raise AdapterError(f"adapters of different bases cannot be added:\n  {listed}")
    if not parts:
        raise AdapterError("every adapter has the weight 0, so nothing is left of them")
    pairs = {module: _stacked(several) for module, several in parts.items()}
    rank = max(pair.rank for pair in pairs.values())
    subjects = frozenset[str]().union(*(one.subjects for one, _ in weighted))
    return AdapterWeights(pairs, rank, float(rank), subjects=subjects)


def _stacked(pairs: Sequence[LoraPair]) -> LoraPair:
    import torch

    if len(pairs) == 1:
        return pairs[0]
    return LoraPair(torch.cat([one.A for one in pairs]), torch.cat([one.B for one in pairs], dim=1))


@dataclass(frozen=True, slots=True)
class Lowered:
    """What became of one module: its ranks, and the Frobenius norms of its delta and of what was cut off."""

    old_rank: int
    new_rank: int
    norm: float
    lost: float

    @property
    def error(self) -> float:
        """The part of the delta that was lost, relative to it."""
        return self.lost / self.norm if self.norm else 0.0


def lowered(
    adapter: AdapterWeights, *, rank: int | None = None, energy: float | None = None
) -> tuple[AdapterWeights, dict[str, Lowered]]:
    """The nearest adapter of a lower rank, in the Frobenius norm, and what was lost of each module.

    rank: of every module at most. energy: the smallest rank of each module that keeps this share of its squared norm.
    Both: the lower. Factors keep their dtype and are balanced; alpha / rank is kept, and the rank stated is the highest.
    Raises: AdapterError when neither is given or one makes no sense.
    """
    _check_target(rank, energy)
    pairs: dict[str, LoraPair] = {}
    told: dict[str, Lowered] = {}
    for module, pair in adapter.pairs.items():
        pairs[module], told[module] = _lower(pair, abs(adapter.scale), rank, energy)
    highest = max(pair.rank for pair in pairs.values())
    weights = AdapterWeights(pairs, highest, adapter.scale * highest, subjects=adapter.subjects)
    return weights, told


def overall_error(told: Mapping[str, Lowered]) -> float:
    """Relative error of all deltas together."""
    norm = math.sqrt(sum(one.norm**2 for one in told.values()))
    return math.sqrt(sum(one.lost**2 for one in told.values())) / norm if norm else 0.0


def _check_target(rank: int | None, energy: float | None) -> None:
    if rank is None and energy is None:
        raise AdapterError("name a rank, or the share of the delta's energy to keep")
    if rank is not None and rank < 1:
        raise AdapterError(f"the rank is {rank}; it must be at least 1")
    if energy is not None and not 0 < energy <= 1:
        raise AdapterError(f"the energy is {energy:g}; it is a share, more than 0 and at most 1")


def _lower(
    pair: LoraPair, scale: float, rank: int | None, energy: float | None
) -> tuple[LoraPair, Lowered]:
    import torch

    left, R = torch.linalg.qr(pair.B.double())
    right, R2 = torch.linalg.qr(pair.A.double().T)
    U, values, Vh = torch.linalg.svd(R @ R2.T)
    kept = min(_needed(values, energy), values.numel() if rank is None else rank)
    kept = max(1, min(kept, pair.rank))
    norm, lost = float(values.norm()), float(values[kept:].norm())
    figures = Lowered(pair.rank, kept, scale * norm, scale * lost)
    if kept == pair.rank:
        return pair, Lowered(pair.rank, kept, scale * norm, 0.0)
    root = values[:kept].sqrt()
    A = root[:, None] * (Vh[:kept] @ right.T)
    B = left @ (U[:, :kept] * root)
    return LoraPair(A.to(pair.A.dtype), B.to(pair.B.dtype)), figures


def _needed(values: Tensor, energy: float | None) -> int:
    """How many singular values hold that share of the squared norm."""
    if energy is None or not bool(values.any()):
        return values.numel()
    squares = values.square().flip(0).cumsum(0).flip(0)  # what is lost when cutting before each
    is_too_much = squares > (1 - energy) * squares[0] * (1 + 1e-12)
    return max(1, int(is_too_much.sum()))
