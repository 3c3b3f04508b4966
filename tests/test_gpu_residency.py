"""On a real card: a base that lies there is proved in a moment, and pieces put into host memory on purpose are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_support import train_here, write_recipe
from torch import Tensor

from outsize.base.journal import read_journal
from outsize.devices._ledger import ledger_of
from outsize.devices._open_sensors import open_sensors
from outsize.devices._profile import read_machine
from outsize.devices._rates import rates_folder, rates_of
from outsize.devices._torch_gpu import allocated_buffer
from outsize.devices.protocol import Device, open_device
from outsize.doctor.residency import Proof, prove
from outsize.placement.protocol import PlacementSettings
from outsize.placement.resident import Resident

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BLOCK_BYTES, NUM_BLOCKS = 288 * MIB, 60  # Flux.2-dev in nf4: 16.9 GiB


class Mapped:
    """Pinned host memory as a tensor of the card: work on the card reads it over the bus, at the same address."""

    def __init__(self, host_u8: Tensor) -> None:
        self.host_u8 = host_u8
        self.__cuda_array_interface__ = {
            "shape": (host_u8.numel(),),
            "typestr": "|u1",
            "data": (host_u8.data_ptr(), False),
            "version": 2,
        }


@pytest.fixture
def card() -> Device:
    device = open_device()
    if not device.has_own_memory:
        pytest.skip("this card's memory is the host's")
    return device


def placed(device: Device) -> Resident:
    """A base of a 32B model, or what fits this card."""
    num_blocks = min(NUM_BLOCKS, int(device.free_bytes() * 0.8) // BLOCK_BYTES)
    return Resident(PlacementSettings(device, [BLOCK_BYTES] * num_blocks))


def ask(device: Device, buffers: dict[str, Tensor]) -> Proof:
    rates = rates_of(read_machine(), folder=rates_folder())
    reader = open_sensors(device.card)
    proof = prove(
        ledger_of({"blocks": buffers.items()}),
        device,
        reader,
        rate_bytes_per_s=rates.device_memory_bytes_per_s,
        bus_bytes_per_s=rates.bus_bytes_per_s,
    )
    print(f"{proof.seconds:.3f} s: {proof}")  # noqa: T201
    return proof


def test_a_base_on_the_card_is_proved_in_under_a_fifth_of_a_second(card: Device) -> None:
    """Cheap enough to be made after loading and whenever a step is slow; the kernel's first load counts."""
    placement = placed(card)
    proof = ask(card, placement.buffers())
    assert proof.verdict == "on the card", proof
    assert proof.seconds < 0.2
    clock = proof.witnesses[-1]
    assert (clock.name, clock.says) == ("clock", "agrees")
    placement.close()


def test_blocks_in_host_memory_are_named_and_no_others(card: Device) -> None:
    """Pinned and mapped, they are tensors of the card to everybody, at the speed of the bus."""
    placement = placed(card)
    buffers = placement.buffers()
    wanted = [f"block {block}" for block in (1, 4, 5)]
    for name in wanted:
        host = allocated_buffer(BLOCK_BYTES).tensor
        buffers[name] = torch.as_tensor(Mapped(host), device=card.torch_device)
        assert buffers[name].data_ptr() == host.data_ptr()
        assert buffers[name].device.type == card.torch_device.type
    placement.close()
    proof = ask(card, buffers)
    assert proof.verdict == "off the card", proof
    assert [one.name for one in proof.culprits] == wanted
    assert all(one.num_bytes == BLOCK_BYTES for one in proof.culprits)


def test_the_sensors_of_a_card_tell_power_clock_and_temperature(card: Device) -> None:
    found = open_sensors(card.card).sensors()
    assert found.source, found.why
    assert found.power_w is None or found.power_w > 0
    assert found.clock_mhz is not None, found.why
    assert found.temperature_c is not None, found.why
    assert found.total_bytes is not None, found.why
    assert abs(found.total_bytes / (read_machine().vram_bytes or 1) - 1) < 0.05


def test_a_training_proves_its_base_after_loading(tmp_path: Path) -> None:
    _, run = train_here(write_recipe(tmp_path), open_device().kind)
    found = [one for one in read_journal(run.journal) if one["event"] == "residency"]
    assert found[0]["moment"] == "loaded"
    # tiny blocks are too small for a clock
    assert found[0]["verdict"] in {"unknown", "nothing to prove"}, found[0]["told"]
    says = {one["name"]: one["says"] for one in found[0]["witnesses"]}
    assert "contradicts" not in says.values(), found[0]["told"]
    assert says.get("allocator", "agrees") == "agrees"
