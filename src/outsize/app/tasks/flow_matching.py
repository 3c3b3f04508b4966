"""Pictures with captions, learned by rectified flow; see app/encode.py, losses.py, compare.py and render.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from outsize.app.tasks.protocol import (
    Ask,
    Batches,
    Checked,
    Compared,
    Naming,
    NoWatch,
    Preview,
    Sampled,
    Table,
    Watch,
    Watches,
)
from outsize.base.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from outsize.adapters.adapter import Adapter
    from outsize.app.losses import Losses
    from outsize.app.site import Site
    from outsize.app.tasks.protocol import Corpus
    from outsize.base.progress import Progress
    from outsize.data import batches as data
    from outsize.data.provenance import Traced
    from outsize.devices.protocol import Device
    from outsize.layers.model import FrozenModel
    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Pictures:
    """All pictures of a recipe, encoded."""

    corpus: data.Corpus

    def digest(self) -> str:
        """Of pictures, captions and the sets' settings."""
        return self.corpus.manifest.digest()

    def cached(self) -> Iterator[Path]:
        """Latents of all pictures, mirrored ones among them."""
        return self.corpus.cached()

    def names_of(self, step: int) -> list[str]:
        """Files."""
        return self.corpus.pictures_of(step)

    def sizes_of(self, step: int) -> tuple[int, ...]:
        """Resolutions."""
        return self.corpus.resolutions_of(step)

    def batch(self, step: int, place: int) -> data.Batch:
        """Latents and embeddings."""
        return self.corpus.batch(step, place)


@dataclass(frozen=True, slots=True)
class PictureTask:
    """See protocol.py."""

    noun: str = "the pictures or captions"
    dialect: str = "diffusion_model"

    def naming(self, _recipe: Recipe) -> Naming:
        """Dialects find names by layouts."""
        return Naming()

    def count(self, recipe: Recipe) -> tuple[int, ...] | None:
        """Pictures by set, counted by name; None when some are not there, or cannot be counted."""
        from outsize.app.pictures import count_pictures  # only now: it brings numpy and pillow

        return count_pictures(recipe)

    def require(self, recipe: Recipe) -> None:
        """Refuse folders and files that are not there.

        Raises: SourceError naming all of them.
        """
        from outsize.app.pictures import missing_places

        missing = ", ".join(missing_places(recipe))
        if missing:
            raise SourceError(f"{missing}; put it there, or correct data.sets in the recipe")

    def places(self, recipe: Recipe) -> tuple[Path, ...]:
        """Of each set."""
        return tuple(one.folder for one in recipe.pictures.sets)

    def traced(self, recipe: Recipe) -> tuple[Traced, ...]:
        """Each picture."""
        from outsize.app.tracing import traced_pictures

        return traced_pictures(recipe)

    def traced_in(self, folder: Path) -> tuple[Traced, ...]:
        """Each picture."""
        from outsize.app.tracing import pictures_in

        return pictures_in(folder)

    def preview(
        self, recipe: Recipe, num_samples: int, *, offline: bool, progress: Progress
    ) -> Preview:
        """Pictures and captions by set."""
        from outsize.app.pictures import preview_pictures

        del offline, progress  # pictures lie on this machine, and are scanned in a moment
        return preview_pictures(recipe, num_samples)

    def check(
        self, recipe: Recipe, num_shown: int, *, offline: bool, progress: Progress
    ) -> Checked:
        """Sets, buckets and captions, with a contact sheet."""
        from outsize.app.check import check_pictures

        del offline, progress  # pictures lie on this machine
        return check_pictures(recipe, num_shown)

    def corpus(self, site: Site) -> Corpus:
        """Pictures and captions, all encoded and cached."""
        from outsize.app.encode import build_corpus
        from outsize.app.previews import texts_of_previews

        return Pictures(build_corpus(site, lambda manifest: texts_of_previews(site, manifest)))

    def losses(
        self, recipe: Recipe, device: Device, model: FrozenModel, batches: Batches
    ) -> Losses:
        """Of noisy latents."""
        from outsize.app.losses import Losses

        return Losses(recipe, device, model, batches)

    def random_batches(self, recipe: Recipe, device: Device) -> Batches:
        """Latents and embeddings of noise."""
        from outsize.app._bench_batches import RandomBatches

        return RandomBatches(recipe, device)

    def watch(self, site: Site, model: FrozenModel, adapter: Adapter, corpus: Corpus) -> Watch:
        """The loss of pictures that are held out, where any are, and previews."""
        pictures = cast("Pictures", corpus).corpus
        watches: list[Watch] = []
        if pictures.num_held_out:
            from outsize.app.picture_watch import PictureWatch

            watches.append(PictureWatch(site, model, adapter, pictures))
        if site.recipe.previews.every is not None:
            from outsize.app.previews import PicturePreviews, Previews

            drawn = PicturePreviews(site, model, adapter, pictures.manifest)
            watches.append(Previews(site, drawn.make, drawn.finish))
        return Watches(tuple(watches)) if watches else NoWatch()

    def compare(self, site: Site, run: RunFolder) -> Compared:
        """A labelled grid of base and adapter, with control prompts, and how far they are apart."""
        from outsize.app.compare import compare

        made = compare(site, run)
        rows = [("prompts", f"{made.subject.rms:.2f}", f"{made.subject.changed:.1%}")]
        if made.control is not None:
            rows.append(("controls", f"{made.control.rms:.2f}", f"{made.control.changed:.1%}"))
        heads = ("pictures", "rms (0..255)", "pixels changed")
        table = Table("Base against adapter", heads, tuple(rows))
        return Compared(made.folder, table, (("grid", made.grid),))

    def sample(
        self, site: Site, run: RunFolder, asks: Sequence[Ask], *, with_adapter: bool
    ) -> Iterator[Sampled]:
        """Pictures, by the recipe's compare settings."""
        from outsize.app.people import people_rendered
        from outsize.app.render import Shot, render, save_samples, settings_of

        shots = [Shot(one.prompt, one.seed) for one in asks]
        pictures = render(site, run, shots, settings_of(site), with_adapter=with_adapter)
        paths = save_samples(run, shots, pictures)
        people_rendered(site, run, with_adapter=with_adapter).note("sample", paths)
        for path in paths:
            yield Sampled(path)


plugin = PictureTask()
