"""The demo: the teaching base learns cats, and the pictures are scored without a trained judge.

Everything is what a user's own recipe goes through: the packaged base is quantised to NF4, captions and pictures are
cached, a LoRA is trained on sixteen cats with other subjects as regularisation, and the base is compared with and
without it on prompts for cats it was never shown and on other subjects.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from outsize import teaching
from outsize.app.demo_result import DemoResult, Scores, to_json
from outsize.app.planning import plan_here
from outsize.app.render import Pair, Shot, render_pairs, settings_of
from outsize.app.report.page import write_report
from outsize.app.site import Site, open_site
from outsize.app.train import train
from outsize.base.files import write_atomically, write_json_atomically
from outsize.base.progress import Progress
from outsize.devices.protocol import Device
from outsize.recipes.load import load_recipe
from outsize.runs.folder import RunFolder
from outsize.sample.grid import Row, draw_grid
from outsize.teaching.score import Gallery, is_cat, load_gallery, recognised
from outsize.train.loop import StepReport

NUM_COLUMNS = 8  # of the grid; taken at even distances, never by eye
_HEADER = """\
# Written by `outsize demo`: the recipe of the demo, like any other. `outsize train` and `outsize compare` take it.
"""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt of the score with what a good picture of it shows."""

    shot: Shot
    name: str
    background: str


def write_recipe(folder: Path, *, seed: int, changes: Mapping[str, Any] | None = None) -> Path:
    """The demo's recipe as a YAML file that users can read, change and train themselves.

    changes: of its train section.
    """
    values = yaml.safe_load(teaching.RECIPE.read_text(encoding="utf-8"))
    values["base"]["source"] = str(teaching.BASE)
    subject, others = values["data"]["sets"]
    subject["folder"], others["folder"] = str(teaching.CATS), str(teaching.OTHERS)
    values["train"] |= {**(changes or {}), "seed": seed}
    number = 1 + sum(1 for _ in (folder / "runs").glob("cats-*"))
    values["name"] = f"cats-{number:03d}"
    values["cache"] = "cache"
    path = folder / "recipe.yaml"
    write_atomically(path, (_HEADER + yaml.safe_dump(values, sort_keys=False)).encode())
    return path


def run_demo(
    folder: Path,
    device: Device,
    progress: Progress,
    watch: Callable[[Site, StepReport], None],
    *,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    started: float | None = None,
) -> DemoResult:
    """Train the demo's recipe in `folder` and score it.

    changes: of the recipe's train section. started: time.perf_counter() when the process began its work, so that imports are counted.
    """
    began = time.perf_counter() if started is None else started
    recipe = load_recipe(write_recipe(folder, seed=seed, changes=changes))
    run = RunFolder(recipe.run_folder())
    plan = plan_here(recipe, device_kind=device.kind)
    plan.require_fit()
    with open_site(recipe, run, plan, device, progress, offline=True) as site:
        startup_s = time.perf_counter() - began
        train(site, run, lambda report: watch(site, report))
        cats, controls = _prompts("cats"), _prompts("controls")
        shots = [one.shot for one in (*cats, *controls)]
        pairs = render_pairs(site, run, shots, settings_of(site))
        with site.stages.stage("score"):
            split = len(cats)
            scores = _score(cats, pairs[:split], controls, pairs[split:])
            grid = _grid(cats, pairs[:split], controls, pairs[split:], scores)
            grid_path = run.path / "demo.png"
            grid.save(grid_path)
        seconds = {"start": round(startup_s, 3), **site.stages.seconds()}
        seconds["total"] = round(time.perf_counter() - began, 3)
        newest = max(run.checkpoints.iterdir())
        result = DemoResult(
            seconds,
            scores,
            {
                "adapter": str(newest / "adapter.safetensors"),
                "grid": str(grid_path),
                "report": str(run.report),
                "run": str(run.path),
            },
        )
        write_json_atomically(run.path / "demo.json", to_json(result))
        write_report(run)
    return result


def _prompts(kind: str) -> list[_Prompt]:
    """The fixed prompts of one kind; a picture's noise is fixed by its place in the list."""
    rows = json.loads(teaching.PROMPTS.read_text(encoding="utf-8"))[kind]
    return [
        _Prompt(Shot(row["prompt"], seed), row["name"], row["background"])
        for seed, row in enumerate(rows)
    ]


def _score(
    cats: Sequence[_Prompt],
    cat_pairs: Sequence[Pair],
    controls: Sequence[_Prompt],
    control_pairs: Sequence[Pair],
) -> Scores:
    gallery = load_gallery(teaching.GALLERY_PICTURES, teaching.GALLERY_NAMES)

    def share(
        prompts: Sequence[_Prompt],
        pictures: Sequence[Image.Image],
        is_hit: Callable[[Any, _Prompt], bool],
    ) -> float:
        hits = [
            is_hit(_nearest(gallery, picture, prompt), prompt)
            for prompt, picture in zip(prompts, pictures, strict=True)
        ]
        return round(sum(hits) / len(hits), 4)

    def cat(match: Any, _prompt: _Prompt) -> bool:
        return is_cat(match)

    def right(match: Any, prompt: _Prompt) -> bool:
        return recognised(match, prompt.name)

    return Scores(
        base=share(cats, [one.before for one in cat_pairs], cat),
        adapter=share(cats, [one.after for one in cat_pairs], cat),
        control_before=share(controls, [one.before for one in control_pairs], right),
        control_after=share(controls, [one.after for one in control_pairs], right),
    )


def _nearest(gallery: Gallery, picture: Image.Image, prompt: _Prompt) -> Any:
    return gallery.nearest(np.asarray(picture.convert("RGB")), prompt.background)


def _grid(
    cats: Sequence[_Prompt],
    cat_pairs: Sequence[Pair],
    controls: Sequence[_Prompt],
    control_pairs: Sequence[Pair],
    scores: Scores,
) -> Image.Image:
    """Eight prompts of each kind at even distances, with the real held-out cats between."""
    chosen = _spaced(len(cats))
    others = _spaced(len(controls))
    real = [_real_picture(cats[i]) for i in chosen]
    rows = [
        Row(
            f"the 4-bit base, asked for cats: {scores.base:.0%} are cats",
            [cat_pairs[i].before for i in chosen],
        ),
        Row(
            f"same prompts and seeds with the adapter: {scores.adapter:.0%}",
            [cat_pairs[i].after for i in chosen],
        ),
        Row("the real pictures, never trained on", real),
        Row(
            f"other subjects, base: {scores.control_before:.0%} recognised",
            [control_pairs[i].before for i in others],
        ),
        Row(
            f"other subjects with the adapter: {scores.control_after:.0%}",
            [control_pairs[i].after for i in others],
        ),
    ]
    heading = "outsize demo: a rank-16 LoRA on 16 cats over a 4-bit base that never saw one"
    return draw_grid(heading, rows, [cats[i].shot.prompt for i in chosen])


def _spaced(count: int) -> list[int]:
    num = min(NUM_COLUMNS, count)
    return [int((k + 0.5) * count / num) for k in range(num)]


def _real_picture(prompt: _Prompt) -> Image.Image:
    """The held-out picture that a cat prompt describes, on whatever background it is kept on."""
    style = prompt.shot.prompt.split(", ")[1].split()[0]
    (path,) = teaching.HELD_OUT.glob(f"{prompt.name}_{style}_*.png")
    return Image.open(path).convert("RGB")
