"""Loss and perplexity on texts that are held out: of the base once, of the adapter while it is trained and at the end.

The base is the neutral adapter, which is exact: a delta of zero is added. So compiled blocks, which have looked at their
adapter once and for all, give both. What is measured of the adapter are the weights to be shown, where an average is kept.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from outsize.app.tasks.protocol import Table
from outsize.app.text_losses import Rows
from outsize.base.errors import AdapterError
from outsize.objectives.protocol import Nats

if TYPE_CHECKING:
    from torch import Tensor

    from outsize.adapters.adapter import Adapter
    from outsize.app.site import Site
    from outsize.app.text_corpus import Texts
    from outsize.layers.model import FrozenModel
    from outsize.train.loop import StepReport

_TIMES = 10  # measurements of a run whose recipe does not say
_LOGIT_ROWS = 8  # of a batch's trained tokens, whose logits are compared whole


class TextWatch:
    """What is measured beside training."""

    def __init__(self, site: Site, model: FrozenModel, adapter: Adapter, texts: Texts) -> None:
        recipe = site.recipe
        self._site, self._adapter, self._texts = site, adapter, texts
        self._rows = Rows(recipe, site.device, model)
        self._model = model
        self._every = recipe.evaluate.every or max(1, recipe.train.steps // _TIMES)
        self._max_rows = recipe.evaluate.rows
        self._base: Nats | None = None
        self._last: tuple[int, Nats | None] = (-1, None)

    def begin(self, step: int) -> None:
        """Measure the base; and the adapter, where it was trained before."""
        with self._adapter.neutral():
            self._base = self._measure()
        if self._base is None:
            self._site.progress.say("nothing is held out, so nothing is measured while training")
            return
        self._tell("base", step, self._base)
        if step:
            self._measure_adapter(step)

    def see(self, report: StepReport) -> None:
        """Measure now and then; the last step is measured at the end."""
        is_due = report.step % self._every == 0 and report.step < report.num_steps
        if self._base is not None and is_due:
            self._measure_adapter(report.step)

    def end(self, step: int) -> None:
        """Measure the adapter, and prove that it changes what the model says.

        Raises: AdapterError when it does not.
        """
        if self._base is not None and self._last[0] != step:
            self._measure_adapter(step)
        if step:
            self._prove(step)

    def finish(self) -> None:
        """Nothing needs the base's room."""

    def table(self) -> Table | None:
        """Base and adapter."""
        adapter = self._last[1]
        if self._base is None or adapter is None:
            return None
        rows = [
            (name, f"{one.mean:.4f}", f"{one.perplexity:.2f}")
            for name, one in (("base", self._base), ("adapter", adapter))
        ]
        title = f"Held-out text, {self._base.num_tokens} trained tokens"
        return Table(title, ("model", "loss", "perplexity"), tuple(rows))

    def _measure(self) -> Nats | None:
        found = self._rows.measure(self._texts.held_out(self._max_rows))
        return found if found.num_tokens else None

    def _measure_adapter(self, step: int) -> None:
        with self._adapter.shown():
            found = self._measure()
        assert found is not None, "the same tokens gave the base's loss"
        self._last = (step, found)
        self._tell("adapter", step, found)

    def _tell(self, what: str, step: int, found: Nats) -> None:
        figures = {"loss": found.mean, "perplexity": found.perplexity}
        # JSON has no infinity
        kept = {name: one if math.isfinite(one) else None for name, one in figures.items()}
        self._site.journal.write("evaluated", what=what, step=step, tokens=found.num_tokens, **kept)
        self._site.progress.say(
            f"step {step}: held-out loss of the {what} {found.mean:.4f}, perplexity {found.perplexity:.2f}"
        )

    def _prove(self, step: int) -> None:
        with self._adapter.shown():
            after = self._logits(step - 1)
        with self._adapter.neutral():
            before = self._logits(step - 1)
        largest = float((after - before).abs().max())
        self._site.journal.write("logits", largest_difference=largest)
        if largest == 0:
            raise AdapterError(
                "the logits with the adapter equal those of the base: it changes nothing of what the model says. Raise "
                "learning_rate or the number of steps"
            )
        self._site.progress.say(f"adapter: logits differ from the base's by up to {largest:.4g}")

    def _logits(self, step: int) -> Tensor:
        """Logits of some trained tokens of a step (tokens, V)."""
        batch = self._rows.placed(self._texts.batch(step, 0))
        self._model.begin("forward")
        with torch.no_grad():
            hidden = self._rows.hidden(batch)
            places = (batch.labels >= 0).nonzero()[-_LOGIT_ROWS:].to(hidden.device)
            weight = self._rows.head().weight
            rows = hidden[places[:, 0], places[:, 1]].to(weight.device, weight.dtype)
            return (rows @ weight.mT).float()
