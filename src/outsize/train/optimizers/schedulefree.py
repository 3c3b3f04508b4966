"""Schedule-free AdamW (arXiv 2405.15682) by its authors' library: no schedule, the average of the path is what is used.

Gradients are taken at y; what is evaluated, sampled and exported is the average x, which follows from y and z of the
state: x = y + (1 - 1/beta1) (z - y). The library turns y into x in place and back, which rounds; here x is computed
aside, so that looking at it changes no bit of the training. 8 bytes of state per trainable number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from outsize.train.optimizers._library import library
from outsize.train.optimizers.protocol import Asked, OptimizerSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_STATE_BYTES = 2 * 4  # z and the second moment, fp32


@dataclass(frozen=True, slots=True)
class ScheduleFree:
    """The plug-in. r: step n counts n^r in the average. weight_lr_power: and as its step size to that power."""

    library: ClassVar[str] = "schedulefree"
    r: float = 0.0
    weight_lr_power: float = 2.0

    def state_bytes(self, elements: int) -> int:
        return _STATE_BYTES * elements

    def fault(self, train: Asked) -> tuple[str, str] | None:
        return averaging_fault("schedulefree", train)

    def __call__(
        self, masters: Sequence[nn.Parameter], settings: OptimizerSettings
    ) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = library(self.library).AdamWScheduleFree(
            list(masters),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            r=self.r,
            weight_lr_power=self.weight_lr_power,
        )
        made.train()  # type: ignore[attr-defined] # the library's own
        return made

    def averaged(self, optimizer: torch.optim.Optimizer, master: Tensor) -> Tensor:
        return average_of(optimizer, master)


def averaging_fault(name: str, train: Asked) -> tuple[str, str] | None:
    """What does not go with an optimiser that averages by itself, if anything."""
    if train.schedule != "constant":
        return (
            "schedule",
            f"must be constant with {name}: its average takes the place of a schedule",
        )
    if train.ema is not None:
        return "ema", f"must be null with {name}, which averages by itself"
    if train.betas[0] == 0:
        return (
            "betas",
            f"must begin with a number above 0 with {name}, where it says how the average is mixed in",
        )
    return None


def average_of(optimizer: torch.optim.Optimizer, master: Tensor) -> Tensor:
    """X of schedule-free weights: the very expression of the library's eval(), not in place."""
    import torch

    (group,) = optimizer.param_groups
    assert group["train_mode"], "it is never put into evaluation, which would round the weights"
    z = [state["z"] for state in optimizer.state.values() if "z" in state]
    with torch.no_grad():
        if not z:
            return master.detach().clone()
        (end,) = z
        return torch.lerp(master.detach(), end, 1 - 1 / group["betas"][0])


plugin = ScheduleFree
