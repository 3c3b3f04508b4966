"""plain: a tensor as itself, in a float dtype; the format of everything that is not packed.

It holds any shape, not only matrices: biases, norms, convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from outsize.base.parts import Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.formats.protocol import Encoder

_CODES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_CODE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor of any shape, cast. Two bytes per weight, or four."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"

    def describe(self) -> dict[str, Any]:
        """Name, options and code version."""
        return {"name": "plain", **asdict(self), "code_version": _CODE_VERSION}

    def kernel(self, device: torch.device) -> str:  # noqa: ARG002 - the same everywhere
        return "torch"

    def supports(self, shape: tuple[int, ...]) -> bool:  # noqa: ARG002 - the protocol's signature
        """Every shape."""
        return True

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """One unnamed part of the tensor's own shape."""
        return (Part("", _CODES[self.dtype], shape),)

    def encoder(self, shape: tuple[int, ...]) -> Encoder:
        """An encoder that casts; rows are slices of the first dimension.

        Its push raises FormatError for a row that is not finite, or becomes so in the dtype (70000 in fp16).
        """
        from outsize.formats._slabs import SlabEncoder, refuse_non_finite

        def cast_chunk(rows: Tensor, first_row: int) -> dict[str, Tensor]:
            cast = rows.to(self._torch_dtype())
            refuse_non_finite(cast, first_row, f"is not finite, or too large for {self.dtype}")
            return {"": cast}

        return SlabEncoder(shape, cast_chunk, lambda flat: {"": flat[""].view(shape)})

    def decode(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The tensor in `dtype`; the stored one itself when it is of that dtype."""
        return parts[""].view(shape).to(dtype)

    def _torch_dtype(self) -> torch.dtype:
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.dtype]


plugin = Plain
