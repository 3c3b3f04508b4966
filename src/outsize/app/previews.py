"""Previews of pictures: what the adapter makes of a few prompts while it is trained, by the base that is loaded anyway.

They go through the same placement as training, streamed or not, between two steps. Nothing that a step depends on is
touched: noise comes from generators of their own, blocks are run as they are written, so nothing is compiled or recorded
for them, and the device is told again how exactly to compute once the image codec has been there. Prompts are embedded
before the base is loaded, with the captions.

Latents become pictures at once where the plan has room for the codec beside the base; else they are saved, and decoded
when training is over and the base is gone (plan/previews.py decides, and says so).
"""

from __future__ import annotations

import io
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load, save_file

from outsize.app.encode import captions_of, text_inputs
from outsize.app.people import people_trained
from outsize.app.render import (
    Shot,
    decode_latents,
    read_conditions,
    sample_latents,
    settings_of,
    texts_of,
)
from outsize.base.errors import ConsentMissing
from outsize.base.files import folder_committed_to, write_atomically, write_json_atomically
from outsize.sample.grid import Row, draw_grid

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from outsize.adapters.adapter import Adapter
    from outsize.app.site import Site
    from outsize.app.tasks.protocol import Table
    from outsize.data.manifest import Manifest
    from outsize.layers.model import FrozenModel
    from outsize.train.loop import StepReport

STAGE, DECODE_STAGE = "preview", "decode previews"
GRID, VALUES = "grid.png", "preview.json"
_LATENTS = "latents.safetensors"  # of pictures that are not decoded yet
MAX_DEFAULT_PROMPTS = 4  # captions taken when the recipe names no prompts
_SMALLEST_CELL, _LARGEST_CELL = 96, 320  # pixels of a picture in the grid


def texts_of_previews(site: Site, manifest: Manifest) -> list[str]:
    """What has to be embedded for them; nothing when none are made."""
    if site.recipe.previews.every is None:
        return []
    choice = site.recipe.previews.over(site.recipe.compare)
    return texts_of(_prompts(choice.prompts, manifest), settings_of(site, choice))


def _prompts(asked: Sequence[str], manifest: Manifest) -> list[str]:
    return list(asked) or captions_of(manifest)[:MAX_DEFAULT_PROMPTS]


class Previews:
    """At which steps previews are made, whatever of; see `Watch` in tasks/protocol.py.

    make: makes those of a step, into a folder. finish: called when the base is gone.
    """

    def __init__(
        self, site: Site, make: Callable[[int, Path], None], finish: Callable[[], None]
    ) -> None:
        choice = site.recipe.previews
        assert choice.every is not None, "no previews are asked for"
        self._every, self._at_start = choice.every, choice.at_start
        self._site, self._make_into, self._finish = site, make, finish
        self._began, self._made = 0, -1
        self._people = people_trained(site, site.run)

    def begin(self, step: int) -> None:
        """What the base makes by itself; or what a kill has left out of the step that training goes on from."""
        self._began = step
        is_missing = step > 0 and step % self._every == 0 and not self._is_there(step)
        if is_missing or (step == 0 and self._at_start):
            self._make(step)
            self._site.waypoints.mark("preview made")

    def see(self, report: StepReport) -> None:
        """Make what is due between two steps."""
        if report.step % self._every == 0 and report.step < report.num_steps:
            self._make(report.step)

    def end(self, step: int) -> None:
        """What training came to, when it is over rather than stopped."""
        is_over = step == self._site.recipe.train.steps
        is_new = step > self._began or not self._is_there(step)
        if is_over and is_new and self._made != step:
            self._make(step)

    def finish(self) -> None:
        """Whatever had to wait for the base's room."""
        self._finish()

    def table(self) -> Table | None:
        """Previews are looked at."""
        return None

    def _make(self, step: int) -> None:
        started, folder = time.perf_counter(), self._folder(step)
        self._people.ask("render", preview=step)
        if folder.exists():  # of a run that went on from an earlier step
            shutil.rmtree(folder)
        self._make_into(step, folder)
        try:
            self._people.release("render", preview=step)
        except ConsentMissing:
            shutil.rmtree(folder)
            raise
        self._made = step
        self._site.journal.write(
            "preview", step=step, folder=folder.name, is_decoded=not (folder / _LATENTS).exists(),
            seconds=round(time.perf_counter() - started, 3),
        )  # fmt: skip

    def _is_there(self, step: int) -> bool:
        return (self._folder(step) / VALUES).exists()

    def _folder(self, step: int) -> Path:
        return self._site.run.previews / f"{step:08d}"


class PicturePreviews:
    """Pictures of the recipe's prompts, by the weights that `outsize sample` would take."""

    def __init__(
        self, site: Site, model: FrozenModel, adapter: Adapter, manifest: Manifest
    ) -> None:
        self._site, self._model, self._adapter = site, model, adapter
        choice = site.recipe.previews.over(site.recipe.compare)
        self._settings = settings_of(site, choice)
        prompts = _prompts(choice.prompts, manifest)
        self._shots = [Shot(prompt, seed) for seed in choice.seeds for prompt in prompts]
        self._encoders = text_inputs(site)

    def make(self, step: int, folder: Path) -> None:
        """Sample them, and decode them where the plan has room for that now."""
        site = self._site
        with undisturbed(site):
            with site.stages.stage(STAGE), self._model.as_written(), self._adapter.shown():
                prompts = list(dict.fromkeys(shot.prompt for shot in self._shots))
                conditions = read_conditions(site, self._encoders, prompts, self._settings)
                task = f"preview of step {step}"
                latents = sample_latents(
                    site, self._model, self._shots, conditions, self._settings, task=task
                )
            self._save(folder, step, latents)
            if site.plan.decodes_previews:
                with site.stages.stage(DECODE_STAGE):
                    _develop(site, [folder])

    def finish(self) -> None:
        """Decode what had to wait."""
        develop(self._site)

    def _save(self, folder: Path, step: int, latents: Sequence[Tensor]) -> None:
        values = {
            "step": step,
            "settings": asdict(self._settings),
            "pictures": [
                {"file": f"{number:03d}.png"} | asdict(shot)
                for number, shot in enumerate(self._shots)
            ],
        }
        with folder_committed_to(folder) as written:
            save_file(
                {f"{number:03d}": one for number, one in enumerate(latents)}, written / _LATENTS
            )
            write_json_atomically(written / VALUES, values)


@contextmanager
def undisturbed(site: Site) -> Iterator[None]:
    """Whatever is done with other models within the block, training goes on computing as it did."""
    try:
        yield
    finally:
        site.device.compute_exactly(is_wanted=site.plan.compute.is_exact)


def develop(site: Site) -> None:
    """Decode all previews of the run whose latents still wait; no other model must be open."""
    waiting = sorted(one.parent for one in site.run.previews.glob(f"*/{_LATENTS}"))
    if not waiting:
        return
    with site.stages.stage(DECODE_STAGE):
        _develop(site, waiting)
    site.journal.write("previews_decoded", folders=[one.name for one in waiting])


def _develop(site: Site, folders: Sequence[Path]) -> None:
    """From latents to pictures and grids; a folder's latents go last, so that a kill loses nothing."""
    pictures = decode_latents(site, (one for folder in folders for one in _latents_in(folder)))
    with closing(pictures):
        for done, folder in enumerate(folders, start=1):
            values: dict[str, Any] = json.loads((folder / VALUES).read_text(encoding="utf-8"))
            rows = values["pictures"]
            made = list(itertools.islice(pictures, len(rows)))
            for row, picture in zip(rows, made, strict=True):
                write_atomically(folder / row["file"], _png(picture))
            write_atomically(folder / GRID, _png(_grid(site, values, made)))
            (folder / _LATENTS).unlink()
            site.progress.advance(DECODE_STAGE, done, len(folders))


def _latents_in(folder: Path) -> list[Tensor]:
    latents = load((folder / _LATENTS).read_bytes())
    return [latents[name] for name in sorted(latents)]


def _grid(site: Site, values: dict[str, Any], pictures: Sequence[Image.Image]) -> Image.Image:
    """One row for each seed, one column for each prompt."""
    rows = values["pictures"]
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    by_seed = {
        seed: [one for row, one in zip(rows, pictures, strict=True) if row["seed"] == seed]
        for seed in seeds
    }
    captions = [row["prompt"] for row in rows if row["seed"] == seeds[0]]
    heading = f"{site.recipe.name}: step {values['step']}"
    cell = min(max(values["settings"]["width"], _SMALLEST_CELL), _LARGEST_CELL)
    drawn = [Row(f"seed {seed}", found) for seed, found in by_seed.items()]
    return draw_grid(heading, drawn, captions, cell=cell)


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()
