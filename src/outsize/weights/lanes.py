"""Threads and a card: queues of their own for copies, and slabs that lie on both sides.

Work of all threads goes to one queue of a device unless each has its own, and a copy from pageable memory holds up
everybody. So each thread gets a queue, and slabs are pinned. On a processor there are no queues and a slab is its own
twin. Builds of torch for AMD cards answer to torch.cuda as well (not verified on hardware).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Lanes:
    """One queue for each thread that asks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_queues = device.type != "cpu"
        self.num_unpinned = 0
        self._own = threading.local()

    @contextmanager
    def lane(self, after: Any = None) -> Iterator[None]:
        """Work queued within the block goes to this thread's queue, and is done when the block ends.

        after: a mark that the work waits for on the device.
        """
        if not self.has_queues:
            yield
            return
        import torch

        make: Any = torch.cuda.Stream
        queue: Any = getattr(self._own, "queue", None)
        if queue is None:
            queue = self._own.queue = make(self.device)
        with torch.cuda.stream(queue):
            if after is not None:
                queue.wait_event(after)
            yield
            queue.synchronize()

    def mark(self) -> Any:
        """A mark after all work that this thread has queued so far; None on a processor, where work is done at once."""
        if not self.has_queues:
            return None
        import torch

        make: Any = torch.cuda.Event
        event = make()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8 (num_bytes,) on the host, pinned where there is a device to copy to and the system allows it.

        A copy from memory that is not pinned is slower and otherwise the same; `num_unpinned` counts such buffers.
        """
        import torch

        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.has_queues)
        except RuntimeError:  # torch's own class for refused memory is one
            self.num_unpinned += 1
            return torch.empty(num_bytes, dtype=torch.uint8)

    def give_back(self) -> None:
        """Unpin what torch keeps of host buffers that are no longer used, so that whoever comes next may pin it."""
        if not self.has_queues:
            return
        import torch

        release = getattr(torch.accelerator, "empty_host_cache", None)
        if release is None:  # older torch has it under this name only
            release = torch._C._host_emptyCache  # noqa: SLF001
        release()

    def peak_bytes(self) -> int:
        """Most device memory that tensors took since the peak was last reset; 0 on a processor."""
        if not self.has_queues:
            return 0
        import torch

        return torch.cuda.max_memory_allocated(self.device)


class Slabs:
    """Numbered buffers on the host, each with a twin on the device.

    A thread fills a buffer and uploads it; the caller queues work on the twin, and releases it.
    """

    def __init__(self, lanes: Lanes, num_slabs: int, num_bytes: int) -> None:
        import torch

        self._lanes = lanes
        self._host = [lanes.host_buffer(num_bytes) for _ in range(num_slabs)]
        self._twins = self._host
        if lanes.has_queues:
            self._twins = [torch.empty_like(one, device=lanes.device) for one in self._host]
        self._marks: list[Any] = [None] * num_slabs

    def buffer(self, slab: int, num_bytes: int) -> memoryview:
        """The first bytes of a slab on the host, to be written to."""
        return self._host[slab].numpy().data[:num_bytes]

    def upload(self, slab: int, num_bytes: int) -> None:
        """Copy the first bytes to the twin, once what was queued on it before is done; the copy is done on return."""
        if self._twins is not self._host:
            with self._lanes.lane(after=self._marks[slab]):
                self._twins[slab][:num_bytes].copy_(self._host[slab][:num_bytes], non_blocking=True)

    def rows(self, slab: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The twin's first bytes as a tensor."""
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        return self._twins[slab][:count].view(dtype).view(shape)

    def release(self, slab: int) -> None:
        """All work on the twin has been queued by this thread."""
        self._marks[slab] = self._lanes.mark()
