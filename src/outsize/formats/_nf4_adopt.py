"""Matrices that bitsandbytes has quantised already, taken as they are: the codes byte for byte, the scales exactly.

What double quantisation has rounded is kept as it lies in the file, or spread out to the fp32 scales that bitsandbytes
itself computes from it, in the same two roundings; never rounded again.

Dimensions: N rows, K columns, R rows of one window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from outsize.formats import _nested
from outsize.formats import _nf4_kernels as kernels

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.base.quantised import StoredForm


class Adopter:
    """One matrix on its way into a store.

    stored: "scales" (N*K/group,) fp32; or uint8 with "nested_scales" and "nested_table", fp32, where the form is nested.
    Memory: the scales in fp32 as well, once rows are decoded.
    """

    def __init__(
        self,
        form: StoredForm,
        shape: tuple[int, ...],
        stored: Mapping[str, Tensor],
        *,
        is_double: bool,
    ) -> None:
        self._form, self._num_columns, self._is_double = form, shape[1], is_double
        self._stored = dict(stored)
        if form.nested_group is not None:
            offset = torch.tensor([form.offset], dtype=torch.float32)
            self._stored["offset"] = offset.to(self._stored["scales"].device)
        self._scales: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """The parts beside the codes."""
        return dict(self._stored) if self._is_double else {"scales": self._fp32_scales()}

    def decode(self, codes: Tensor, first_row: int) -> Tensor:
        """Rows (R, K) from their codes (R*K/2,), as bitsandbytes decodes them, in the type to which it does."""
        form = self._form
        num_rows = 2 * codes.numel() // self._num_columns
        per_row = self._num_columns // form.group
        scales = self._fp32_scales()[first_row * per_row :][: num_rows * per_row]
        dtype: torch.dtype = getattr(torch, form.dtype)
        return kernels.decode_by_torch(
            codes, scales, (num_rows, self._num_columns), dtype, group=form.group
        )

    def _fp32_scales(self) -> Tensor:
        if self._scales is None:
            nested = self._form.nested_group is not None
            self._scales = (
                _nested.decode_scales(self._stored, by_bitsandbytes=False)
                if nested
                else self._stored["scales"]
            )
        return self._scales
