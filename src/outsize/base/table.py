"""The shape table: a family's tensors as plain data, before anything is opened or imported.

Plan sums it, prepare streams by it, placement sizes buffers by it, adapters attach by it. No torch is needed to make or
read one; conformance tests hold it equal to the upstream class built on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "attention",  # projections into and out of attention
    "linear_attention",  # projections into and out of linear attention, and what else only that has
    "mlp",  # feed-forward projections (a fused qkv+mlp matrix counts as attention)
    "modulation",  # adaptive-norm projections
    "embed",  # input projections, token tables, time and guidance embedders
    "head",  # output projection
    "norm",  # scales of norms
    "conv",  # convolutions
    "buffer",  # state that is not a parameter (running statistics)
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an upstream model.

    name: its key in the upstream class's state dict. block: index of the streaming unit, None outside all blocks.
    is_linear: it is the weight of an nn.Linear, so a format may pack it and an adapter may attach to it.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    block: int | None = None
    is_linear: bool = False

    @property
    def num_elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """Path of the module that owns the tensor: the name without its last part."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """All tensors of one variant, in the order in which the model runs its blocks."""

    specs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.specs]
        assert len(set(names)) == len(names), "a shape table names each tensor once"

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __getitem__(self, name: str) -> TensorSpec:
        return self.by_name[name]

    @property
    def by_name(self) -> dict[str, TensorSpec]:
        """All specs by tensor name."""
        return {spec.name: spec for spec in self.specs}

    @property
    def num_blocks(self) -> int:
        """Streaming units; 0 when nothing streams."""
        return 1 + max((spec.block for spec in self.specs if spec.block is not None), default=-1)

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors but buffers."""
        return sum(spec.num_elements for spec in self.specs if spec.role != "buffer")

    def of_block(self, block: int | None) -> tuple[TensorSpec, ...]:
        """Tensors of one block, or (None) those outside all blocks."""
        return tuple(spec for spec in self.specs if spec.block == block)

    def linears(self, roles: Iterable[str] | None = None) -> tuple[TensorSpec, ...]:
        """Weights of the linears inside blocks, of the given roles or of all."""
        wanted = None if roles is None else set(roles)
        return tuple(
            spec
            for spec in self.specs
            if spec.is_linear and spec.block is not None and (wanted is None or spec.role in wanted)
        )
