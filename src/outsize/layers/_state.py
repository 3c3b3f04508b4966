"""A block's own tensors as arguments: taken in a fixed order, and others put in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from outsize.layers.frozen import FrozenLinear


class BlockState:
    """A block's own tensors in a fixed order: parameters, buffers, and the parts that are bound to its frozen linears.

    is_fixed: which of them lie at one of few addresses: packed bytes, in a slot or where they stay.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owned: list[tuple[dict[str, Any], str]] = []
        for owner in module.modules():
            for held in (owner._parameters, owner._buffers):  # noqa: SLF001 - to put others in their place
                self._owned += [
                    (held, name)
                    for name, one in held.items()
                    if one is not None and not one.is_meta
                ]
        self._frozen = [one for one in module.modules() if isinstance(one, FrozenLinear)]
        self._is_trained = [held[name].requires_grad for held, name in self._owned]
        self.is_fixed = (False,) * len(self._owned) + tuple(
            number < len(one.part_names)
            for one in self._frozen
            for number in range(_num_parts(one))
        )
        self._decode_once()

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that learn."""
        return [
            held[name]
            for (held, name), learns in zip(self._owned, self._is_trained, strict=True)
            if learns
        ]

    def tensors(self) -> list[Tensor]:
        """All, as they are bound now."""
        own: list[Tensor] = [held[name] for held, name in self._owned]
        for layer in self._frozen:
            assert layer.parts is not None, "a block runs only while it is acquired"
            own += layer.parts
        return own

    def differentiable(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The same tensors with those that learn as leaves; and these alone."""
        learns = [*self._is_trained, *(False for _ in tensors[len(self._is_trained) :])]
        own = [
            one.detach().requires_grad_(is_leaf)
            for one, is_leaf in zip(tensors, learns, strict=True)
        ]
        return own, [one for one in own if one.requires_grad]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Others in the place of all, in the order of `tensors()`, within the block."""
        before = self.tensors()
        self._put(tensors)
        try:
            yield
        finally:
            self._put(before)

    def _decode_once(self) -> None:
        """Use every format before it is traced: what it makes at first use, and keeps, would be a tensor without values."""
        by_size = sorted(self._frozen, key=lambda one: one.in_features * one.out_features)
        smallest = {repr(one.format): one for one in reversed(by_size)}
        for one in smallest.values():
            assert one.parts is not None, "a block runs only while it is acquired"
            one.decode(one.parts[: len(one.part_names)], one.weight.dtype)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        rest = iter(tensors)
        for held, name in self._owned:
            held[name] = next(rest)
        for layer in self._frozen:
            layer.parts = tuple(next(rest) for _ in range(_num_parts(layer)))


def _num_parts(layer: FrozenLinear) -> int:
    assert layer.parts is not None, "a block runs only while it is acquired"
    return len(layer.parts)
