"""One thread that does what it is handed, in order, while the one who hands it over goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Self


class Conveyor:
    """Use it in a `with` block, whose end waits for all that was put; after an error in the block, what waits is dropped.

    limit_bytes: of work put and not done; one piece of work may be larger, and then waits until it is alone.
    """

    def __init__(self, limit_bytes: int, name: str) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._held_bytes = 0
        self._is_closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def reserve(self, num_bytes: int) -> None:
        """Wait until so many bytes may be put besides what waits.

        Raises: the first error of work that was put.
        """
        with self._changed:
            while self._error is None and not self._fits(num_bytes):
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def put(self, work: Callable[[], None], num_bytes: int = 0) -> None:
        """Hand over; num_bytes: what it holds until it is done. Waits, and raises, as `reserve`."""
        self.reserve(num_bytes)
        with self._changed:
            self._held_bytes += num_bytes
            self._waiting.append((work, num_bytes))
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            if kind is not None:
                self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _fits(self, num_bytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + num_bytes <= self._limit_bytes

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if not self._waiting or self._error is not None:
                    return
                work, num_bytes = self._waiting.popleft()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised where the work came from
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            del work  # and with it what it holds
            with self._changed:
                self._held_bytes -= num_bytes
                self._changed.notify_all()
