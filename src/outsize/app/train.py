"""Train a recipe: cache what is missing, load the base once, take the steps, prove that the adapter lives."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outsize.adapters.adapter import Adapter, delta_norms
from outsize.adapters.health import WATCHED_UPDATES, as_fp32, require_delta
from outsize.app.attached import adapted, make_update
from outsize.app.meter import MemoryMeter, MeteredPlacement, StepMeter
from outsize.app.models import Training
from outsize.app.parts import BASE
from outsize.app.people import STATED, People, items_of_run, people_trained
from outsize.app.residency import Residency
from outsize.app.site import Site
from outsize.app.stall_watch import StallWatch
from outsize.app.starting import begin_from_file_
from outsize.app.tasks.protocol import Corpus, Table, Task, task_of
from outsize.app.tracking import tracked
from outsize.app.trained import adapter_identity
from outsize.base.errors import ConsentMissing, LeaseLost, RecipeError
from outsize.base.files import write_json_atomically
from outsize.base.provenance import provenance
from outsize.layers.model import FrozenModel
from outsize.registry.records import Item
from outsize.registry.standing import place_of
from outsize.runs.checkpoint import newest_checkpoint, read_checkpoint
from outsize.runs.folder import RunFolder
from outsize.runs.requests import Requests
from outsize.train.loop import Loop, LoopSettings, Outcome, StepReport
from outsize.train.update import Update

if TYPE_CHECKING:
    from outsize.recipes.recipe import Recipe

_FEWEST_STEPS = 3  # from which a median says something


@dataclass(frozen=True, slots=True)
class Trained:
    """How a training ended. step: updates done; resumed_at: where it took up, 0 for a fresh start.

    step_s: seconds of the steps after the watched first ones, the median of each size; boot_s: from the process's beginning to the end of
    the first step, preparing and caching left out. None: too few steps, or not counted from there. evaluated: what the
    task measured on data that was held out, base against adapter.
    """

    outcome: Outcome
    step: int
    resumed_at: int
    last: StepReport | None
    step_s: float | None = None
    boot_s: float | None = None
    evaluated: Table | None = None


def train(site: Site, run: RunFolder, watch: Callable[[StepReport], None]) -> Trained:
    """Train the recipe in its run folder, from the newest checkpoint that verifies.

    Whatever ends it early leaves the run's state "failed", with the reason; what was saved can be resumed.
    """
    run.set_state("preparing")
    trained = None
    try:
        people = people_trained(site, run)
        with tracked(site), _put_away_if_revoked(people):
            ended = _train(site, run, watch, people)
            people.release("train", step=ended.step)
            trained = ended
    finally:
        error = sys.exception()
        if trained is None and not isinstance(error, LeaseLost):
            reason = {"error": type(error).__name__, "message": str(error)}
            run.set_state("failed", **reason)
            site.journal.write("failed", **reason)
    site.right.require()
    run.set_state(trained.outcome, step=trained.step)
    site.journal.write(trained.outcome, step=trained.step)
    return trained


@contextmanager
def _put_away_if_revoked(people: People) -> Iterator[None]:
    """What was made of somebody who revokes meanwhile does not stay where it is."""
    try:
        yield
    except ConsentMissing:
        people.put_away()
        raise


def _train(
    site: Site, run: RunFolder, watch: Callable[[StepReport], None], people: People
) -> Trained:
    recipe, task = site.recipe, task_of(site.recipe)
    corpus = _corpus(site, run, task, people)
    identity = _identity(site, corpus.digest(), people)
    training = Training(site.stores.cache_folder / "compiled")
    with adapted(site, training) as (model, adapter, initial):
        # now that all libraries are there
        site.journal.write("identity", recipe=recipe.digest(), **identity, **provenance())
        begin_from_file_(site, run, adapter, initial)
        update = make_update(recipe, adapter, initial)
        adapter.shown = lambda: update.shown(recipe.checkpoints.weights)
        pace, measured = _Pace(site, corpus), task.watch(site, model, adapter, corpus)
        requests, clock = Requests(run), _clock(site, model)
        residency = Residency(site, model, adapter, update, requests)
        stalls, memory = StallWatch(site, requests), MemoryMeter(site.device, site.journal)

        def seen(report: StepReport) -> None:
            pace.see(report)
            memory.see(report.step)
            stalls.see(report)
            watch(report)

        def between(report: StepReport) -> None:
            measured.see(report)
            residency.see(report)

        loop = Loop(
            settings=loop_settings(recipe),
            update=update,
            begin_step=lambda: model.begin("train"),
            losses=task.losses(recipe, site.device, model, corpus),
            names_of=corpus.names_of,
            requests=requests,
            journal=site.journal,
            checkpoints=run.checkpoints,
            identity=identity,
            watch=seen,
            between=between,
            clock=clock,
            doing=stalls.doing,
            asks=lambda step: people.ask("train", step=step),
            saved=lambda path: people.note("checkpoint", [path]),
            right=site.right,
        )
        resumed_at = _resume(site, run, loop, identity, task)
        # now that it is known to go with the checkpoints
        write_json_atomically(run.recipe, recipe.to_json())
        run.set_state("running", step=resumed_at)
        with requests.listening(), site.stages.stage("train"), residency.watching(resumed_at):
            measured.begin(resumed_at)
            outcome = stalls.watched(loop.run, resumed_at)
            step = pace.last.step if pace.last else resumed_at
            measured.end(step)
        _prove(site, adapter, update)
    measured.finish()
    return Trained(
        outcome, step, resumed_at, pace.last, pace.step_s(), pace.boot_s, measured.table()
    )


def _corpus(site: Site, run: RunFolder, task: Task, people: People) -> Corpus:
    """What is learned from, encoded once it is allowed; run and caches are bound to whom they show."""
    people.begin("train")
    people.release("train", "run", items_of_run(run))
    corpus = task.corpus(site)
    people.bind("cache", (Item(place_of(one)) for one in corpus.cached()))
    people.release("train")
    site.waypoints.mark("corpus ready")
    return corpus


class _Pace:
    """How fast steps come: the first one ends the start, those that are watched more closely do not count."""

    def __init__(self, site: Site, corpus: Corpus) -> None:
        self._site, self._corpus = site, corpus
        self._reports: list[StepReport] = []
        self.last: StepReport | None = None
        self.boot_s: float | None = None

    def see(self, report: StepReport) -> None:
        """Take note of a step."""
        if self.last is None:
            self._end_start()
        self.last = report
        self._reports.append(report)

    def step_s(self) -> float | None:
        """The mean over all steps, each as long as the median of those of its size: what a plan expects of several sizes."""
        counted = self._reports[WATCHED_UPDATES:]
        if len(counted) < _FEWEST_STEPS:
            return None
        by_size = defaultdict(list)
        for report in counted:
            by_size[self._corpus.sizes_of(report.step - 1)].append(report.seconds)
        return sum(len(one) * statistics.median(one) for one in by_size.values()) / len(counted)

    def _end_start(self) -> None:
        site = self._site
        site.device.synchronize()
        site.waypoints.mark("first step done")
        site.journal.write("boot", **site.waypoints.to_json())
        if site.waypoints.is_whole:
            # stages before this one, but for the base's own, made or looked up what a later start finds
            made_s = sum(one.seconds for one in site.stages.finished if one.name != f"load {BASE}")
            self.boot_s = site.waypoints.seconds - made_s


def _identity(site: Site, manifest: str, people: People) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes it. manifest: digest of the data."""
    return {
        "numbers": site.recipe.numbers_digest(),
        "manifest": manifest,
        "base": site.stores.key(BASE),
        "adapter": adapter_identity(site.recipe),
        "computed_by": _computed_by(site),
        # these two may be stated better meanwhile
        **({STATED: list(people.subjects)} if people.subjects else {}),
        **({} if people.provenance is None else {"provenance": people.provenance}),
    }


def _clock(site: Site, model: FrozenModel) -> StepMeter:
    """What splits the steps' seconds; its stopwatch lies before the placement, where that copies anything."""
    holding = site.plan.holding_of(BASE)
    if holding is None or not holding.num_streamed:
        return StepMeter(site.device, None)
    metered = MeteredPlacement(model.placement, site.device)
    model.placement = metered
    return StepMeter(site.device, metered)


def _computed_by(site: Site) -> str:
    """All that decides bits beside the recipe."""
    compute = site.plan.compute
    words = [site.device.kind, str(site.device.compute_dtype), f"products in {compute.arithmetic}"]
    return ", ".join([*words, "compiled" if compute.compiles else "not compiled"])


def _resume(site: Site, run: RunFolder, loop: Loop, identity: dict[str, Any], task: Task) -> int:
    """Take up the newest checkpoint that verifies; the step it is of, or 0.

    Raises: RecipeError when it belongs to another recipe, other data or another base.
    """
    path, faults = newest_checkpoint(run.checkpoints)
    for fault in faults:
        site.progress.say(f"warning: passed over a broken checkpoint: {fault}")
        site.journal.write("checkpoint_broken", fault=fault)
    if path is None:
        return 0
    checkpoint = read_checkpoint(path)
    before = checkpoint.values["identity"]
    meaning = {"numbers": "the recipe", "manifest": task.noun, "base": "the base"}
    changed = [text for key, text in meaning.items() if before[key] != identity[key]]
    if changed:
        raise RecipeError(
            f"{path} was trained with other settings: {', '.join(changed)} changed since. "
            "Give the recipe another name, or undo the change"
        )
    if before["computed_by"] != identity["computed_by"]:
        site.progress.say(
            f"warning: trained so far by {before['computed_by']}, from here by {identity['computed_by']}: the result "
            "will not equal an unbroken run's bytes"
        )
    loop.resume_(checkpoint)
    site.progress.say(f"resuming after step {checkpoint.step}")
    site.journal.write("resumed", step=checkpoint.step)
    return checkpoint.step


def _prove(site: Site, adapter: Adapter, update: Update) -> None:
    """Refuse an adapter that did nothing; name the modules that did not move."""
    values = as_fp32(update.masters)
    norms = delta_norms(values, {path: adapter.scale_of(path) for path in adapter.paths})
    zero = require_delta(norms)
    mean = sum(norms.values()) / len(norms)
    site.journal.write("delta", modules=len(norms), mean_norm=mean, zero=zero)
    site.progress.say(
        f"adapter: the delta's norm is {mean:.4g} on average over {len(norms)} modules"
    )
    for path in zero:
        site.progress.say(f"warning: {path} did not move")


def loop_settings(recipe: Recipe) -> LoopSettings:
    """What the recipe says of the loop itself."""
    train = recipe.train
    return LoopSettings(
        num_steps=train.steps,
        accumulate=train.accumulate,
        learning_rate=train.learning_rate,
        schedule=train.schedule,
        schedule_floor=train.schedule_floor,
        warmup_steps=train.warmup_steps,
        clip_norm=train.clip_norm,
        checkpoint_every=recipe.checkpoints.every,
        checkpoints_kept=recipe.checkpoints.keep,
    )
