"""The loss of packed rows by (step, place): hidden states of the base, and cross entropy in tiles over trained tokens.

Every trained token of an update counts the same, in whichever of its micro-batches it lies: sums are divided by the tokens
of the whole update, not by those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from outsize.devices._copies import Copies, make_copies
from outsize.objectives.protocol import OBJECTIVES, Nats, NextTokenObjective, OutputHead
from outsize.plan.names import base_family

if TYPE_CHECKING:
    from outsize.data.text_corpus import TextBatch
    from outsize.devices.protocol import Device
    from outsize.families.protocol import LanguageFamily
    from outsize.layers.model import FrozenModel
    from outsize.recipes.recipe import Recipe


class TextBatches(Protocol):
    """What gives the micro-batches of a step."""

    def batch(self, step: int, place: int) -> TextBatch: ...

    def num_trained(self, step: int) -> int: ...


class TextLosses:
    """Losses of micro-batches. Only the latest prepared one is remembered."""

    def __init__(
        self, recipe: Recipe, device: Device, model: FrozenModel, batches: TextBatches
    ) -> None:
        self._rows = Rows(recipe, device, model)
        self._accumulate, self._batches = recipe.train.accumulate, batches
        self._prepared: tuple[tuple[int, int], TextBatch] | None = None

    def prepare(self, step: int, place: int) -> None:
        """Pack a micro-batch and start moving it to the device, while that still computes what came before."""
        self._prepared = (step, place), self._rows.placed(self._batches.batch(step, place))

    def loss(self, step: int, place: int) -> Tensor:
        """The loss of a micro-batch, with its graph; the mean over the places of a step is the mean over its tokens."""
        if self._prepared is None or self._prepared[0] != (step, place):
            self.prepare(step, place)
        assert self._prepared is not None, "it was just prepared"
        batch, self._prepared = self._prepared[1], None
        num_trained = self._batches.num_trained(step) / self._accumulate
        return self._rows.loss(batch, num_trained)


class Rows:
    """Packed rows through a base."""

    def __init__(self, recipe: Recipe, device: Device, model: FrozenModel) -> None:
        self._family = cast("LanguageFamily", base_family(recipe.base.family))
        self._variant = recipe.base.variant
        self._objective: NextTokenObjective = OBJECTIVES.load(self._family.objective)()
        self._device, self._model = device, model
        self._copies: Copies | None = None

    def hidden(self, batch: TextBatch) -> Tensor:
        """Last hidden states (B, T, D)."""
        return self._family.hidden(
            self._variant,
            self._model.module,
            batch.input_ids,
            batch.position_ids,
            batch.segments,
        )

    def head(self) -> OutputHead:
        """What turns hidden states into logits."""
        weight, softcap = self._family.head(self._variant, self._model.module)
        return OutputHead(weight=weight.detach(), softcap=softcap)

    def loss(self, batch: TextBatch, num_trained: float) -> Tensor:
        """Sum of a batch's losses, each row's by its factor, over the trained tokens of the whole update."""
        hidden, head = self.hidden(batch), self.head()
        weights = batch.loss_weight_B.tolist()
        total = hidden.new_zeros((), dtype=torch.float32)
        for weight in dict.fromkeys(weights):
            rows = [row for row, one in enumerate(weights) if one == weight]
            is_all = len(rows) == len(weights)
            own = hidden if is_all else hidden[rows]
            labels = batch.labels if is_all else batch.labels[rows]
            total = total + weight * self._objective.loss(
                own, head, labels, num_trained=num_trained, copies=self._copies_of(head)
            )
        return total

    def measure(self, batches: Iterable[TextBatch]) -> Nats:
        """What the tokens of some batches cost, without a graph."""
        total = Nats(0.0, 0)
        head = self.head()
        copies = self._copies_of(head)
        for batch in batches:
            placed = self.placed(batch)
            self._model.begin("forward")
            with torch.no_grad():
                total += self._objective.nats(
                    self.hidden(placed), head, placed.labels, copies=copies
                )
        return total

    def placed(self, batch: TextBatch) -> TextBatch:
        """A batch as the model takes it: ids, labels and segments stay on the host, where looking at them waits for nothing.

        Ids are pinned, so that wherever the token table lies they get there beside the computation.
        """
        ids = batch.input_ids
        return replace(
            batch,
            input_ids=ids.pin_memory() if self._device.copies_asynchronously else ids,
            position_ids=self._move(batch.position_ids),
        )

    def _copies_of(self, head: OutputHead) -> Copies | None:
        """What brings a head that lies in host memory, tile by tile beside the computation; made once."""
        if head.weight.device == self._device.torch_device:
            return None
        if self._copies is None:
            self._copies = make_copies(self._device, num_tracks=2)
        return self._copies

    def _move(self, tensor: Tensor) -> Tensor:
        target = self._device.torch_device
        if not self._device.copies_asynchronously:
            return tensor.to(target)
        return tensor.pin_memory().to(target, non_blocking=True)
