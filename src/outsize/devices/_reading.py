"""How long a device takes to read memory: the one witness of where memory lies that no accounting can fool.

A card reads its own memory at hundreds or thousands of gigabytes a second, the host's at what the bus carries, 64 GB/s at
the most over sixteen lanes of PCIe 5.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outsize.devices.protocol import Device

_WARM_BYTES = 1 << 20  # loads the kernel, so that the first piece does not pay for it


def read_bytes(content_u8: Tensor) -> None:
    """Queue a sum over a whole storage: one launch, every byte read once, the few beyond the last eight left out."""
    whole = content_u8.numel() // 8 * 8
    if whole:
        content_u8[:whole].view(torch.int64).sum()


def read_seconds(device: Device, contents: Sequence[Tensor]) -> list[float]:
    """Seconds that the device took to read each (uint8); nothing is waited for but the end."""
    if not contents:
        return []
    device.read(contents[0][:_WARM_BYTES])
    marks = [device.mark()]
    for one in contents:
        device.read(one)
        marks.append(device.mark())
    device.synchronize()
    return [after.seconds_after(before) for before, after in pairwise(marks)]
