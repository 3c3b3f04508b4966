"""One safetensors file under the names of the original checkpoint: `diffusion_model.<their module>.<factor>.weight`.

ComfyUI reads such files for every model it knows, because its own models carry these names; diffusers converts them
back by a table per family. Files of this kind carry no alpha and are read with scale 1, so alpha / rank is multiplied
into B. Which modules are fused, swapped and how, and how the two factors are spelt, is the family's layout: the first
one that has rules. A fused module of which only some parts are adapted gets zero rows for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outsize.base.errors import AdapterError
from outsize.base.layout import Layout
from outsize.dialects._factors import (
    only_tensor_file,
    read_factors,
    unscaled_adapter,
    with_baked_scale,
    write_factors,
)
from outsize.dialects._fuse import fuse, split
from outsize.dialects.protocol import AdapterFile, AdapterWeights, TensorFile

_PREFIX = "diffusion_model."


@dataclass(frozen=True, slots=True)
class DiffusionModelDialect:
    """ComfyUI's generic keys."""

    is_folder: bool = False

    def write(
        self, adapter: AdapterWeights, layouts: Sequence[Layout], metadata: Mapping[str, str]
    ) -> dict[str, AdapterFile]:
        """Give one file; see the protocol."""
        layout = _original(layouts)
        fused = fuse(with_baked_scale(adapter), layout)
        tensors = write_factors(fused, _PREFIX, layout.lora_names)
        return {"adapter.safetensors": TensorFile(tensors, dict(metadata))}

    def read(self, files: Mapping[str, AdapterFile], layouts: Sequence[Layout]) -> AdapterWeights:
        """Give the adapter of one file, with the scale in B and alpha equal to the rank; see the protocol."""
        file = only_tensor_file(files)
        pairs = split(read_factors(file.tensors, _PREFIX), _original(layouts))
        return unscaled_adapter(pairs, file.metadata)


def _original(layouts: Sequence[Layout]) -> Layout:
    for layout in layouts:
        if layout.rules:
            return layout
    names = ", ".join(layout.name for layout in layouts) or "none"
    raise AdapterError(
        f"this family has no layout of an original checkpoint (layouts: {names}), so there are no names for "
        f"`{_PREFIX}` keys; export to peft or diffusers instead"
    )


plugin = DiffusionModelDialect()
