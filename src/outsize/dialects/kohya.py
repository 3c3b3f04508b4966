"""One safetensors file as kohya's tools write it (sd-scripts, musubi-tuner), which most other programs read as well.

Keys are `lora_unet_<their module, dots as underscores>.lora_down.weight`, `.lora_up.weight` and `.alpha`; a pair counts
alpha / its rank, so nothing is rounded. An underscore does not tell whether it was a dot: reading goes by the names that
the family's layout can make. The header has the few of their own keys that say what the file is.
Source: networks/lora_flux.py of sd-scripts, networks/lora.py of musubi-tuner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outsize.base.layout import Layout
from outsize.dialects._factors import (
    Scaled,
    adapter_of,
    num_claimed,
    only_tensor_file,
    original_layout,
    read_factors,
    refuse_all,
    tensor_file,
    write_scaled,
)
from outsize.dialects._fuse import fuse, split_scaled
from outsize.dialects.protocol import AdapterFile, AdapterWeights, as_text, plain_pairs

_PREFIX = "lora_unet_"
_NAMES = ("lora_down", "lora_up")
_WEIGHT = ".weight"
_NO_LENGTHS = "kohya's tools know none; export to peft or diffusers"


@dataclass(frozen=True, slots=True)
class KohyaDialect:
    """kohya's keys."""

    is_folder: bool = False

    def write(
        self, adapter: AdapterWeights, layouts: Sequence[Layout], metadata: Mapping[str, str]
    ) -> dict[str, AdapterFile]:
        """Give one file; see the protocol."""
        layout = original_layout(layouts)
        fused = fuse(plain_pairs(adapter, _NO_LENGTHS), layout)
        flat = {module.replace(".", "_"): pair for module, pair in fused.items()}
        assert len(flat) == len(fused), "no two modules differ in dots alone"
        facts = {"ss_network_dim": str(adapter.rank), "ss_network_alpha": as_text(adapter.alpha)}
        if layout.lora_module:
            facts["ss_network_module"] = layout.lora_module
        tensors = write_scaled(flat, adapter.scale, _PREFIX, _NAMES)
        return tensor_file(tensors, {**metadata, **facts})

    def read(self, files: Mapping[str, AdapterFile], layouts: Sequence[Layout]) -> AdapterWeights:
        """Give the adapter of one file; see the protocol."""
        file, layout = only_tensor_file(files), original_layout(layouts)
        dotted = _with_dots(read_factors(file.tensors, _PREFIX), layout)
        return adapter_of(split_scaled(dotted, layout), file.metadata)

    def claims(self, keys: Sequence[str]) -> int:
        """Keys of its kind."""
        return num_claimed(keys, _PREFIX)


def _with_dots(found: Scaled, layout: Layout) -> Scaled:
    """The same under their modules' own names.

    Raises: AdapterError naming every module that the layout cannot make.
    """
    patterns = [
        (re.compile(_flat_pattern(theirs)), theirs)
        for theirs in dict.fromkeys(
            rule.theirs.removesuffix(_WEIGHT)
            for rule in layout.rules
            if rule.theirs.endswith(_WEIGHT)
        )
    ]
    names: dict[str, str] = {}
    faults: list[str] = []
    for module in found.pairs:
        matches = ((pattern.fullmatch(module), theirs) for pattern, theirs in patterns)
        name = next((theirs.format(**m.groupdict()) for m, theirs in matches if m), None)
        if name is None:
            faults.append(f"{_PREFIX}{module}: layout {layout.name!r} knows no such module")
        else:
            names[module] = name
    refuse_all(faults)
    return Scaled(
        {names[module]: pair for module, pair in found.pairs.items()},
        {names[module]: scale for module, scale in found.scales.items()},
    )


def _flat_pattern(template: str) -> str:
    return re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(template.replace(".", "_")))


plugin = KohyaDialect()
