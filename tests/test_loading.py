"""From a store into a placement and through a step: equal bits from every tier, and no damaged byte gets in."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from dropin.borrowed import Borrowed
from engine_support import TinyBase, make_tiny, tiny_inputs
from run_support import adapter_of, train_here, write_recipe
from tiny import write_tiny
from torch import Tensor

from outsize.adapters.adapter import Adapter, AdapterShape
from outsize.base.errors import StoreBroken
from outsize.base.journal import read_journal
from outsize.base.tiers import TIERS, Tier
from outsize.devices.protocol import open_device
from outsize.layers.loading import Loading
from outsize.layers.model import FrozenModel
from outsize.placement import _staging
from outsize.placement.protocol import PlacementSettings, report_of
from outsize.placement.resident import Resident
from outsize.weights.reading import StoreReader

NF4: tuple[str, dict[str, Any]] = ("nf4", {"group": 64})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("base"), "flux2", NF4)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks pass through the staging ring in several pieces."""
    monkeypatch.setattr(_staging, "PIECE_BYTES", 8192)
    monkeypatch.setattr(_staging, "NUM_PIECES", 3)


def trained(base: TinyBase, model: FrozenModel, steps: int = 5) -> dict[str, Tensor]:
    """The adapter after a few plain steps of gradient descent."""
    table = base.family.table(base.variant)
    adapter = Adapter(model.module, table, AdapterShape(4, 8.0, ("attention", "mlp")))
    adapter.materialise_(seed=3, device=torch.device("cpu"), dtype=torch.float32)
    for step in range(steps):
        inputs = tiny_inputs(base, seed=step)
        if step == 2:  # a preview in between: the ring takes another order and comes back
            with torch.no_grad():
                model.begin("forward")
                base.family.predict(base.variant, model.module, **inputs)
        model.begin("train")
        base.family.predict(base.variant, model.module, **inputs).square().mean().backward()
        with torch.no_grad():
            for one in adapter.parameters().values():
                assert one.grad is not None
                one.sub_(0.5 * one.grad)
                one.grad = None
    values = {name: one.detach().clone() for name, one in adapter.parameters().items()}
    model.close()
    return values


@pytest.fixture(scope="module")
def expected(base: TinyBase) -> dict[str, Tensor]:
    return trained(base, base.open("resident"))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("tiers", "slots"), [("device", 1), ("pinned", 2), ("pageable", 2), ("disk", 1), ("mixed", 2)]
)
def test_steps_from_any_tier_give_the_bytes_of_resident_ones(
    base: TinyBase, expected: dict[str, Tensor], tiers: Tier, slots: int
) -> None:
    """Placement changes no number."""
    count = base.family.table(base.variant).num_blocks
    each = [TIERS[block % 4] if tiers == "mixed" else tiers for block in range(count)]
    found = trained(base, base.open("stream", tiers=each, slots=slots))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_blocks_on_disk_are_held_nowhere(base: TinyBase) -> None:
    count = base.family.table(base.variant).num_blocks
    model = base.open("stream", tiers=["disk"] * count)
    report = report_of(model.placement)
    sizes = [packet.streamed_bytes for packet in model.packets]
    assert report["tiers"] == {"device": 0, "pinned": 0, "pageable": 0, "disk": sum(sizes)}
    assert report["host_bytes"] == report["staging_bytes"]
    model.close()


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("block", [0, 2, None])
def test_an_altered_byte_stops_the_loading_and_is_named(
    tmp_path: Path, placement: str, block: int | None
) -> None:
    damaged = make_tiny(tmp_path, "flux2", NF4)
    path = damaged.store.path(block)
    flip(path, -1)
    with pytest.raises(StoreBroken, match=rf"{path.name}.*SHA-256"):
        damaged.open(placement)
    assert not [one for one in threading.enumerate() if one.name.startswith("loading")]


def test_a_file_that_goes_while_training_from_disk_is_named(tmp_path: Path) -> None:
    """A block's file is opened for every use: what happens to it is noticed at the next."""
    damaged = make_tiny(tmp_path, "flux2", NF4)
    count = damaged.family.table(damaged.variant).num_blocks
    model = damaged.open("stream", tiers=["disk"] * count)
    damaged.store.path(1).unlink()
    inputs = tiny_inputs(damaged)
    model.begin("forward")
    with torch.no_grad(), pytest.raises(StoreBroken, match=r"block-001.safetensors"):
        damaged.family.predict(damaged.variant, model.module, **inputs)
    model.close()


def test_a_placement_without_places_is_handed_every_packet(base: TinyBase) -> None:
    """A plug-in need only implement what the protocol asks for."""
    count = base.family.table(base.variant).num_blocks
    sizes = [base.store.packet(block).streamed_bytes for block in range(count)]
    device = open_device("cpu")
    simple, resident = (make(PlacementSettings(device, sizes)) for make in (Borrowed, Resident))
    for placement in (simple, resident):
        with Loading(StoreReader(base.store), placement, device) as loading:
            for future in loading._small.values():
                future.result()
    for block in range(count):
        assert torch.equal(simple.acquire(block), resident.acquire(block))
    assert report_of(simple) == {"device_bytes": max(sizes), "host_bytes": sum(sizes)}


@pytest.mark.parametrize("kept", [{"pageable_bytes": "64MiB"}, {"pageable_bytes": 0}], ids=str)
def test_a_recipe_trains_from_ordinary_memory_or_disk_and_the_journal_says_so(
    tmp_path: Path, kept: dict[str, Any]
) -> None:
    """The real command's way: plan, site, training; the same bytes as resident, and what was held where."""
    model = write_tiny("flux2", "tiny", tmp_path / "model")
    found = []
    for name, placement in {
        "resident": {"kind": "resident"},
        "staged": {"kind": "stream", "resident_bytes": 0, "pinned_bytes": 0, **kept},
    }.items():
        recipe = write_recipe(
            tmp_path, model=model, name=name, train={"steps": 3}, placement=placement
        )
        _, run = train_here(recipe)
        found.append(adapter_of(run))
        loaded = [one for one in read_journal(run.journal) if one["event"] == "loaded"]
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    base = next(one for one in loaded if one["slot"] == "base")
    tier = "pageable" if kept["pageable_bytes"] else "disk"
    assert [one for one, held in base["tiers"].items() if held] == [tier]
    assert base["staging_bytes"] > 0
    assert base["loading_s"] > 0
