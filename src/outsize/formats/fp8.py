"""fp8: 8-bit floats with a scale per row or per matrix; plain torch, for any backend.

A row's weights are divided so that its largest becomes the type's largest, and each is rounded to the nearest float: e4m3 has
three bits of mantissa, e5m2 two and more exponents. A scale per matrix is what many published files have; one outlier then
takes exponents from every row. Codes that are in e4m3 already are operands of 8-bit products as they lie (arithmetic).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from outsize.base.parts import Part
from outsize.formats._grouped import is_grouped, refuse_ungrouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.formats.protocol import Encoder

_CODE_VERSION = 1
_CODES = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"}


@dataclass(frozen=True, slots=True)
class Fp8:
    """A matrix in 8-bit floats: 8.01 bits per weight.

    With a scale per tensor, encoding holds the whole matrix in its source's type until the last row is there.
    """

    values: Literal["e4m3", "e5m2"] = "e4m3"
    scales: Literal["row", "tensor"] = "row"

    def describe(self) -> dict[str, Any]:
        """Name, options and code version."""
        return {"name": "fp8", **asdict(self), "code_version": _CODE_VERSION}

    def kernel(self, device: torch.device) -> str:  # noqa: ARG002 - the same everywhere
        return "torch"

    def supports(self, shape: tuple[int, ...]) -> bool:
        """Whether shape is a matrix (N, K) that is not empty."""
        return is_grouped(shape, 1)

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Parts "codes" (N, K) in the 8-bit type, and "scales" (N,) or (1,) fp32."""
        num_scales = shape[0] if self.scales == "row" else 1
        return Part("codes", _CODES[self.values], shape), Part("scales", "F32", (num_scales,))

    def encoder(self, shape: tuple[int, ...]) -> Encoder:
        """An encoder of a matrix (N, K).

        Raises: FormatError if it is no matrix. Its push raises FormatError for a row that is not finite.
        """
        from outsize.formats._fp8_kernels import make_encoder

        refuse_ungrouped(shape, 1, "fp8")
        return make_encoder(shape, self.values, is_by_row=self.scales == "row")

    def decode(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The matrix (N, K) in `dtype`, computed in fp32 and rounded once."""
        from outsize.formats._fp8_kernels import decode

        return decode(parts, shape, dtype)

    def e4m3_scales(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """Scales (N, 1) and (K, 1) fp32 for `decode_e4m3`; None for e5m2."""
        from outsize.formats._fp8_kernels import e4m3_scales

        return None if self.values != "e4m3" else e4m3_scales(parts, shape)

    def decode_e4m3(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        row_scales: Tensor,
        *,
        is_transposed: bool,
    ) -> Tensor:
        """The matrix (N, K) in e4m3, which is the codes themselves; or its transpose (K, N), rounded to its own scales."""
        from outsize.formats._fp8_kernels import transposed_e4m3

        codes = parts["codes"].view(shape)
        return transposed_e4m3(codes, parts["scales"], row_scales) if is_transposed else codes


plugin = Fp8
