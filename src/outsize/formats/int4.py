"""int4: unsigned 4-bit codes, affine in each group along a row; plain torch, for any backend.

weight = code * scale + minimum. The minimum, kept in fp16 beside the scale, plays the zero point's part; as a value
rather than a code it also holds a group that lies far from zero. Both are rounded to fp16 first and the codes chosen
for the rounded ones. A 4-bit code times an fp16 scale has at most 15 significant bits, hence is exact in fp32: fused
multiply-add or not, the decoded value is the same on every device and compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from outsize.base.parts import Part
from outsize.formats._grouped import codes_part, is_grouped, num_groups, refuse_ungrouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.formats.protocol import Encoder

_CODE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Int4:
    """A matrix in 4-bit integers with an fp16 scale and minimum per group: 4.5 bits per weight in groups of 64."""

    group: Literal[64, 32, 128] = 64

    def describe(self) -> dict[str, Any]:
        """Name, options and code version."""
        return {"name": "int4", **asdict(self), "code_version": _CODE_VERSION}

    def kernel(self, device: torch.device) -> str:  # noqa: ARG002 - the same everywhere
        return "torch"

    def supports(self, shape: tuple[int, ...]) -> bool:
        """Whether shape is a matrix (N, K) with K a multiple of the group."""
        return is_grouped(shape, self.group)

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Parts "codes" (N*K/2,), "scales" and "minima" (N*K/group,)."""
        groups = (num_groups(shape, self.group),)
        return codes_part(shape), Part("scales", "F16", groups), Part("minima", "F16", groups)

    def encoder(self, shape: tuple[int, ...]) -> Encoder:
        """An encoder of a matrix (N, K).

        Raises: FormatError if K is no multiple of the group. Its push raises FormatError for a row that is not
        finite, or whose minimum or step exceeds fp16.
        """
        from outsize.formats._int4_kernels import encode_rows
        from outsize.formats._slabs import SlabEncoder

        refuse_ungrouped(shape, self.group, "int4")
        return SlabEncoder(
            shape, lambda rows, first: encode_rows(rows, first, group=self.group), dict
        )

    def decode(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The matrix (N, K) in `dtype`, computed in fp32 and rounded once."""
        from outsize.formats._int4_kernels import decode

        return decode(parts, shape, dtype, group=self.group)


plugin = Int4
