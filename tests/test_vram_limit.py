"""A limit on the card's memory: the driver's context counts, and a processor has nothing to limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outsize.base.errors import MachineFault
from outsize.devices import _torch_gpu as gpu
from outsize.devices.protocol import open_device
from outsize.plan.pools import CONTEXT_BYTES

GIB, MIB = 2**30, 2**20


class Driver:
    """What the limit asks of torch.cuda, of a card of 80 GiB of which `taken` are in use."""

    def __init__(self, taken: int, reserved: int = 0) -> None:
        self.total, self.taken, self.reserved = 80 * GIB, taken, reserved
        self.fraction = 1.0

    def init(self) -> None: ...

    def mem_get_info(self, _device: object) -> tuple[int, int]:
        return self.total - self.taken - self.reserved, self.total

    def memory_reserved(self, _device: object) -> int:
        return self.reserved

    def set_per_process_memory_fraction(self, fraction: float, _device: object) -> None:
        self.fraction = fraction


def card(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> gpu.TorchGpu:
    monkeypatch.setattr(gpu.torch, "cuda", driver)
    return gpu.TorchGpu("a card", torch.device("meta"))


@pytest.mark.parametrize(
    ("taken", "context"),
    [
        (300 * MIB, 700 * MIB),  # a fresh context: kernels are loaded later
        (900 * MIB, 900 * MIB),
        (20 * GIB, 1536 * MIB),  # another program's
    ],
)
def test_what_the_driver_takes_is_taken_off(
    monkeypatch: pytest.MonkeyPatch, taken: int, context: int
) -> None:
    driver = Driver(taken)
    device = card(monkeypatch, driver)
    left = device.limit_memory(8 * GIB)
    assert left == 8 * GIB - context
    assert driver.fraction * driver.total == pytest.approx(left)


def test_what_is_free_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans ask for free memory: a card of 80 GiB must answer as one of 8 would."""
    driver = Driver(700 * MIB)
    device = card(monkeypatch, driver)
    left = device.limit_memory(8 * GIB)
    driver.reserved = 2 * GIB
    assert device.free_bytes() == left - 2 * GIB


def test_a_limit_beyond_the_card_is_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    device = card(monkeypatch, Driver(700 * MIB))
    assert device.limit_memory(100 * GIB) == 80 * GIB - 700 * MIB


def test_a_limit_that_leaves_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = card(monkeypatch, Driver(600 * MIB))
    with pytest.raises(MachineFault, match=r"512.0 MiB leaves nothing.*700.0 MiB"):
        device.limit_memory(512 * MIB)


def test_a_processor_has_no_card_to_limit() -> None:
    with pytest.raises(MachineFault, match="--vram-limit caps the memory of a card"):
        open_device("cpu").limit_memory(8 * GIB)


def test_plan_and_limit_count_the_same_context() -> None:
    """Else a plan that fits into a limit would run out of memory below it."""
    assert gpu.CONTEXT_BYTES == CONTEXT_BYTES


def test_marks_of_a_card_are_seconds_apart() -> None:
    """Torch counts in milliseconds."""
    event = SimpleNamespace(elapsed_time=lambda other: 1500.0 if other == "later" else 0.0)
    later = gpu.Point("later")  # type: ignore[arg-type] # a stand-in for an event
    assert later.seconds_after(gpu.Point(event)) == 1.5  # type: ignore[arg-type]
