"""The loss of pictures that are held out, with fixed noise at fixed levels: of the base once, of the adapter on the way.

Training losses jump with the picture and the level of noise that were drawn, so that thousands of steps do not show whether
anything is still learned. Here neither changes: every figure is of the same pictures, the same noise and the same levels,
so that a rise is a rise, and base and adapter compare. Errors are squared ones whatever the recipe makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outsize.app.losses import Losses
from outsize.app.tasks.protocol import Table

if TYPE_CHECKING:
    from outsize.adapters.adapter import Adapter
    from outsize.app.site import Site
    from outsize.data.batches import Corpus
    from outsize.layers.model import FrozenModel
    from outsize.train.loop import StepReport

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)  # the middles of five equal parts of all levels
_TIMES = 10  # measurements of a run whose recipe does not say


class PictureWatch:
    """What is measured beside training."""

    def __init__(self, site: Site, model: FrozenModel, adapter: Adapter, corpus: Corpus) -> None:
        recipe = site.recipe
        self._site, self._adapter, self._corpus = site, adapter, corpus
        self._losses = Losses(recipe, site.device, model, corpus)
        self._every = recipe.evaluate.every or max(1, recipe.train.steps // _TIMES)
        most = max(1, recipe.evaluate.rows // len(LEVELS))
        self._count = min(most, corpus.num_held_out)
        self._base: dict[float, float] = {}
        self._last: tuple[int, dict[float, float]] = (-1, {})

    def begin(self, step: int) -> None:
        """Measure the base; and the adapter, where it was trained before."""
        if not self._count:
            return
        with self._adapter.neutral():
            self._base = self._measure()
        self._tell("base", step, self._base)
        if step:
            self._measure_adapter(step)

    def see(self, report: StepReport) -> None:
        """Measure now and then; the last step is measured at the end."""
        if self._count and report.step % self._every == 0 and report.step < report.num_steps:
            self._measure_adapter(report.step)

    def end(self, step: int) -> None:
        """Measure the adapter."""
        if self._count and self._last[0] != step:
            self._measure_adapter(step)

    def finish(self) -> None:
        """Nothing has to wait for the base's room."""

    def table(self) -> Table | None:
        """Base and adapter, by level of noise."""
        adapter = self._last[1]
        if not adapter:
            return None
        rows = [
            (name, f"{_mean(found):.5f}", *(f"{found[level]:.5f}" for level in LEVELS))
            for name, found in (("base", self._base), ("adapter", adapter))
        ]
        heads = ("model", "loss", *(f"noise {level:g}" for level in LEVELS))
        return Table(f"Held-out pictures: {self._count}", heads, tuple(rows))

    def _measure(self) -> dict[float, float]:
        """The mean error by level."""
        found = {}
        for number, level in enumerate(LEVELS):
            batches = (self._corpus.held_out(place, number) for place in range(self._count))
            found[level] = sum(self._losses.error(one, level) for one in batches) / self._count
        return found

    def _measure_adapter(self, step: int) -> None:
        with self._adapter.shown():
            self._last = (step, self._measure())
        self._tell("adapter", step, self._last[1])

    def _tell(self, what: str, step: int, found: Mapping[float, float]) -> None:
        by_level = {f"{level:g}": one for level, one in found.items()}
        self._site.journal.write(
            "evaluated", what=what, step=step, pictures=self._count, loss=_mean(found),
            by_level=by_level,
        )  # fmt: skip
        self._site.progress.say(
            f"step {step}: held-out loss of the {what} {_mean(found):.5f} on {self._count} pictures"
        )


def _mean(found: Mapping[float, float]) -> float:
    return sum(found.values()) / len(found)
