"""The loss of a micro-batch by (step, place), drawn and computed as the recipe says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from outsize.objectives.protocol import OBJECTIVES, FlowObjective
from outsize.plan.names import base_family

if TYPE_CHECKING:
    from outsize.data.batches import Batch
    from outsize.devices.protocol import Device
    from outsize.families.protocol import BaseFamily
    from outsize.layers.model import FrozenModel
    from outsize.recipes.recipe import Recipe


class Batches(Protocol):
    """What gives the micro-batches of a step."""

    def batch(self, step: int, place: int) -> Batch: ...


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A micro-batch with its random choices, on the device."""

    latents: Tensor
    sigma: Tensor
    noise: Tensor
    loss_weight: Tensor
    conditions: Mapping[str, Tensor]


def _weight(batch: Batch) -> Tensor:
    """Of each sample (B,); of each latent cell (B, 1, H, W) where some have masks."""
    if batch.cell_weight_B1HW is None:
        return batch.loss_weight_B
    return batch.loss_weight_B.view(-1, 1, 1, 1) * batch.cell_weight_B1HW


class Losses:
    """Losses of micro-batches. Only the latest prepared one is remembered."""

    def __init__(
        self, recipe: Recipe, device: Device, model: FrozenModel, batches: Batches
    ) -> None:
        self._family = cast("BaseFamily", base_family(recipe.base.family))
        self._variant = recipe.base.variant
        train = recipe.train
        self._objective: FlowObjective = OBJECTIVES.load(self._family.objective).of_recipe(
            train.timesteps.model_dump(), train.loss.model_dump()
        )
        asked = recipe.train.guidance
        self._guidance = self._family.training_guidance(self._variant) if asked is None else asked
        self._device, self._model, self._batches = device, model, batches
        self._prepared: tuple[tuple[int, int], _Drawn] | None = None

    def prepare(self, step: int, place: int) -> None:
        """Draw a micro-batch and start moving it to the device, while that still computes what came before."""
        self._prepared = (step, place), self._draw(step, place)

    def loss(self, step: int, place: int) -> Tensor:
        """The loss of a micro-batch, with its graph."""
        key = (step, place)
        ready = self._prepared is not None and self._prepared[0] == key
        drawn = self._prepared[1] if self._prepared is not None and ready else self._draw(*key)
        self._prepared = None
        return self._objective.loss(
            self._predict(drawn),
            drawn.latents,
            drawn.sigma,
            drawn.noise,
            drawn.loss_weight,
            self._device.compute_dtype,
        )

    def error(self, batch: Batch, level: float) -> float:
        """The mean squared error of a batch of one picture at a level of noise, where its mask has it learned; no gradient.

        Its noise depends on its seed alone, and nothing on how errors count in training: figures of all runs compare.
        """
        (seed,) = batch.seeds
        shape = tuple(batch.latents_BCHW.shape)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        cells = batch.cell_weight_B1HW
        placed = self._placed(
            batch, torch.tensor([level]), noise, torch.ones(1) if cells is None else cells
        )
        self._model.begin("forward")
        with torch.no_grad():
            found = self._objective.squared(
                self._predict(placed),
                placed.latents,
                placed.sigma,
                placed.noise,
                placed.loss_weight,
                self._device.compute_dtype,
            )
        return float(found)

    def _predict(self, drawn: _Drawn) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda noisy, sigma: self._family.predict(
            self._variant, self._model.module, noisy, sigma, drawn.conditions, self._guidance
        )

    def _draw(self, step: int, place: int) -> _Drawn:
        batch = self._batches.batch(step, place)
        _, channels, height, width = batch.latents_BCHW.shape
        shape = (channels, height, width)
        mu = self._family.shift_mu(self._variant, self._family.num_tokens(self._variant, shape))
        sigma_B, noise = self._objective.draw(batch.seeds, shape, mu)
        return self._placed(batch, sigma_B, noise, _weight(batch))

    def _placed(self, batch: Batch, sigma_B: Tensor, noise: Tensor, weight: Tensor) -> _Drawn:
        compute = self._device.compute_dtype
        return _Drawn(
            self._move(batch.latents_BCHW),
            self._move(sigma_B),
            self._move(noise),
            self._move(weight),
            {name: self._move(one).to(compute) for name, one in batch.conditions.items()},
        )

    def _move(self, tensor: Tensor) -> Tensor:
        """To the device; where copies are asynchronous, without waiting for what is queued there."""
        target = self._device.torch_device
        if not self._device.copies_asynchronously:
            return tensor.to(target)
        return tensor.pin_memory().to(target, non_blocking=True)
