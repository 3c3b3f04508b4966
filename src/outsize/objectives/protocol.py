"""What an objective is: from a clean batch to a loss, with nothing drawn that (seed, step, place) does not fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        """Mean over samples of weight x MSE, in fp32; predict takes (noisy in `compute`, sigma_B)."""
