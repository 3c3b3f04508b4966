"""A count of living bytes, for claims about memory where no allocator tells."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LivingBytes(TorchDispatchMode):
    """Watches the results of operations. peak: most bytes alive at once of those made meanwhile; largest: of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = self._alive = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            one.untyped_storage()._cdata for one in tree_leaves(args) if isinstance(one, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:
                self._count(one.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self._alive += size
        self.peak, self.largest = max(self.peak, self._alive), max(self.largest, size)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._alive -= size
