"""Text, learned token by token; see app/text_corpus.py, text_losses.py, evaluate.py, write.py and text_compare.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

from outsize.base.errors import SourceError
from outsize.base.files import write_atomically, write_json_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from outsize.adapters.adapter import Adapter
    from outsize.app.site import Site
    from outsize.app.tasks.protocol import (
        Ask,
        Batches,
        Checked,
        Compared,
        Corpus,
        Naming,
        Preview,
        Sampled,
        Watch,
    )
    from outsize.app.text_corpus import Texts
    from outsize.app.text_losses import TextBatches, TextLosses
    from outsize.base.progress import Progress
    from outsize.data.provenance import Traced
    from outsize.devices.protocol import Device
    from outsize.layers.model import FrozenModel
    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class TextTask:
    """See protocol.py."""

    noun: str = "the texts"
    dialect: str = "peft"

    def naming(self, recipe: Recipe) -> Naming:
        """As the class that transformers and vLLM make of the source: its modules may lie deeper than ours."""
        from outsize.app.text_naming import naming_of

        return naming_of(recipe)

    def count(self, _recipe: Recipe) -> tuple[int, ...] | None:
        """Files tell their samples only when they are read."""
        return None

    def require(self, recipe: Recipe) -> None:
        """Refuse files that are not there.

        Raises: SourceError naming all of them.
        """
        missing = [str(one.path) for one in recipe.texts.sets if not one.path.exists()]
        if missing:
            raise SourceError(
                f"no such file or folder of texts: {', '.join(missing)}; put them there, or correct data.sets in the recipe"
            )

    def places(self, recipe: Recipe) -> tuple[Path, ...]:
        """Of each set."""
        return tuple(one.path for one in recipe.texts.sets)

    def traced(self, recipe: Recipe) -> tuple[Traced, ...]:
        """Each file of texts."""
        from outsize.app.tracing import traced_texts

        return traced_texts(recipe)

    def traced_in(self, folder: Path) -> tuple[Traced, ...]:
        """Each file of texts."""
        from outsize.app.tracing import texts_in

        return texts_in(folder)

    def preview(
        self, recipe: Recipe, num_samples: int, *, offline: bool, progress: Progress
    ) -> Preview:
        """Trained spans, and counts that tell a wrong template."""
        from outsize.app.text_preview import preview_texts

        return preview_texts(recipe, num_samples, offline=offline, progress=progress)

    def check(
        self, recipe: Recipe, num_shown: int, *, offline: bool, progress: Progress
    ) -> Checked:
        """What a preview counts."""
        from outsize.app.tasks.protocol import Checked

        del num_shown  # of texts there is no sheet
        made = self.preview(recipe, 0, offline=offline, progress=progress)
        table = made.table
        rows = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
        return Checked((table,), {"sets": rows}, notes=made.notes, fault=made.fault)

    def corpus(self, site: Site) -> Corpus:
        """All texts, tokenised."""
        from outsize.app.text_corpus import build_texts

        return build_texts(site)

    def losses(
        self, recipe: Recipe, device: Device, model: FrozenModel, batches: Batches
    ) -> TextLosses:
        """Of the next tokens."""
        from outsize.app.text_losses import TextLosses

        return TextLosses(recipe, device, model, cast("TextBatches", batches))

    def random_batches(self, recipe: Recipe, _device: Device) -> Batches:
        """Rows of random tokens."""
        from outsize.app._bench_batches import RandomTexts

        return RandomTexts(recipe)

    def watch(self, site: Site, model: FrozenModel, adapter: Adapter, corpus: Corpus) -> Watch:
        """Loss and perplexity of held-out texts, and previews."""
        from outsize.app.evaluate import TextWatch

        measured = TextWatch(site, model, adapter, cast("Texts", corpus))
        if site.recipe.previews.every is None:
            return measured
        from outsize.app.previews import Previews
        from outsize.app.tasks.protocol import Watches
        from outsize.app.text_previews import TextPreviews

        texts = TextPreviews(site, model, adapter)
        return Watches((measured, Previews(site, texts.make, lambda: None)))

    def compare(self, site: Site, run: RunFolder) -> Compared:
        """The same prompts by base and adapter."""
        from outsize.app.text_compare import compare_texts

        return compare_texts(site, run)

    def sample(
        self, site: Site, run: RunFolder, asks: Sequence[Ask], *, with_adapter: bool
    ) -> Iterator[Sampled]:
        """Answers, or texts gone on with, by the recipe's compare settings."""
        from outsize.app.people import people_rendered
        from outsize.app.tasks.protocol import Sampled
        from outsize.app.write import Scribe, settings_of, write_with

        scribe, people = Scribe(site), people_rendered(site, run, with_adapter=with_adapter)
        worded = [(scribe.worded(one.prompt), one.seed) for one in asks]
        settings = asdict(settings_of(site))
        folder = run.path / "samples"
        folder.mkdir(exist_ok=True)
        taken = [int(one.stem) for one in folder.glob("*.txt") if one.stem.isdigit()]
        first = 1 + max(taken, default=0)
        ((_, written),) = write_with(site, run, scribe, worded, adapters=(with_adapter,))
        for number, one in enumerate(written, start=first):
            path = folder / f"{number:04d}.txt"
            write_atomically(path, one.text.encode())
            said = {"prompt": one.prompt.shown, "seed": one.seed, "adapter": with_adapter}
            write_json_atomically(
                path.with_suffix(".json"),
                said | {"has_ended": one.has_ended, "tokens": list(one.ids), **settings},
            )
            people.note("sample", [path])
            yield Sampled(path, one.text)


plugin = TextTask()
