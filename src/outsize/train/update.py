"""From gradients to new adapter values: accumulation in fp32, clipping, the optimiser, and its exact state.

All masters lie in one flat fp32 tensor, so that an update is a handful of launches instead of thousands: between the
gradient's norm, which the host must see, and the next step, the card would wait for every one of them. Where the adapter
computes in a smaller type its parameters are views of a flat rounded copy; where it computes in fp32, of the masters
themselves. Weights that are not what is to be used elsewhere (an optimiser's, or where a moving average is wanted) have an
average beside them: a flat tensor of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outsize.train.average import Average
from outsize.train.optimizers.protocol import OptimizerSettings, make_optimizer

# Elements at which each tensor begins: whole 256-byte lines in any type, and whole blocks of 8-bit optimisers.
_ALIGNMENT = 256


class Update:
    """Masters, gradients and optimiser of one adapter. masters: fp32, by name, views of the flat tensor."""

    def __init__(  # noqa: PLR0917 - what is trained, by what, and how
        self,
        parameters: Mapping[str, nn.Parameter],
        initial: Mapping[str, Tensor],
        name: str,
        settings: OptimizerSettings,
        options: Mapping[str, Any] | None = None,
        ema: float | None = None,
    ) -> None:
        """Set up for these parameters, whose unrounded values (fp32) are `initial`; their storage is replaced.

        options: the optimiser's own. ema: decay of a moving average of the masters; None: none is kept.
        """
        self.parameters = dict(parameters)
        # the type that most compute in; those in fp32 are their masters
        some = min(self.parameters.values(), key=lambda one: one.element_size())
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
        self._computing = self._in_own_types(flat, self._rounded)
        self._take(self._computing)
        self._grads: dict[str, Tensor | None] = {}
        self._factory = make_optimizer(name, options)
        self.optimizer = self._factory([self._flat], settings)
        self._average = None if ema is None else Average(flat, ema)

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
        if self._average is not None:
            self._average.follow_(self._flat.detach())
        self.publish_()

    def publish_(self) -> None:
        """Copy the masters into the parameters that compute."""
        if self._rounded is not None:
            with torch.no_grad():
                self._rounded.copy_(self._flat)

    def averaged(self) -> dict[str, Tensor] | None:
        """What is to be used elsewhere in place of the masters, fp32 by name; None where that is the masters themselves."""
        flat = self._averaged()
        return None if flat is None else self._views(flat)

    def held(self) -> dict[str, Tensor]:
        """Memory that is held for training, by name; the optimiser's own comes with its first step."""
        flat = {"fp32 masters": self._flat.detach()}
        if self._average is not None:
            flat["moving average"] = self._average.values
        states = self.optimizer.state.values()
        own = ((key, one) for state in states for key, one in state.items())
        # what is one number counts steps, and may lie on the host
        own = ((key, one) for key, one in own if isinstance(one, Tensor) and one.numel() > 1)
        return flat | {f"optimiser's {key}": one for key, one in own}

    @contextmanager
    def shown(self, which: Literal["averaged", "raw"]) -> Iterator[None]:
        """Within the block the adapter computes with the averaged weights, where there are any; no bit is changed by it."""
        flat = self._averaged() if which == "averaged" else None
        if flat is None:
            yield
            return
        rounded = None if self._rounded is None else flat.to(self._rounded.dtype)
        self._take(self._in_own_types(flat, rounded))
        try:
            yield
        finally:
            self._take(self._computing)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimiser's state as tensors by path, and a JSON skeleton that says where each belongs."""
        tensors: dict[str, Tensor] = {}
        skeleton = _take_tensors(self.optimizer.state_dict(), "state", tensors)
        if self._average is not None:
            skeleton = {**skeleton, "averaged_updates": self._average.num_updates}
        return tensors, skeleton

    def load_state_(
        self,
        tensors: Mapping[str, Tensor],
        skeleton: dict[str, Any],
        averaged: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take the state that `state` gave, and what `averaged` gave then."""
        own = {key: value for key, value in skeleton.items() if key != "averaged_updates"}
        self.optimizer.load_state_dict(_put_tensors(own, tensors))
        if self._average is not None:
            assert averaged is not None, "a run that averages has saved its average"
            self._average.num_updates = skeleton["averaged_updates"]
            for name, view in self._views(self._average.values).items():
                view.copy_(averaged[name])

    def _averaged(self) -> Tensor | None:
        if self._average is not None:
            return self._average.values
        find = getattr(self._factory, "averaged", None)
        flat: Tensor | None = None if find is None else find(self.optimizer, self._flat)
        return flat

    def _in_own_types(self, flat: Tensor, rounded: Tensor | None) -> dict[str, Tensor]:
        """Each parameter's values in the type that it computes in."""
        whole = self._views(flat)
        if rounded is None:
            return whole
        small = self._views(rounded)
        return {
            key: whole[key] if one.dtype == flat.dtype else small[key]
            for key, one in self.parameters.items()
        }

    def _take(self, values: Mapping[str, Tensor]) -> None:
        for key, value in values.items():
            self.parameters[key].data = value

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
