"""What an optimiser plug-in is: a frozen dataclass of its options, called with fp32 masters to make a torch optimiser.

A plug-in file binds `plugin` to it and imports torch only when called: plans ask for sizes and faults. Its state must
consist of tensors and plain numbers, so that a checkpoint can hold it exactly in safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from outsize.base.catalogue import Catalogue
from outsize.base.options import build_with_options
from outsize.train.optimizers._library import require_library

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

OPTIMIZERS = Catalogue("outsize.train.optimizers", "optimizer")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What every optimiser is made from; the learning rate is set anew before each step."""

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float


class Asked(Protocol):
    """What a recipe's train section says, as far as an optimiser may have something against it."""

    @property
    def learning_rate(self) -> float: ...

    @property
    def betas(self) -> tuple[float, float]: ...

    @property
    def schedule(self) -> str: ...

    @property
    def ema(self) -> float | None: ...


class OptimizerFactory(Protocol):
    """A plug-in of this folder, made from its options."""

    def __call__(
        self, masters: Sequence[nn.Parameter], settings: OptimizerSettings
    ) -> torch.optim.Optimizer:
        """The optimiser over these masters: one flat tensor that holds them all, so it must work number by number.

        Raises: MachineFault when the library that it comes from is not installed.
        """

    def state_bytes(self, elements: int) -> int:
        """Bytes of state for one tensor of that many numbers; no torch."""


class Replaceable(Protocol):
    """What a plug-in adds that has a smaller one beside it, of the same step sizes: plans propose it where memory is short."""

    smaller: ClassVar[str]


class Borrowed(Protocol):
    """What a plug-in adds that comes from a library which not everybody has: the name of its module and of its package."""

    library: ClassVar[str]


class Particular(Protocol):
    """What a plug-in adds that does not go with every recipe."""

    def fault(self, train: Asked) -> tuple[str, str] | None:
        """A field of the recipe's train section and what is wrong with it; None when all is well."""


class Averaging(Protocol):
    """What a plug-in adds whose weights are to be used elsewhere than where its gradients are taken."""

    def averaged(self, optimizer: torch.optim.Optimizer, master: Tensor) -> Tensor:
        """The weights to use, in new memory; the master and the optimiser's state stay as they are."""


def require_optimizer(name: str) -> None:
    """Look for the library of an optimiser; no torch.

    Raises: MachineFault saying how to install it.
    """
    library = getattr(OPTIMIZERS.load(name), "library", None)
    if library is not None:
        require_library(library)


def make_optimizer(name: str, options: Mapping[str, Any] | None = None) -> OptimizerFactory:
    """The optimiser of that name with those options.

    Raises: RecipeError for an unknown name, option or value.
    """
    made: OptimizerFactory = build_with_options(
        f"optimizer {name!r}", OPTIMIZERS.load(name), options or {}
    )
    return made
