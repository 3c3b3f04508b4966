"""One safetensors file for ComfyUI: `diffusion_model.<their module>.<factor>.weight`, with `<their module>.alpha`.

ComfyUI maps every weight of a model, under the name that the original checkpoint gave it, and takes a scalar alpha beside
the factors: the pair counts alpha / its rank. So both factors are written as they were trained and nothing is rounded. A
fused module has the rank of all its parts together, and its alpha grows with it.
Source: comfy/lora.py and comfy/weight_adapter/lora.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outsize.base.layout import Layout
from outsize.dialects._factors import (
    adapter_of,
    num_claimed,
    only_tensor_file,
    original_layout,
    read_factors,
    tensor_file,
    write_scaled,
)
from outsize.dialects._fuse import fuse, split_scaled
from outsize.dialects.protocol import AdapterFile, AdapterWeights, plain_pairs

_PREFIX = "diffusion_model."
_NAMES = ("lora_A", "lora_B")
# its dora_scale divides by the length of other vectors than PEFT's: comfy/weight_adapter/base.py
_NO_LENGTHS = "ComfyUI measures lengths in another way; export to peft or diffusers"


@dataclass(frozen=True, slots=True)
class ComfyuiDialect:
    """ComfyUI's generic keys, with alpha."""

    is_folder: bool = False

    def write(
        self, adapter: AdapterWeights, layouts: Sequence[Layout], metadata: Mapping[str, str]
    ) -> dict[str, AdapterFile]:
        """Give one file; see the protocol."""
        fused = fuse(plain_pairs(adapter, _NO_LENGTHS), original_layout(layouts))
        return tensor_file(write_scaled(fused, adapter.scale, _PREFIX, _NAMES), metadata)

    def read(self, files: Mapping[str, AdapterFile], layouts: Sequence[Layout]) -> AdapterWeights:
        """Give the adapter of one file; see the protocol."""
        file = only_tensor_file(files)
        found = split_scaled(read_factors(file.tensors, _PREFIX), original_layout(layouts))
        return adapter_of(found, file.metadata)

    def claims(self, keys: Sequence[str]) -> int:
        """Keys of its kind."""
        return num_claimed(keys, _PREFIX)


plugin = ComfyuiDialect()
