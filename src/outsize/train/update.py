"""From gradients to new adapter values: accumulation in fp32, clipping, the optimiser, and its exact state.

All masters lie in one flat fp32 tensor, so that an update is a handful of launches instead of thousands: between the
gradient's norm, which the host must see, and the next step, the card would wait for every one of them. Where the adapter
computes in a smaller type its parameters are views of a flat rounded copy; where it computes in fp32, of the masters
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outsize.train.optimizers.protocol import OPTIMIZERS, OptimizerFactory, OptimizerSettings

# Elements at which each tensor begins: whole 256-byte lines in any type, and whole blocks of 8-bit optimisers.
_ALIGNMENT = 256


class Update:
    """Masters, gradients and optimiser of one adapter. masters: fp32, by name, views of the flat tensor."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        initial: Mapping[str, Tensor],
        name: str,
        settings: OptimizerSettings,
    ) -> None:
        """Set up for these parameters, whose unrounded values (fp32) are `initial`; their storage is replaced."""
        self.parameters = dict(parameters)
        some = next(iter(self.parameters.values()))
        size = 0
        self._places: dict[str, tuple[int, torch.Size]] = {}
        for key, one in self.parameters.items():
            self._places[key] = (size, one.shape)
            size += -(-one.numel() // _ALIGNMENT) * _ALIGNMENT
        flat = torch.zeros(size, device=some.device)
        self.masters = self._views(flat)
        for key, master in self.masters.items():
            master.copy_(initial[key])
        self._flat = nn.Parameter(flat)
        self._rounded = None if some.dtype == flat.dtype else flat.to(some.dtype)
        for key, view in self._views(flat if self._rounded is None else self._rounded).items():
            self.parameters[key].data = view
        self._grads: dict[str, Tensor | None] = {}
        factory: OptimizerFactory = OPTIMIZERS.load(name)
        self.optimizer = factory([self._flat], settings)

    def collect_(self) -> None:
        """Add the parameters' gradients to the masters' and clear them; call after every backward."""
        given = {key: one.grad for key, one in self.parameters.items() if one.grad is not None}
        if self._flat.grad is None:
            self._flat.grad = torch.zeros_like(self._flat)
            self._grads = dict.fromkeys(self.parameters)
        views = self._views(self._flat.grad)
        first = [key for key in given if self._grads[key] is None]
        later = [key for key in given if self._grads[key] is not None]
        if first:
            torch._foreach_copy_([views[key] for key in first], [given[key] for key in first])
        if later:
            torch._foreach_add_([views[key] for key in later], [given[key] for key in later])
        self._grads |= {key: views[key] for key in given}
        for one in self.parameters.values():
            one.grad = None

    def grads(self) -> dict[str, Tensor | None]:
        """The gradient of each master, fp32; None for one that no backward reached."""
        return self._grads

    def grad_norm(self) -> Tensor:
        """Euclidean norm of all gradients together."""
        assert self._flat.grad is not None, "collect_ comes before the gradients are asked for"
        norm: Tensor = torch.linalg.vector_norm(self._flat.grad)
        return norm

    def clip_(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients down to a total norm of limit."""
        torch.nn.utils.clip_grads_with_norm_([self._flat], limit, norm)

    def step_(self, learning_rate: float) -> None:
        """Update the masters and the parameters; clear all gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._grads = {}
        self.publish_()

    def publish_(self) -> None:
        """Copy the masters into the parameters that compute."""
        if self._rounded is not None:
            with torch.no_grad():
                self._rounded.copy_(self._flat)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimiser's state as tensors by path, and a JSON skeleton that says where each belongs."""
        tensors: dict[str, Tensor] = {}
        skeleton = _take_tensors(self.optimizer.state_dict(), "state", tensors)
        return tensors, skeleton

    def load_state_(self, tensors: Mapping[str, Tensor], skeleton: dict[str, Any]) -> None:
        """Take the state that `state` gave."""
        self.optimizer.load_state_dict(_put_tensors(skeleton, tensors))

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each tensor's place in a flat one."""
        return {
            key: flat.narrow(0, start, math.prod(shape)).view(shape)
            for key, (start, shape) in self._places.items()
        }


def _take_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Replace tensors in nested containers by {"tensor": path}; keep the type of every dictionary key."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        items = [[key, _take_tensors(one, f"{path}.{key}", tensors)] for key, one in value.items()]
        return {"items": items}
    if isinstance(value, tuple | list):
        taken = [_take_tensors(one, f"{path}.{i}", tensors) for i, one in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": taken}
    assert value is None or isinstance(value, bool | int | float | str), (
        f"{path} is a {type(value)}"
    )
    return {"value": value}


def _put_tensors(skeleton: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of _take_tensors."""
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content].clone()
    if kind == "items":
        return {key: _put_tensors(one, tensors) for key, one in content}
    if kind in ("tuple", "list"):
        made = [_put_tensors(one, tensors) for one in content]
        return tuple(made) if kind == "tuple" else made
    return content
