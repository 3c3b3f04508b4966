"""From gradients to new adapter values: accumulation in fp32, clipping, the optimiser, and its exact state.

Where the adapter computes in bf16 the optimiser works on fp32 masters: gradients of every micro-batch are added to the
masters' in fp32, and the rounded masters are copied back after the update. Where it computes in fp32 the parameters are
their own masters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outsize.train.optimizers.protocol import OPTIMIZERS, OptimizerFactory, OptimizerSettings


class Update:
    """Masters, gradients and optimiser of one adapter."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        initial: Mapping[str, Tensor],
        name: str,
        settings: OptimizerSettings,
    ) -> None:
        """Set up for these parameters, whose unrounded values (fp32) are `initial`."""
        self.parameters = dict(parameters)
        self.masters = {
            key: one
            if one.dtype == torch.float32
            else nn.Parameter(initial[key].to(one.device, torch.float32))
            for key, one in self.parameters.items()
        }
        factory: OptimizerFactory = OPTIMIZERS.load(name)
        self.optimizer = factory(list(self.masters.values()), settings)

    def collect_(self) -> None:
        """Add the parameters' gradients to the masters' and clear them; call after every backward."""
        first: list[nn.Parameter] = []  # masters without a gradient yet
        fresh: list[Tensor] = []  # what these get
        sums: list[Tensor] = []
        added: list[Tensor] = []  # what those get
        for key, parameter in self.parameters.items():
            master = self.masters[key]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                first.append(master)
                fresh.append(parameter.grad)
            else:
                sums.append(master.grad)
                added.append(parameter.grad)
            parameter.grad = None
        # many tensors in one launch: a large adapter has a thousand
        if added:
            torch._foreach_add_(sums, added)
        if fresh:
            wide = [torch.empty_like(master) for master in first]
            torch._foreach_copy_(wide, fresh)
            for master, grad in zip(first, wide, strict=True):
                master.grad = grad

    def grad_norm(self) -> Tensor:
        """Euclidean norm of all gradients together."""
        grads = [one.grad for one in self.masters.values() if one.grad is not None]
        return torch.nn.utils.get_total_norm(grads)

    def clip_(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients down to a total norm of limit."""
        torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), limit, norm)

    def step_(self, learning_rate: float) -> None:
        """Update the masters and the parameters; clear all gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.publish_()

    def publish_(self) -> None:
        """Copy the masters into the parameters that compute."""
        rounded = [key for key, one in self.parameters.items() if self.masters[key] is not one]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self.parameters[key] for key in rounded],
                    [self.masters[key] for key in rounded],
                )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimiser's state as tensors by path, and a JSON skeleton that says where each belongs."""
        tensors: dict[str, Tensor] = {}
        skeleton = _take_tensors(self.optimizer.state_dict(), "state", tensors)
        return tensors, skeleton

    def load_state_(self, tensors: Mapping[str, Tensor], skeleton: dict[str, Any]) -> None:
        """Take the state that `state` gave."""
        self.optimizer.load_state_dict(_put_tensors(skeleton, tensors))


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
