"""Kernels recorded once and launched as one: CUDA graphs.

A step of a large model launches thousands of kernels, each of which costs the processor more than some of them take. All
graphs of a recorder share one pool of memory, in which what they compute on the way lies; so none may leave a result there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StreamRecorder:
    """Records what is queued on a stream of its own.

    Memory of the pool is allocated while recording and used by every launch, so it counts as taken from then on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's stub
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._beside_bytes = 0
        self._held_bytes: int | None = 0

    def make_room(self) -> None:
        """Give back what the allocator holds unused: the pool will not take it from there."""
        torch.cuda.empty_cache()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` queues, without doing it; the result queues all of that on the current stream.

        `run` must have run before, must not wait for the device, and must find its tensors where they are now whenever it is
        launched.
        """
        current = torch.cuda.current_stream(self._device)
        self._beside_bytes = max(self._beside_bytes, torch.cuda.memory_allocated(self._device))
        self._held_bytes = None
        graph: Any = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # other threads may go on copying and pinning meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay

    def peak_bytes(self) -> int:
        """The pool, with the most that tensors held beside it where something was recorded."""
        if self._held_bytes is None:
            segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call] # as above
            own = tuple(self._pool)
            self._held_bytes = sum(
                int(one["total_size"])
                for one in segments
                if tuple(one.get("segment_pool_id", ())) == own
            )
        return self._held_bytes + self._beside_bytes if self._held_bytes else 0
