"""nf4: 4-bit normal floats in bitsandbytes' layout, byte for byte; its kernels where they serve, plain torch elsewhere.

A group's weights are divided by the largest magnitude in it and each becomes the nearest of sixteen values, which are
spaced as a normal distribution's quantiles are. Source: QLoRA, arXiv 2305.14314, section 3 and appendix E. Two options
lose less in the same bits: scales that are searched, and inputs that are turned before (_nf4_search.py, _hadamard.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from outsize.base.errors import FormatError
from outsize.base.parts import Part
from outsize.formats._grouped import codes_part, is_grouped, num_groups, refuse_ungrouped
from outsize.formats._nf4_values import NESTED_GROUP, fault_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.base.quantised import StoredForm
    from outsize.formats._nf4_adopt import Adopter
    from outsize.formats.protocol import Encoder, Turning

_CODE_VERSION = 1
_QUANT_TYPE = "nf4"  # the name of this table of values in bitsandbytes
_GROUPS = (64, 32)


@dataclass(frozen=True, slots=True)
class NF4:
    """A matrix in 4-bit normal floats.

    scales: how the group's largest magnitude is kept. fp32 is bitsandbytes' own (4.5 bits per weight in groups of 64),
    fp16 loses nothing measurable (4.25), double is bitsandbytes' double quantisation (4.13).
    scale_search: each group's scale is the one that loses least; the bytes stay bitsandbytes', preparing takes several times
    as long. rotation: what is kept is the matrix with its inputs turned by a Hadamard matrix; `decode` turns it back.
    """

    group: Literal[64, 32] = 64
    scales: Literal["fp32", "fp16", "double"] = "fp32"
    scale_search: bool = False
    rotation: Literal["none", "hadamard"] = "none"

    def describe(self) -> dict[str, Any]:
        """Name, options and code version; options that came later only where they are used, for keys made before."""
        described = {"name": "nf4", **asdict(self), "code_version": _CODE_VERSION}
        unused = {"scale_search": False, "rotation": "none"}
        return {key: one for key, one in described.items() if unused.get(key, ...) != one}

    def kernel(self, device: torch.device) -> str:
        """What decodes there: "bitsandbytes 0.50.2", or "torch" with the reason when something is amiss.

        The first call for a CUDA or ROCm device imports bitsandbytes, which takes seconds, and checks its values there.
        """
        from outsize.formats._nf4_decode import kernel_of

        return kernel_of(device.type, device.index, _QUANT_TYPE).report

    def supports(self, shape: tuple[int, ...]) -> bool:
        """Whether shape is a matrix (N, K) with K a multiple of the group."""
        return is_grouped(shape, self.group)

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Parts "codes" (N*K/2,) and "scales" (N*K/group,).

        With double scales also "nested_scales" (one per 256 scales), "nested_table" (256,) and "offset" (1,), fp32.
        """
        groups = num_groups(shape, self.group)
        if self.scales != "double":
            return codes_part(shape), Part(
                "scales", "F32" if self.scales == "fp32" else "F16", (groups,)
            )
        return (
            codes_part(shape),
            Part("scales", "U8", (groups,)),
            Part("nested_scales", "F32", (-(-groups // NESTED_GROUP),)),
            Part("nested_table", "F32", (256,)),
            Part("offset", "F32", (1,)),
        )

    def encoder(self, shape: tuple[int, ...]) -> Encoder:
        """An encoder of a matrix (N, K).

        Raises: FormatError if K is no multiple of the group. Its push raises FormatError for a row that is not
        finite, or too large for fp16 scales.
        """
        from outsize.formats._nested import quantise_scales
        from outsize.formats._nf4_kernels import encode_rows
        from outsize.formats._slabs import SlabEncoder

        refuse_ungrouped(shape, self.group, "nf4")

        def encode_chunk(rows_RK: Tensor, first_row: int) -> dict[str, Tensor]:
            return encode_rows(
                rows_RK,
                first_row,
                group=self.group,
                is_half=self.scales == "fp16",
                is_searched=self.scale_search,
                is_turned=self._is_turned,
            )

        return SlabEncoder(
            shape, encode_chunk, quantise_scales if self.scales == "double" else dict
        )

    def adopts(self, form: StoredForm, shape: tuple[int, ...]) -> str | None:
        """Why a matrix (N, K) in that form cannot be taken as it is, after its name; None when it can."""
        if form.quant_type != _QUANT_TYPE:
            return f"is {form.quant_type}, which nf4 cannot take"
        if form.group != self.group:
            remedy = (
                f"set `group` to {form.group}" if form.group in _GROUPS else "no option has them"
            )
            return f"is in groups of {form.group}, not of {self.group}: {remedy}"
        if self.scale_search or self._is_turned:
            option = "`rotation` to none" if self._is_turned else "`scale_search` to false"
            return f"was chosen without it: set {option}"
        if not self.supports(shape):
            return f"has the shape {list(shape)}, whose rows are no whole groups of {form.group}"
        is_double = form.nested_group is not None
        if self.scales == "fp16" or (self.scales == "double" and not is_double):
            exact = "fp32 or double" if is_double else "fp32"
            return f"has scales that {self.scales} would round: set `scales` to {exact}"
        return fault_of(form)

    def adopter(
        self, form: StoredForm, shape: tuple[int, ...], stored: Mapping[str, Tensor]
    ) -> Adopter:
        """Takes a matrix (N, K) that `adopts` has no fault to find with; stored: its parts beside the codes."""
        from outsize.formats._nf4_adopt import Adopter

        return Adopter(form, shape, stored, is_double=self.scales == "double")

    def published(self, shape: tuple[int, ...]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """A matrix (N, K) as bitsandbytes keeps it; see the protocol."""
        from outsize.formats._nf4_publish import published

        if self._is_turned:
            raise FormatError(
                "no other program turns a matrix back that was turned before packing; set `rotation` to none"
            )
        is_double = self.scales == "double"
        return published(shape, _QUANT_TYPE, group=self.group, is_double=is_double)

    def publish(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: str
    ) -> dict[str, Tensor]:
        """Its tensors."""
        from outsize.formats._nf4_publish import publish

        return publish(parts, shape, _QUANT_TYPE, group=self.group, dtype=dtype)

    def published_config(self, dtype: str, plain: Collection[str]) -> dict[str, Any]:
        """What config.json says of it."""
        from outsize.formats._nf4_publish import config

        is_double = self.scales == "double"
        return config(_QUANT_TYPE, is_double=is_double, dtype=dtype, plain=plain)

    def decode(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The matrix (N, K) in `dtype`, computed in fp32 and rounded once; by the kernel that `kernel` names."""
        from outsize.formats._nf4_decode import decode, decode_back

        how = decode_back if self._is_turned else decode
        return how(parts, shape, dtype, group=self.group, quant_type=_QUANT_TYPE)

    def turning(self) -> Turning | None:
        """How a product with the matrix as it is kept, its inputs turned, is made; None where they are not."""
        from outsize.formats._nf4_decode import Turned

        return Turned(self.group, _QUANT_TYPE) if self._is_turned else None

    @property
    def _is_turned(self) -> bool:
        return self.rotation == "hadamard"

    def e4m3_scales(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """Scales (N, 1) and (K, 1) fp32 for `decode_e4m3`; None where no kernel decodes to it. Of the matrix as it is kept."""
        from outsize.formats._nf4_decode import e4m3_scales

        return e4m3_scales(parts, shape, group=self.group, quant_type=_QUANT_TYPE)

    def decode_e4m3(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        row_scales: Tensor,
        *,
        is_transposed: bool,
    ) -> Tensor:
        """The matrix (N, K) or its transpose (K, N) in e4m3, each row divided by its scale, in one pass over the codes."""
        from outsize.formats._nf4_decode import decode_e4m3

        return decode_e4m3(
            parts,
            shape,
            row_scales,
            group=self.group,
            quant_type=_QUANT_TYPE,
            is_transposed=is_transposed,
        )


plugin = NF4
