"""A card that is none: its memory is the host's, its clock counts what reading would take, and some of it is far away."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outsize.devices._sensors import ProcessMemory, Sensors
from outsize.devices.cpu import Cpu

CARD_RATE, BUS_RATE = 3.3e12, 25e9  # an H200's memory, and PCIe 4.0


@dataclass(frozen=True, slots=True)
class At:
    """A moment of a fake clock."""

    at_s: float

    def seconds_after(self, earlier: At) -> float:
        return self.at_s - earlier.at_s


@dataclass
class Clock:
    """What the card did. far: addresses read over the bus; hiccups: addresses whose first reading is held up, once."""

    now_s: float = 0.0
    reads: list[int] = field(default_factory=list)
    num_waits: int = 0
    far: set[int] = field(default_factory=set)
    hiccups: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class FakeCard(Cpu):
    """Computes as the processor does, and is asked for its memory as a card is."""

    kind: str = "cpu"
    clock: Clock = field(default_factory=Clock)
    rate: float = CARD_RATE
    given_bytes: int | None = None  # out by the allocator; None: enough
    launch_s: float = 10e-6

    @property
    def has_own_memory(self) -> bool:
        return True

    def allocated_bytes(self) -> int:
        return 1 << 60 if self.given_bytes is None else self.given_bytes

    def mark(self) -> At:  # type: ignore[override] # a time of its own
        return At(self.clock.now_s)

    def read(self, content_u8: Tensor) -> None:
        address = content_u8.data_ptr()
        self.clock.reads.append(content_u8.numel())
        rate = BUS_RATE if address in self.clock.far else self.rate
        self.clock.now_s += self.launch_s + content_u8.numel() / rate
        is_whole = content_u8.numel() == content_u8.untyped_storage().nbytes()
        if is_whole and address in self.clock.hiccups:
            self.clock.hiccups.discard(address)
            self.clock.now_s += 0.1

    def synchronize(self) -> None:
        self.clock.num_waits += 1


@dataclass(frozen=True, slots=True)
class Told:
    """A reader that says what it is told to say."""

    card_bytes: int | None = None
    host_bytes: int | None = None
    used_bytes: int | None = None
    power_w: float | None = None

    def sensors(self) -> Sensors:
        return Sensors("test", power_w=self.power_w, used_bytes=self.used_bytes)

    def memory(self) -> ProcessMemory:
        why = "nobody knows" if self.card_bytes is None else ""
        return ProcessMemory("test", self.card_bytes, self.host_bytes, why=why)


def blocks(sizes: Collection[int]) -> dict[str, Tensor]:
    """Memory that is never touched, so that it takes none."""
    return {
        f"block {place}": torch.empty(size, dtype=torch.uint8) for place, size in enumerate(sizes)
    }
