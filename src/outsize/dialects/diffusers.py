"""One safetensors file as diffusers' pipelines read it: `transformer.<our module>.lora_A.weight`.

Our names are diffusers' own, so nothing is fused. diffusers can carry alpha in the header, but ComfyUI, which reads
these keys for the Flux families too, would not see it there: alpha / rank is multiplied into B, and both read scale 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outsize.base.layout import Layout
from outsize.dialects._factors import (
    adapter_of,
    num_claimed,
    only_tensor_file,
    read_factors,
    with_baked_scale,
    write_factors,
    write_lengths,
)
from outsize.dialects.protocol import AdapterFile, AdapterWeights, TensorFile

_PREFIX = "transformer."


@dataclass(frozen=True, slots=True)
class DiffusersDialect:
    """diffusers' keys."""

    is_folder: bool = False

    def write(
        self,
        adapter: AdapterWeights,
        layouts: Sequence[Layout],  # noqa: ARG002 - our names are theirs
        metadata: Mapping[str, str],
    ) -> dict[str, AdapterFile]:
        """Give one file; see the protocol."""
        tensors = write_factors(with_baked_scale(adapter), _PREFIX)
        tensors |= write_lengths(adapter, _PREFIX)
        return {"pytorch_lora_weights.safetensors": TensorFile(tensors, dict(metadata))}

    def read(
        self,
        files: Mapping[str, AdapterFile],
        layouts: Sequence[Layout],  # noqa: ARG002
    ) -> AdapterWeights:
        """Give the adapter of one file; see the protocol."""
        file = only_tensor_file(files)
        return adapter_of(read_factors(file.tensors, _PREFIX), file.metadata)

    def claims(self, keys: Sequence[str]) -> int:
        """Keys of its kind."""
        return num_claimed(keys, _PREFIX)


plugin = DiffusersDialect()
