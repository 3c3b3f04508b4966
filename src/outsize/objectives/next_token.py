"""Next-token prediction: the cross-entropy of the word that follows, over the tokens that are trained.

A token counts the same in whichever micro-batch of an update it lies: the sum of losses is divided by the number of trained
tokens of the whole update, as the caller counts them before it begins. Logits exist in tiles alone (`_tiles.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outsize.objectives.protocol import Nats, OutputHead

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.objectives.protocol import TileCopies


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken:
    """Cross-entropy in tiles. tile_bytes: memory for a tile of logits and what it is made with."""

    tile_bytes: int = 256 << 20

    def loss(
        self,
        hidden_BTD: Tensor,
        head: OutputHead,
        labels_BT: Tensor,
        *,
        num_trained: float,
        weight_BT: Tensor | None = None,
        copies: TileCopies | None = None,
    ) -> Tensor:
        """The share of an update's mean loss that this micro-batch has; 0, with a gradient of 0, where it trains nothing."""
        from outsize.objectives._tiles import tiled_cross_entropy

        return tiled_cross_entropy(
            hidden_BTD,
            head.weight,
            labels_BT,
            softcap=head.softcap,
            bias=head.bias,
            weight_N=weight_BT,
            denominator=num_trained,
            tile_bytes=self.tile_bytes,
            copies=copies,
        )

    def nats(
        self,
        hidden_BTD: Tensor,
        head: OutputHead,
        labels_BT: Tensor,
        *,
        copies: TileCopies | None = None,
    ) -> Nats:
        """What held-out tokens cost; computed as in training, without a gradient."""
        from outsize.objectives._tiles import token_losses

        losses = token_losses(
            hidden_BTD,
            head.weight,
            labels_BT,
            softcap=head.softcap,
            bias=head.bias,
            tile_bytes=self.tile_bytes,
            copies=copies,
        )
        # a held-out text has more tokens than fp32 has digits for
        return Nats(float(losses.double().sum()), len(losses))


plugin = NextToken
