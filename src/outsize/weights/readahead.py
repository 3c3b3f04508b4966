"""Reading ahead: several threads fill a bounded number of slabs, and the caller takes them in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def read_ahead(
    items: Iterable[Item],
    fill: Callable[[Item, int], Found],
    *,
    num_slabs: int,
    num_threads: int,
) -> Generator[tuple[Item, int, Found]]:
    """Call fill(item, slab) in threads, ahead of the caller; give (item, slab, result) in the order of the items.

    slab: a number below num_slabs that is the item's alone until the caller asks for the next. An error of a call is
    raised in its turn; closing the generator waits for the calls that run.
    """
    rest, free = iter(items), list(range(num_slabs))
    running: deque[tuple[Item, int, Future[Found]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="rows") as pool:
        try:
            while True:
                while free and (item := next(rest, None)) is not None:
                    slab = free.pop()
                    running.append((item, slab, pool.submit(fill, item, slab)))
                if not running:
                    return
                item, slab, future = running.popleft()
                yield item, slab, future.result()
                free.append(slab)
        finally:
            pool.shutdown(cancel_futures=True)
