"""How a product with a frozen matrix is computed: in which type, and from which decoding of its few bits.

The adapter's own products, norms and attention are never touched: they stay in the device's compute type. A plug-in binds
`plugin` to an Arithmetic; its module imports without torch.

Dimensions: N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from outsize.base.catalogue import Catalogue

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ARITHMETICS = Catalogue("outsize.arithmetic", "arithmetic")

Parts = tuple["Tensor", ...]


class FrozenMatrix(Protocol):
    """A matrix (N, K) that is stored in few bits."""

    in_features: int
    out_features: int

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The matrix (N, K)."""

    def e4m3_scales(self, parts: Parts) -> tuple[Tensor, Tensor] | None:
        """Scales (N, 1) and (K, 1) fp32 for the rows of the matrix and of its transpose in e4m3.

        None where its format cannot be decoded to that straight from its bits.
        """

    def decode_e4m3(self, parts: Parts, row_scales: Tensor, *, is_transposed: bool) -> Tensor:
        """The matrix (N, K), or its transpose (K, N), in e4m3, each row divided by its scale."""


class Arithmetic(Protocol):
    """A plug-in of this folder."""

    def fault(self, device: torch.device) -> str | None:
        """Why it cannot be used on a device; None when it can. Checked by computing, once per device."""

    def supports(self, shape: tuple[int, int]) -> bool:
        """Whether it takes matrices of this shape; others are multiplied in the compute type."""

    def prepare(self, matrix: FrozenMatrix, parts: Parts) -> Parts:
        """What it wants computed once for each matrix and kept on the device: small tensors, or ()."""

    def multiply(
        self,
        x: Tensor,
        matrix: FrozenMatrix,
        parts: Parts,
        prepared: Parts,
        bias: Tensor | None,
    ) -> Tensor:
        """The product x W' + bias; x (..., K) -> (..., N), in x's type."""

    def multiply_transposed(
        self, grad: Tensor, matrix: FrozenMatrix, parts: Parts, prepared: Parts
    ) -> Tensor:
        """The gradient of x, grad W; grad (..., N) -> (..., K), in grad's type."""
