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

from outsize.arithmetic._compute_type import ComputeType

if TYPE_CHECKING:
    from outsize.arithmetic.protocol import Arithmetic
    from outsize.formats.protocol import Format


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
        return layer.arithmetic.multiply(x, layer, parts, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        layer: FrozenLinear = ctx.layer
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = layer.arithmetic.multiply_transposed(grad, layer, ctx.saved_tensors)
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

    def bind(self, parts: Mapping[str, Tensor] | None) -> None:
        """Take views of a packet as the weight, or (None) have no weight from now on."""
        self.parts = None if parts is None else tuple(parts[name] for name in self.part_names)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The matrix (out_features, in_features)."""
        named = dict(zip(self.part_names, parts, strict=True))
        return self.format.decode(named, (self.out_features, self.in_features), dtype)

    def decode_e4m3(
        self, parts: tuple[Tensor, ...], *, is_transposed: bool
    ) -> tuple[Tensor, Tensor] | None:
        """The matrix or its transpose in e4m3 and the scale of each row; None where the format has no such decoding."""
        decode = getattr(self.format, "decode_e4m3", None)
        if decode is None:
            return None
        named = dict(zip(self.part_names, parts, strict=True))
        shape = (self.out_features, self.in_features)
        decoded: tuple[Tensor, Tensor] | None = decode(named, shape, is_transposed=is_transposed)
        return decoded

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the bound weight."""
        assert self.parts is not None, "a frozen linear runs only while its block is acquired"
        # Not only quicker: given an autograd function of *parts that needs no gradient, torch.compile (2.6 to 2.13) passes
        # two parts without their ctx.
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self.arithmetic.multiply(x, self, self.parts, self.bias)
        multiply: Callable[..., Tensor] = DecodeMatmul.apply
        return multiply(x, self.bias, self, *self.parts)

    def extra_repr(self) -> str:
        """Shape and format, for printed models."""
        return f"{super().extra_repr()}, format={self.format.describe()['name']}"
