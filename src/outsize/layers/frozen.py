"""A linear whose frozen weight is packed bytes: decoded for a product, never kept.

`FrozenLinear` is an nn.Linear to everybody else (PEFT wraps it like any other), but it owns no weight's values. While its block
runs it is bound to views of the block's packet; each product decodes the matrix, uses it and drops it. Backward decodes
again from the same views, so autograd keeps packed bytes, not decoded ones.

The views saved for backward share their packet's version counter: should a slot be overwritten too early, autograd
refuses, instead of using another block's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outsize.arithmetic._compute_type import ComputeType

if TYPE_CHECKING:
    from outsize.arithmetic.protocol import Arithmetic, FrozenMatrix
    from outsize.formats.protocol import Format, Turning


class DecodeMatmul(torch.autograd.Function):
    """y = x @ decode(parts).T + bias, and its gradient for x alone: the weight is frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        layer: FrozenLinear,
        *parts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.layer = layer
        return layer.multiply(x, parts, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        layer: FrozenLinear = ctx.layer
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = layer.multiply_transposed(grad, ctx.saved_tensors)
        return (grad_x, None, None, *(None for _ in ctx.saved_tensors))


class FrozenLinear(nn.Linear):
    """A frozen linear over packed parts.

    Shapes: x (..., in_features) -> (..., out_features). The bias, if any, is an ordinary frozen parameter. arithmetic: how
    products are computed; the compute type's own where none is given or the matrix has a shape that it does not take.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool,
        fmt: Format,
        compute: torch.dtype,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        # The weight exists on meta alone, in the compute type: PEFT and T5 ask for its device and type.
        super().__init__(in_features, out_features, bias=has_bias, device="meta", dtype=compute)
        self.requires_grad_(False)
        self.format = fmt
        takes = arithmetic is not None and arithmetic.supports((out_features, in_features))
        self.arithmetic = arithmetic if arithmetic is not None and takes else ComputeType()
        self.part_names = tuple(part.name for part in fmt.parts((out_features, in_features)))
        self.parts: tuple[Tensor, ...] | None = None
        self._shape = (out_features, in_features)
        self._turning: Turning | None = getattr(fmt, "turning", lambda: None)()
        self._prepared: tuple[Tensor, ...] | None = None

    def bind(self, parts: Mapping[str, Tensor] | None) -> None:
        """Take views of a packet as the weight, or (None) have no weight from now on."""
        if parts is None:
            self.parts = None
            return
        stored = tuple(parts[name] for name in self.part_names)
        if self._prepared is None:
            with torch.no_grad():
                self._prepared = self.arithmetic.prepare(self._operand(), stored)
        self.parts = (*stored, *self._prepared)

    def multiply(self, x: Tensor, parts: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
        """The product with the matrix that these parts hold, prepared ones included."""
        stored, prepared = self._parted(parts)
        x = x if self._turning is None else self._turning.turn(x)
        return self.arithmetic.multiply(x, self._operand(), stored, prepared, bias)

    def multiply_transposed(self, grad: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """The gradient of what was multiplied."""
        stored, prepared = self._parted(parts)
        grad_x = self.arithmetic.multiply_transposed(grad, self._operand(), stored, prepared)
        return grad_x if self._turning is None else self._turning.turn_back(grad_x)

    def project(self, rows: Tensor) -> Tensor:
        """Rows (..., in_features) times the bound matrix, decoded exactly to their type; no gradient, no bias."""
        assert self.parts is not None, "a frozen linear runs only while its block is acquired"
        stored, _ = self._parted(self.parts)
        return functional.linear(rows, self.decode(stored, rows.dtype))

    def row_squares(self) -> Tensor:
        """The squared length of each row of the bound matrix (out_features), fp32."""
        assert self.parts is not None, "a frozen linear runs only while its block is acquired"
        stored, _ = self._parted(self.parts)
        weight = self.decode(stored, self.weight.dtype)
        lengths: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
        return lengths.square()

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The matrix (out_features, in_features)."""
        return self.format.decode(self._named(parts), self._shape, dtype)

    def e4m3_scales(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor] | None:
        """Scales of the rows of the matrix and of its transpose; None where the format has no such decoding."""
        find = getattr(self.format, "e4m3_scales", None)
        scales: tuple[Tensor, Tensor] | None = (
            None if find is None else find(self._named(parts), self._shape)
        )
        return scales

    def decode_e4m3(
        self, parts: tuple[Tensor, ...], row_scales: Tensor, *, is_transposed: bool
    ) -> Tensor:
        """The matrix or its transpose in e4m3, each row divided by its scale."""
        # only some formats have it; those that gave scales do
        decode: Callable[..., Tensor] = self.format.decode_e4m3  # type: ignore[attr-defined]
        return decode(self._named(parts), self._shape, row_scales, is_transposed=is_transposed)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the bound weight."""
        assert self.parts is not None, "a frozen linear runs only while its block is acquired"
        # without a gradient to give there is nothing for an autograd function to do
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self.multiply(x, self.parts, self.bias)
        multiply: Callable[..., Tensor] = DecodeMatmul.apply
        return multiply(x, self.bias, self, *self.parts)

    def _operand(self) -> FrozenMatrix:
        """What is multiplied with: the matrix, or what its format keeps in its place."""
        return self if self._turning is None else _Turned(self, self._turning)

    def _parted(self, parts: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Those that are stored, and those that the arithmetic prepared."""
        count = len(self.part_names)
        return parts[:count], parts[count:]

    def _named(self, parts: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(self.part_names, parts, strict=True))

    def extra_repr(self) -> str:
        """Shape and format, for printed models."""
        return f"{super().extra_repr()}, format={self.format.describe()['name']}"


class _Turned:
    """A matrix as its format keeps it, inputs turned; activations are turned to match."""

    def __init__(self, layer: FrozenLinear, turning: Turning) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._layer, self._turning = layer, turning

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        shape = (self.out_features, self.in_features)
        named = dict(zip(self._layer.part_names, parts, strict=True))
        return self._turning.decode(named, shape, dtype)

    def e4m3_scales(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor] | None:
        return self._layer.e4m3_scales(parts)

    def decode_e4m3(
        self, parts: tuple[Tensor, ...], row_scales: Tensor, *, is_transposed: bool
    ) -> Tensor:
        return self._layer.decode_e4m3(parts, row_scales, is_transposed=is_transposed)
