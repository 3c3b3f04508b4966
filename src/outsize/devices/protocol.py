"""What a device is: where tensors compute, in which type, and what its allocator says.

Nothing outside this folder asks for CUDA by name. A plug-in binds `plugin` to a factory with `is_present()`, `rank`
(the highest present one is taken) and `open(index)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from outsize.base.catalogue import Catalogue
from outsize.base.errors import MachineFault
from outsize.devices._card_lock import Tell, hold_card, say_on_stderr

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outsize.devices._host import HostBuffer
    from outsize.devices._sensors import CardId

DEVICES = Catalogue("outsize.devices", "device")


class Mark(Protocol):
    """A point in a device's queue of work."""

    def seconds_after(self, earlier: Mark) -> float:
        """Seconds between two points; both must have been passed (synchronise first)."""


class Recorder(Protocol):
    """Records work, to launch all of it as one: a processor that launches kernels one by one may be slower than they are."""

    def make_room(self) -> None:
        """Give back memory that the allocator holds unused, since recordings take other memory."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What does all that `run` would have queued, on the same tensors, whenever it is called.

        `run` must have run before and must not wait for the device; no result may stay in memory that it takes.
        """


class Device(Protocol):
    """One place to compute."""

    @property
    def name(self) -> str:
        """What people call it: "NVIDIA H200", "CPU, 2 threads"."""

    @property
    def kind(self) -> str:
        """Name of its plug-in."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors live."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of activations: bf16 where it is fast, else fp32."""

    @property
    def copies_asynchronously(self) -> bool:
        """Whether copies from pinned host memory overlap with compute (streams and events exist)."""

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is not the host's."""

    @property
    def card(self) -> CardId | None:
        """Which physical card it is, for whoever asks the system about it; None for the host's processor."""

    def compute_exactly(self, *, is_wanted: bool) -> None:
        """Use only kernels that give the same bits each time, as exact resume needs; or any."""

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def peak_bytes(self) -> int:
        """Most device memory held by tensors since reset_peak; 0 where the host's memory is the device's."""

    def reset_peak(self) -> None:
        """Start measuring the peak anew."""

    def peak_reserved_bytes(self) -> int:
        """Most that the allocator took of the device since reset_peak, fragments included; 0 as with peak_bytes."""

    def allocated_bytes(self) -> int:
        """Device memory held by tensors now; 0 as with peak_bytes."""

    def reserved_bytes(self) -> int:
        """What the allocator holds of the device now; 0 as with peak_bytes."""

    def read(self, content_u8: Tensor) -> None:
        """Queue work that reads every byte of a tensor (uint8) once, to learn how long that takes."""

    def mark(self) -> Mark:
        """The present end of the queue of the current stream."""

    def recorder(self) -> Recorder | None:
        """A new one, whose memory is the recordings'; None where nothing can be recorded, or that was not verified."""

    def limit_memory(self, num_bytes: int) -> int:
        """Let this process take so much of the device in all; the bytes that are left for tensors.

        What the driver's context and libraries take counts against it, so that a small card is stood in for. Comes before
        any other work on the device.
        Raises: MachineFault where there is nothing to limit, or nothing would be left.
        """

    def free_bytes(self) -> int:
        """Device memory that can still be taken."""

    def release_cached(self) -> None:
        """Give unused memory of the allocator back, between stages."""

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        """Host memory that copies read by themselves: pinned where the device is a card.

        Where pinning is refused it is ordinary memory and says why; copies from it must then be staged.
        """


class DeviceKind(Protocol):
    """A plug-in of this folder."""

    @property
    def rank(self) -> int:
        """Preference when several are present: the highest wins."""

    def is_present(self) -> bool:
        """Whether torch, as installed, can use such a device here."""

    def open(self, index: int = 0) -> Device:
        """The index-th device of this kind."""


def open_device(kind: str | None = None, index: int = 0, *, tell: Tell = say_on_stderr) -> Device:
    """The device of that kind, or of the best kind present; a card is this process's from here until it ends.

    tell: told who holds the card while another process does.
    Raises: MachineFault when the kind asked for is not present; RecipeError when there is no such kind.
    """
    opened = _chosen(kind).open(index)
    if opened.card is not None:
        hold_card(opened.card, opened.name, tell)
    return opened


def card_of(kind: str | None = None, index: int = 0) -> tuple[CardId | None, str]:
    """Which card open_device would open, and its name, without waiting for it."""
    opened = _chosen(kind).open(index)
    return opened.card, opened.name


def _chosen(kind: str | None) -> DeviceKind:
    if kind is not None:
        chosen: DeviceKind = DEVICES.load(kind)
        if not chosen.is_present():
            raise MachineFault(
                f"no {kind} device can be used by the installed torch; leave --device out to take the best one"
            )
        return chosen
    kinds: list[DeviceKind] = [DEVICES.load(name) for name in DEVICES.names()]
    return max((one for one in kinds if one.is_present()), key=lambda one: one.rank)
