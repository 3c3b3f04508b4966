"""int8: signed 8-bit integers with a scale per row or per group along it; weight-only, plain torch, for any backend.

weight = code * scale, codes -127 to 127. A row's scale is kept in fp32. A group's is rounded to bf16 first and the codes
chosen for the rounded one; bf16 has fp32's exponents, so no group is too small or too large for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from outsize.base.parts import Part
from outsize.formats._grouped import is_grouped, num_groups, refuse_ungrouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.formats.protocol import Encoder

_CODE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Int8:
    """A matrix in 8-bit integers: 8.01 bits per weight by row, 8.25 in groups of 64."""

    group: Literal["row", 128, 64, 32] = "row"

    def describe(self) -> dict[str, Any]:
        """Name, options and code version."""
        return {"name": "int8", **asdict(self), "code_version": _CODE_VERSION}

    def kernel(self, device: torch.device) -> str:  # noqa: ARG002 - the same everywhere
        return "torch"

    def supports(self, shape: tuple[int, ...]) -> bool:
        """Whether shape is a matrix (N, K) with K a multiple of the group."""
        return is_grouped(shape, self._multiple)

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Parts "codes" (N, K) and "scales", (N,) fp32 or (N*K/group,) bf16."""
        codes = Part("codes", "I8", shape)
        if self.group == "row":
            return codes, Part("scales", "F32", shape[:1])
        return codes, Part("scales", "BF16", (num_groups(shape, self.group),))

    def encoder(self, shape: tuple[int, ...]) -> Encoder:
        """An encoder of a matrix (N, K).

        Raises: FormatError if K is no multiple of the group. Its push raises FormatError for a row that is not finite.
        """
        from outsize.formats._int8_kernels import encode_rows
        from outsize.formats._slabs import SlabEncoder

        refuse_ungrouped(shape, self._multiple, "int8")
        group = None if self.group == "row" else self.group
        return SlabEncoder(
            shape,
            lambda rows, first: encode_rows(rows, first, group=group),
            lambda flat: {**flat, "codes": flat["codes"].view(shape)},
        )

    def decode(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The matrix (N, K) in `dtype`, computed in fp32 and rounded once."""
        from outsize.formats._int8_kernels import decode

        return decode(parts, shape, dtype)

    @property
    def _multiple(self) -> int:
        return 1 if self.group == "row" else self.group


plugin = Int8
