"""The ledger: every piece of memory that this process believes to lie on its device, by owner and name.

A piece is one storage, whoever's views lie in it: it is at home or away as a whole, and counts once. Who names it first owns
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One storage. content: all its bytes, uint8 (n,); name: of the first tensor in it, and how many more there are."""

    owner: str
    name: str
    content: Tensor

    @property
    def num_bytes(self) -> int:
        return self.content.numel()

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.content.data_ptr()

    @property
    def place(self) -> torch.device:
        """Where torch says it lies."""
        return self.content.device


def ledger_of(owned: Mapping[str, Named]) -> list[Piece]:
    """The pieces in which these tensors lie, in the order in which they are named; tensors without storage are none."""
    names: dict[tuple[torch.device, int], list[str]] = {}
    first: dict[tuple[torch.device, int], tuple[str, Tensor]] = {}
    for owner, tensors in owned.items():
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.is_meta or not storage.nbytes():
                continue
            key = (tensor.device, storage.data_ptr())
            if key not in first:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                first[key] = (owner, whole)
            names.setdefault(key, []).append(name)
    return [Piece(owner, _together(names[key]), whole) for key, (owner, whole) in first.items()]


def owners_of(pieces: Sequence[Piece]) -> dict[str, int]:
    """Bytes by owner."""
    total: dict[str, int] = {}
    for piece in pieces:
        total[piece.owner] = total.get(piece.owner, 0) + piece.num_bytes
    return total


def _together(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
