"""A worker thread's own queue of work on a card, so that threads do not wait for each other's copies.

Work of all threads goes to one queue of the device unless each has its own; a copy from pageable memory then holds up
everybody. On a processor there are no queues, and nothing happens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Lanes:
    """One queue for each thread that asks. ROCm builds of torch answer to torch.cuda as well."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_queues = device.type != "cpu"
        self._own = threading.local()

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Work queued within the block goes to this thread's queue, and is done when the block ends."""
        if not self.has_queues:
            yield
            return
        import torch

        make: Any = torch.cuda.Stream
        stream: Any = getattr(self._own, "queue", None)
        if stream is None:
            stream = self._own.queue = make(self.device)
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()
