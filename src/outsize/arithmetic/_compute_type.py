"""A product with the decoded matrix, as torch does it; also for matrices that another arithmetic does not take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outsize.arithmetic.protocol import FrozenMatrix, Parts

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ComputeType:
    """Weight, input and result all in the type of the activations."""

    def fault(self, device: torch.device) -> str | None:  # noqa: ARG002 - every device can
        return None

    def supports(self, shape: tuple[int, int]) -> bool:  # noqa: ARG002 - the protocol's signature
        return True

    def prepare(self, matrix: FrozenMatrix, parts: Parts) -> Parts:  # noqa: ARG002 - nothing is needed
        return ()

    def multiply(
        self,
        x: Tensor,
        matrix: FrozenMatrix,
        parts: Parts,
        prepared: Parts,  # noqa: ARG002 - nothing was
        bias: Tensor | None,
    ) -> Tensor:
        from torch.nn.functional import linear

        return linear(x, matrix.decode(parts, x.dtype), bias)

    def multiply_transposed(
        self,
        grad: Tensor,
        matrix: FrozenMatrix,
        parts: Parts,
        prepared: Parts,  # noqa: ARG002 - as above
    ) -> Tensor:
        return grad @ matrix.decode(parts, grad.dtype)
