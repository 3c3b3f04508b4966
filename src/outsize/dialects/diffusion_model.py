"""One safetensors file under the names of the original checkpoint: `diffusion_model.<their module>.<factor>.weight`.

ComfyUI reads such files for every model it knows, because its own models carry these names; diffusers converts them
back by a table per family. Files of this kind carry no alpha and are read with scale 1, so alpha / rank is multiplied
into B. Which modules are fused, swapped and how, and how the two factors are spelt, is the family's layout: the first
one that has rules. A fused module of which only some parts are adapted gets zero rows for the others.
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
    with_baked_scale,
    write_factors,
)
from outsize.dialects._fuse import fuse, split_scaled
from outsize.dialects.protocol import AdapterFile, AdapterWeights, plain_pairs

_PREFIX = "diffusion_model."
_NO_LENGTHS = "ComfyUI measures lengths in another way; export to peft or diffusers"


@dataclass(frozen=True, slots=True)
class DiffusionModelDialect:
    """ComfyUI's generic keys, the scale in B."""

    is_folder: bool = False

    def write(
        self, adapter: AdapterWeights, layouts: Sequence[Layout], metadata: Mapping[str, str]
    ) -> dict[str, AdapterFile]:
        """Give one file; see the protocol."""
        layout = original_layout(layouts)
        plain_pairs(adapter, _NO_LENGTHS)
        fused = fuse(with_baked_scale(adapter), layout)
        return tensor_file(write_factors(fused, _PREFIX, layout.lora_names), metadata)

    def read(self, files: Mapping[str, AdapterFile], layouts: Sequence[Layout]) -> AdapterWeights:
        """Give the adapter of one file; see the protocol."""
        file = only_tensor_file(files)
        found = split_scaled(read_factors(file.tensors, _PREFIX), original_layout(layouts))
        return adapter_of(found, file.metadata)

    def claims(self, keys: Sequence[str]) -> int:
        """Keys of its kind."""
        return num_claimed(keys, _PREFIX)


plugin = DiffusionModelDialect()
