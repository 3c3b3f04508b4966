"""Filling a model from its store: several threads read and hash blocks to where they belong, while the module is built.

Reading needs the store and the placement alone, so it starts before upstream's library is imported. Bytes go straight
into the placement's memory: on the host they are read there, to a device they pass through two small pinned buffers of
each thread, one being read while the other is copied. A placement that has no places to give is handed packet after
packet, by `put`. Small tensors of every block (norms, biases) and everything outside the blocks wait for the module.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from outsize.weights.reading import CheckedRead, StoreReader

if TYPE_CHECKING:
    from outsize.devices._host import HostBuffer
    from outsize.devices.protocol import Device
    from outsize.layers.model import FrozenModel
    from outsize.weights.packet import Packet

_MAX_THREADS = 8  # hashing takes most of the time, two gigabytes a second and thread
_PIECE_BYTES = 16 << 20


class Receiver(Protocol):
    """What loading needs of a placement."""

    def put(self, block: int, packet: Tensor) -> None: ...


@runtime_checkable
class _TakesInPlace(Protocol):
    def targets(self, block: int) -> Sequence[Tensor]: ...


class Loading:
    """A store on its way into a placement. Use it in a `with` block: leaving it early ends the threads.

    Memory: a few buffers of 16 MiB for each thread beside what the placement keeps; one of the largest packet if the
    placement has no places to give. has_outside_on_host: what lies outside the blocks is read into (pinned) host memory, which
    the model then holds, rather than to the device.
    """

    def __init__(
        self,
        reader: StoreReader,
        placement: Receiver,
        device: Device,
        *,
        has_outside_on_host: bool = False,
    ) -> None:
        self._reader, self._placement, self._device = reader, placement, device
        self._outside: HostBuffer | None = None
        if has_outside_on_host:
            self._outside = device.host_buffer(reader.store.packet(None).num_bytes)
        self.read_s = self.hash_s = self.copy_s = (
            0.0  # of all threads together; copying: what they waited for it
        )
        self.seconds = 0.0  # from the start until everything was read
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._in_turn = threading.Lock()
        self._own = threading.local()
        self._uploads: list[_Upload] = []
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="loading")
        blocks = sorted((file.block for file in reader.store.files), key=_outside_first)
        self._small = {block: self._pool.submit(self._load, block) for block in blocks}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for upload in self._uploads:
            upload.close()
        self._uploads.clear()

    def finish_into_(self, model: FrozenModel) -> None:
        """Wait for every block, and give the module its small tensors.

        Raises: StoreBroken for a file that is gone, ends early or was altered.
        """
        while self._small:  # each is dropped as soon as the module has it
            block = next(iter(self._small))
            small: Future[tuple[Tensor, int]] = self._small.pop(block)
            buffer, begin = small.result()
            model.load_small_(
                block, self._reader.store.packet(block), buffer, begin=begin, is_given=True
            )
        if self._outside is not None:
            model.keep_until_closed(self._outside)
        left = model.without_weights()
        assert not left, f"no weights for {left[:5]}"

    def _load(self, block: int | None) -> tuple[Tensor, int]:
        """Bring the streamed bytes to their place; gives the other bytes, and at which offset of the packet they begin."""
        packet = self._reader.store.packet(block)
        if block is None:
            target = self._device.torch_device
            whole = (
                torch.empty(packet.num_bytes, dtype=torch.uint8, device=target)
                if self._outside is None
                else self._outside.tensor[: packet.num_bytes]
            )
            return self._read_checked(None, [whole]), 0
        small = torch.empty(packet.num_bytes - packet.streamed_bytes, dtype=torch.uint8)
        if not isinstance(self._placement, _TakesInPlace):
            self._put(block, packet, small)
            return small, packet.streamed_bytes
        targets = self._placement.targets(block)
        if targets or not packet.streamed_bytes:
            self._read_checked(block, [*targets, small])
        else:
            self._reader.read_small(block, small)
        return small, packet.streamed_bytes

    def _put(self, block: int, packet: Packet, small: Tensor) -> None:
        """Lend the packet, one at a time."""
        with self._in_turn:
            lent = torch.empty(packet.streamed_bytes, dtype=torch.uint8)
            self._read_checked(block, [lent, small])
            self._placement.put(block, lent)

    def _read_checked(self, block: int | None, targets: Sequence[Tensor]) -> Tensor:
        """Fill tensors with a packet's bytes one after the other; gives the last of them."""
        copy_s = 0.0
        with self._reader.checked(block) as reading:
            for target in targets:
                if target.device.type == "cpu":
                    reading.into(target)
                else:
                    self._upload().fill(target, reading)
                    copy_s += self._upload().take_waited_s()
        with self._lock:
            self.read_s += reading.read_s
            self.hash_s += reading.hash_s
            self.copy_s += copy_s
            self.seconds = time.perf_counter() - self._started
        return targets[-1]

    def _upload(self) -> _Upload:
        """The calling thread's way to the device."""
        upload: _Upload | None = getattr(self._own, "upload", None)
        if upload is None:
            upload = self._own.upload = _Upload(self._device)
            with self._lock:
                self._uploads.append(upload)
        return upload


class _Upload:
    """Two pinned buffers and a stream: the next piece is read while the last one travels."""

    def __init__(self, device: Device) -> None:
        self._device = device.torch_device
        self._host = device.host_buffer(2 * _PIECE_BYTES)
        make_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self._stream = make_stream(self._device)
        self._sent = [make_event(blocking=True), make_event(blocking=True)]
        self._waited_s = 0.0

    def fill(self, target: Tensor, reading: CheckedRead) -> None:
        """Fill a tensor on the device; its bytes are there on return."""
        # the target's memory may have been another tensor's until a moment ago
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for turn, begin in enumerate(range(0, target.numel(), _PIECE_BYTES)):
            part, sent = target[begin : begin + _PIECE_BYTES], self._sent[turn % 2]
            first = turn % 2 * _PIECE_BYTES
            piece = self._host.tensor[first : first + part.numel()]
            self._wait_for(sent)
            reading.into(piece)
            with torch.cuda.stream(self._stream):
                part.copy_(piece, non_blocking=True)
                sent.record(self._stream)
        for sent in self._sent:
            self._wait_for(sent)

    def take_waited_s(self) -> float:
        """Seconds the thread waited for copies since it was last asked."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _wait_for(self, sent: torch.cuda.Event) -> None:
        started = time.perf_counter()
        sent.synchronize()
        self._waited_s += time.perf_counter() - started

    def close(self) -> None:
        """Give the buffers back."""
        self._host.release()


def _outside_first(block: int | None) -> int:
    """What lies outside the blocks is often the largest packet, and must not begin last."""
    return -1 if block is None else block


def load_from_store_(model: FrozenModel, reader: StoreReader, device: Device) -> Loading:
    """Fill a model from its store, every byte checked against its digest; gives what it took.

    Raises: StoreBroken for a file that is gone, ends early or was altered.
    """
    with Loading(reader, model.placement, device) as loading:
        loading.finish_into_(model)
    return loading
