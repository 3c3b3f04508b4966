"""Is the adapter alive? Watched over the first steps: a gradient must reach every tensor, the delta must leave zero.

At the first step B is zero, so A's gradient is zero by construction; from the second on both must be non-zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outsize.base.errors import AdapterError, NotFinite

WATCHED_UPDATES = 5  # updates after which a tensor that never had a gradient is called dead


class HealthWatch:
    """Looks at the gradients of the first updates after a start, then costs nothing."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._silent: set[str] | None = None

    def look(self, grads: Mapping[str, Tensor | None]) -> list[str]:
        """Look at one update's gradients by name; after the last watched one, the names that never got any.

        Raises: AdapterError when a tensor is not part of the graph at all, or all are silent.
        """
        if self._num_seen >= WATCHED_UPDATES:
            return []
        detached = [name for name, one in grads.items() if one is None]
        if detached:
            raise AdapterError(
                f"no gradient reaches {len(detached)} of {len(grads)} adapter tensors, "
                f"{detached[0]} for one: the model does not use them; name other roles in the recipe"
            )
        norms = [torch.linalg.vector_norm(grad) for grad in grads.values() if grad is not None]
        silent = {
            name for name, norm in zip(grads, torch.stack(norms).tolist(), strict=True) if norm == 0
        }
        self._silent = silent if self._silent is None else self._silent & silent
        self._num_seen += 1
        if self._num_seen < WATCHED_UPDATES:
            return []
        if len(self._silent) == len(grads):
            raise AdapterError(
                f"every adapter gradient was zero for {WATCHED_UPDATES} updates: the loss does not depend on the adapter"
            )
        return sorted(self._silent)


def require_finite(
    loss: float,
    norm: float,
    grads: Mapping[str, Tensor | None],
    step: int,
    names_of: Callable[[int], list[str]],
) -> None:
    """Refuse an update by a loss or gradient that is no number.

    Raises: NotFinite naming the loss, or the first tensors whose gradients are not finite, and what the step drew.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    what = f"the loss of step {step} is {loss}"
    if math.isfinite(loss):
        names = [
            name for name, one in grads.items() if one is not None and not one.isfinite().all()
        ]
        what = (
            f"the gradients of {len(names)} adapter tensors are not finite at step {step}, first "
            f"{', '.join(names[:3])}"
        )
    raise NotFinite(
        f"{what}; the adapter was not updated and the last checkpoint is good. Lower learning_rate or set clip_norm, or "
        f"look at what the step learned from: {', '.join(names_of(step))}"
    )


def require_delta(norms: Mapping[str, float]) -> list[str]:
    """Names of modules whose delta is still zero.

    Raises: AdapterError when all are: the training had no effect.
    """
    zero = [path for path, norm in norms.items() if norm == 0]
    if len(zero) == len(norms):
        raise AdapterError(
            f"the delta of all {len(norms)} adapted modules is still zero: training changed nothing. "
            "Raise learning_rate or the number of steps"
        )
    return zero


def as_fp32(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached fp32 copies on the host, for norms and files."""
    return {
        name: one.detach().to("cpu", torch.float32, copy=True) for name, one in parameters.items()
    }
