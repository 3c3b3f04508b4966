"""Previews of texts: what the adapter writes on a few prompts while it is trained, by the base that is loaded anyway."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from outsize.app.previews import STAGE, VALUES
from outsize.app.write import Prompt, Scribe, Written, settings_of, write_one
from outsize.base.files import folder_committed_to, write_json_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from outsize.adapters.adapter import Adapter
    from outsize.app.site import Site
    from outsize.layers.model import FrozenModel

MAX_DEFAULT_PROMPTS = 4  # beginnings of held-out texts taken when the recipe names no prompts


class TextPreviews:
    """Answers to the recipe's prompts, or texts gone on with."""

    def __init__(self, site: Site, model: FrozenModel, adapter: Adapter) -> None:
        self._site, self._model, self._adapter = site, model, adapter
        self._scribe = Scribe(site)
        choice = site.recipe.previews.over(site.recipe.compare)
        prompts = [self._scribe.worded(one) for one in choice.prompts]
        prompts = prompts or self._scribe.beginnings(MAX_DEFAULT_PROMPTS)
        self._asks: list[tuple[Prompt, int]] = [
            (prompt, seed) for seed in choice.seeds for prompt in prompts
        ]

    def make(self, step: int, folder: Path) -> None:
        """Write them."""
        site = self._site
        written: list[Written] = []
        with site.stages.stage(STAGE), self._model.as_written(), self._adapter.shown():
            for done, (prompt, seed) in enumerate(self._asks, start=1):
                written.append(write_one(site, self._model, self._scribe, prompt, seed))
                site.progress.advance(f"preview of step {step}", done, len(self._asks), "texts")
        texts = [
            {
                "prompt": one.prompt.shown,
                "seed": one.seed,
                "text": one.text,
                "has_ended": one.has_ended,
            }
            for one in written
        ]
        values = {"step": step, "settings": asdict(settings_of(site)), "texts": texts}
        with folder_committed_to(folder) as made:
            write_json_atomically(made / VALUES, values)
