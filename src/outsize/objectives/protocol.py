"""What an objective is: from a clean batch to a loss, with nothing drawn that (seed, step, place) does not fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outsize.base.catalogue import Catalogue

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OBJECTIVES = Catalogue("outsize.objectives", "objective")


class FlowObjective(Protocol):
    """Rectified flow: x_t = (1 - sigma) x + sigma noise, target = noise - x."""

    def draw(
        self, seeds: Sequence[int], shape: tuple[int, ...], mu: float
    ) -> tuple[Tensor, Tensor]:
        """sigma_B (fp32, CPU) and noise (B, *shape) (fp32, CPU), one generator per sample seed."""

    def loss(  # noqa: PLR0917 - read in the order in which a step makes them
        self,
        predict: Callable[[Tensor, Tensor], Tensor],
        clean: Tensor,
        sigma_B: Tensor,
        noise: Tensor,
        weight_B: Tensor,
        compute: torch.dtype,
    ) -> Tensor:
        """Mean over samples of weight x what errors count, in fp32; predict takes (noisy in `compute`, sigma_B).

        weight_B: of each sample (B,), or of each latent cell (B, 1, H, W).
        """

    def squared(  # noqa: PLR0917
        self,
        predict: Callable[[Tensor, Tensor], Tensor],
        clean: Tensor,
        sigma_B: Tensor,
        noise: Tensor,
        weight_B: Tensor,
        compute: torch.dtype,
    ) -> Tensor:
        """As `loss`, of squared errors: what is measured on pictures that are held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """What turns hidden states into logits: softcap x tanh((weight h + bias) / softcap), or without the cap.

    weight (V, D), frozen, on the device or in host memory (pinned, where copies shall run beside the computation); bias (V).
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Nats:
    """What tokens cost: the sum of their losses in nats, and their number. Sums of parts add up."""

    total: float
    num_tokens: int

    @property
    def mean(self) -> float:
        """Nats a token; NaN where there is none."""
        return self.total / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """The exponential of the mean; infinite where that is beyond what a float holds."""
        try:
            return math.exp(self.mean)
        except OverflowError:
            return math.inf

    def __add__(self, other: Nats) -> Nats:
        return Nats(self.total + other.total, self.num_tokens + other.num_tokens)


class TileCopies(Protocol):
    """Copies on two tracks beside the computation, as a device makes them."""

    def open_(self, track: int) -> None:
        """Let the track's next copies follow all work queued so far."""

    def copy(self, track: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Queue copies as (target, source)."""

    def wait(self, track: int) -> None:
        """Let work queued from now on follow the track's last copies."""


class NextTokenObjective(Protocol):
    """Cross-entropy of labels that are shifted already: labels_BT[b, t] is what position t predicts, -100 what is not trained."""

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
        """Sum of losses by num_trained, the trained tokens of the whole update; a scalar in fp32 with gradient for hidden.

        weight_BT: factors of tokens. labels on the CPU spare a wait for the device. copies: brings a head that lies in
        host memory.
        """

    def nats(
        self,
        hidden_BTD: Tensor,
        head: OutputHead,
        labels_BT: Tensor,
        *,
        copies: TileCopies | None = None,
    ) -> Nats:
        """The cost of the tokens that are trained or held out; no gradient."""
