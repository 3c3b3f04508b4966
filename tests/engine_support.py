"""A tiny base of any family, prepared from real files, in any format and placement, beside its upstream twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outsize.app.prepare import prepare_store
from outsize.arithmetic.protocol import Arithmetic
from outsize.base.tiers import Tier
from outsize.devices.protocol import Device, open_device
from outsize.families.protocol import FAMILIES
from outsize.formats._packing import Packing, assign
from outsize.formats.protocol import make_format
from outsize.layers.block import BlockRunner, EagerRunner
from outsize.layers.loading import load_from_store_
from outsize.layers.model import FrozenModel
from outsize.placement._spread import as_tiers, choose_resident
from outsize.placement.protocol import PLACEMENTS, PlacementSettings
from outsize.weights.reading import StoreReader
from outsize.weights.source import Source
from outsize.weights.store import Store

FORMATS = (
    ("nf4", {"group": 64}),
    ("nf4", {"group": 32, "scales": "fp16"}),
    ("nf4", {"group": 64, "scales": "double"}),
    ("int4", {}),
    ("int8", {"group": 64}),
    ("fp8", {}),
    ("plain", {"dtype": "bf16"}),
)


@dataclass
class TinyBase:
    """A prepared tiny base: family, store, and how it was packed."""

    family: Any
    variant: str
    packing: Packing
    store: Store

    def open(
        self,
        placement: str,
        *,
        device: Device | None = None,
        resident_bytes: int = 0,
        slots: int = 2,
        tiers: Sequence[Tier] = (),
        arithmetic: Arithmetic | None = None,
        make_runner: Callable[[nn.Module], BlockRunner] = EagerRunner,
    ) -> FrozenModel:
        """Load it into a placement. tiers: of each block; as many resident as fit, the rest pinned, unless given."""
        device = device or open_device("cpu")
        table = self.family.table(self.variant)
        packets = [self.store.packet(block) for block in range(table.num_blocks)]
        sizes = [packet.streamed_bytes for packet in packets]
        tiers = tiers or as_tiers(len(sizes), choose_resident(sizes, resident_bytes))
        reader = StoreReader(self.store)
        settings = PlacementSettings(device, sizes, tiers, slots, reader.read_streamed)
        module = self.family.build(self.variant)
        model = FrozenModel(
            module,
            table=table,
            block_paths=self.family.block_paths(self.variant),
            packing=self.packing.formats,
            packets=packets,
            placement=PLACEMENTS.load(placement)(settings),
            device=device.torch_device,
            compute=device.compute_dtype,
            arithmetic=arithmetic,
            make_runner=make_runner,
        )
        load_from_store_(model, reader, device)
        self.family.materialise_buffers(module, device.torch_device)
        return model

    def decoded(self) -> dict[str, Tensor]:
        """Every weight as the formats decode it, fp32, read by the safetensors library."""
        from safetensors.torch import load_file

        table = self.family.table(self.variant)
        found = {}
        for block in [None, *range(table.num_blocks)]:
            tensors = load_file(self.store.path(block))
            for spec in table.of_block(block):
                fmt = self.packing.formats[spec.name]
                parts = {
                    part.name: tensors[f"{spec.name}.{part.name}" if part.name else spec.name]
                    for part in fmt.parts(spec.shape)
                }
                found[spec.name] = fmt.decode(parts, spec.shape, torch.float32)
        return found

    def upstream(self) -> nn.Module:
        """The upstream class with the decoded weights, frozen."""
        model = self.family.build(self.variant)
        model.load_state_dict(self.decoded(), strict=True, assign=True)
        self.family.materialise_buffers(model, torch.device("cpu"))
        return model.requires_grad_(False)


def make_tiny(
    folder: Path, family_name: str, fmt: tuple[str, dict[str, Any]], *, variant: str = "tiny"
) -> TinyBase:
    """Write random weights in the diffusers layout and prepare them."""
    family = FAMILIES.load(family_name)
    table = family.table(variant)
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for spec in table:
        noise = torch.randn(spec.shape, generator=generator)
        is_scale = spec.role == "norm" and not spec.name.endswith("bias")
        is_scale = is_scale or spec.name.endswith("layer_scalar")
        weights[spec.name] = (1 + 0.1 * noise if is_scale else 0.08 * noise).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file(weights, file)
    packing = assign(table, make_format(*fmt), make_format("plain"))
    with Source([file]) as source:
        store = prepare_store(
            table=table,
            layouts=family.layouts(variant),
            source=source,
            packing=packing,
            folder=folder / "store",
            ram_budget_bytes=1 << 30,
        )
    return TinyBase(family, variant, packing, store)


def tiny_inputs(base: TinyBase, *, seed: int = 0, batch: int = 2) -> dict[str, Any]:
    """Noisy latents, noise levels and conditions for one prediction."""
    generator = torch.Generator().manual_seed(seed)
    channels = base.family.config(base.variant)["in_channels"]
    if "Flux2" not in type(base.family).__name__:
        channels //= 4  # Flux.1 packs 2x2 latent pixels into one token
    conditions = {
        name: torch.randn((batch, *shape), generator=generator)
        for name, shape in base.family.condition_shapes(base.variant).items()
    }
    return {
        "noisy_BCHW": torch.randn((batch, channels, 4, 6), generator=generator),
        "sigma_B": torch.rand(batch, generator=generator),
        "conditions": conditions,
        "guidance": base.family.training_guidance(base.variant),
    }
