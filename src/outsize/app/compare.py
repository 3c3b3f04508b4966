"""Base against adapter: the same prompts and seeds, and control prompts that must not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outsize.app.attached import require_adapter
from outsize.app.encode import captions_of, scan_pictures
from outsize.app.people import people_rendered
from outsize.app.render import Pair, RenderSettings, Shot, render_pairs, settings_of
from outsize.app.site import Site
from outsize.app.tasks.protocol import numbered
from outsize.base.files import folder_committed_to, write_json_atomically
from outsize.runs.folder import RunFolder
from outsize.sample.distances import Distance, distance, mean
from outsize.sample.grid import Row, draw_grid

GRID = "grid.png"
MAX_DEFAULT_PROMPTS = 8  # captions taken when the recipe names no prompts


@dataclass(frozen=True, slots=True)
class Comparison:
    """What compare made. grid: the labelled picture; subject, control: mean distances base to adapter."""

    folder: Path
    grid: Path
    subject: Distance
    control: Distance | None


def compare(site: Site, run: RunFolder) -> Comparison:
    """Render the recipe's prompts and controls with and without the run's adapter, and lay them side by side.

    Raises: RecipeError, before any model is opened, when the run has no adapter of this recipe.
    """
    require_adapter(site, run)
    choice, settings = site.recipe.compare, settings_of(site)
    prompts = list(choice.prompts) or captions_of(scan_pictures(site))[:MAX_DEFAULT_PROMPTS]
    subject = [Shot(prompt, seed) for prompt in prompts for seed in choice.seeds]
    control = [Shot(prompt, seed) for prompt in choice.controls for seed in choice.seeds]
    pairs = render_pairs(site, run, subject + control, settings)
    distances = [distance(one.before, one.after) for one in pairs]
    split = len(subject)
    rows = _rows("base", "with the adapter", pairs[:split])
    if control:
        rows += _rows("controls, base", "controls, with the adapter", pairs[split:])
    heading = f"{site.recipe.name}: {site.recipe.base.family} {site.recipe.base.variant}"
    folder = numbered(run.path / "compare")
    with folder_committed_to(folder) as written:
        draw_grid(heading, rows, [shot.prompt for shot in subject]).save(written / GRID)
        _save(written, pairs, distances, settings)
    people_rendered(site, run, with_adapter=True).note("sample", [folder])
    subject_distance = mean(distances[:split])
    control_distance = mean(distances[split:]) if control else None
    site.journal.write(
        "compared", folder=folder.name, subject=subject_distance.to_json(),
        control=None if control_distance is None else control_distance.to_json(),
    )  # fmt: skip
    return Comparison(folder, folder / GRID, subject_distance, control_distance)


def _rows(before: str, after: str, pairs: Sequence[Pair]) -> list[Row]:
    return [Row(before, [one.before for one in pairs]), Row(after, [one.after for one in pairs])]


def _save(
    folder: Path, pairs: Sequence[Pair], distances: Sequence[Distance], settings: RenderSettings
) -> None:
    """Every picture by itself, and what was asked and measured as JSON."""
    rows: list[dict[str, Any]] = []
    for number, (pair, far) in enumerate(zip(pairs, distances, strict=True)):
        pair.before.save(folder / f"{number:03d}-base.png")
        pair.after.save(folder / f"{number:03d}-adapter.png")
        rows.append({"prompt": pair.shot.prompt, "seed": pair.shot.seed} | far.to_json())
    write_json_atomically(folder / "compare.json", {"settings": asdict(settings), "pictures": rows})
