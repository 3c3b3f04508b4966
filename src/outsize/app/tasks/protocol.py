"""What a task is to a run: from its data to losses, and from a trained adapter to something a person can judge.

A task is named by the objective of the base's family, and what it is to a plan is the file of the same name in plan/tasks.
Plans and commands ask for a task before torch is needed, so its module imports torch inside functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outsize.base.catalogue import Catalogue
from outsize.base.errors import OutsizeError
from outsize.base.layout import Layout

if TYPE_CHECKING:
    from outsize.adapters.adapter import Adapter
    from outsize.app.site import Site
    from outsize.base.progress import Progress
    from outsize.data.provenance import Traced
    from outsize.devices.protocol import Device
    from outsize.layers.model import FrozenModel
    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder
    from outsize.train.loop import MicroBatches, StepReport

TASKS = Catalogue("outsize.app.tasks", "task")


class Batches(Protocol):
    """What gives the micro-batches of a step; of what type, the task knows."""

    def batch(self, step: int, place: int) -> Any:
        """The micro-batch `place` of a step, counted from 0; a pure function of both and of what was built from."""


class Corpus(Batches, Protocol):
    """Everything there is to learn from, ready to be drawn."""

    def digest(self) -> str:
        """Of all that is learned from: a checkpoint resumes only with the same."""

    def cached(self) -> Iterable[Path]:
        """Files that hold what samples were encoded to."""

    def names_of(self, step: int) -> list[str]:
        """What a step draws, in words that let a person find it; reads nothing."""

    def sizes_of(self, step: int) -> tuple[int, ...]:
        """Equal for steps that take equally long, as far as what they draw decides that; reads nothing."""


class Watch(Protocol):
    """What a task measures or shows beside training; it changes no bit of it."""

    def begin(self, step: int) -> None:
        """Training goes on after `step` updates."""

    def see(self, report: StepReport) -> None:
        """An update was made."""

    def end(self, step: int) -> None:
        """Training is over after `step` updates; the base is still there."""

    def finish(self) -> None:
        """The base is gone: now is the time for what had no room beside it."""

    def table(self) -> Table | None:
        """What was measured, base against adapter; None when there is nothing to measure by."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for people. has_figures: all columns but the first hold figures, rather than words."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    has_figures: bool = True

    @property
    def words(self) -> tuple[int, ...]:
        """The columns that hold words."""
        return (0,) if self.has_figures else tuple(range(len(self.heads)))


@dataclass(frozen=True, slots=True)
class Compared:
    """Base against adapter. folder: where it was written; shown: label of what to look at, and where it lies."""

    folder: Path
    table: Table
    shown: tuple[tuple[str, Path], ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One thing the model made. text: what a terminal can show of it."""

    path: Path
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One thing to make."""

    prompt: str
    seed: int


@dataclass(frozen=True, slots=True)
class Shown:
    """One sample. spans: its text in pieces, each with whether it is learned."""

    title: str
    spans: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class Preview:
    """What would be learned from. fault: why training would refuse it, said after everything was shown."""

    table: Table
    shown: tuple[Shown, ...]
    notes: tuple[str, ...] = ()
    fault: OutsizeError | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """All that would be learned from, without a sample left out. facts: the same as JSON values, in more detail.

    sheet: a picture to look at, as PNG; None where there is nothing to see. left_out: what is not trained on because the
    recipe says so. fault: why training would refuse it.
    """

    tables: tuple[Table, ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    sheet: bytes | None = None
    fault: OutsizeError | None = None


@dataclass(frozen=True, slots=True)
class Naming:
    """What other programs call an adapter's modules. layout: of the files whose names are taken; None: our own names.

    named_for: upstream's class that has such modules, where there are several. peft_task: PEFT's word for what the base is
    used for.
    """

    layout: Layout | None = None
    named_for: str | None = None
    peft_task: str | None = None

    def path_of(self, module: str) -> str:
        """A module's path there."""
        if self.layout is None:
            return module
        _, theirs = self.layout.rule_of(f"{module}.weight")
        return theirs.removesuffix(".weight")


class Task(Protocol):
    """One kind of thing to learn from."""

    @property
    def dialect(self) -> str:
        """In which an adapter is exported when nobody says: what most programs of its kind read."""

    def naming(self, recipe: Recipe) -> Naming:
        """What programs that run the recipe's base call its modules."""

    @property
    def noun(self) -> str:
        """What is learned from, as in "the pictures or captions changed since"."""

    def count(self, recipe: Recipe) -> tuple[int, ...] | None:
        """Samples of each set of the recipe, counted without reading them; None when they are not there, or not countable."""

    def require(self, recipe: Recipe) -> None:
        """Refuse data that is not there, before anything slow begins.

        Raises: SourceError naming all of it.
        """

    def places(self, recipe: Recipe) -> tuple[Path, ...]:
        """Folders and files that the recipe's sets name."""

    def traced(self, recipe: Recipe) -> tuple[Traced, ...]:
        """Each thing that the recipe learns from and of which it is stated where it comes from; none of them is opened.

        Raises: SourceError naming what is wrong with the places that the recipe names.
        """

    def traced_in(self, folder: Path) -> tuple[Traced, ...]:
        """The same, of a folder that no recipe speaks of; nothing where it is another task's."""

    def preview(
        self, recipe: Recipe, num_samples: int, *, offline: bool, progress: Progress
    ) -> Preview:
        """What the recipe names, read but not encoded. num_samples: of each set that are shown.

        Raises: SourceError naming every fault in the files.
        """

    def check(
        self, recipe: Recipe, num_shown: int, *, offline: bool, progress: Progress
    ) -> Checked:
        """What the recipe names, whole, and what is odd about it. num_shown: samples of each set on the sheet; 0: no sheet.

        Raises: SourceError naming every fault in the files.
        """

    def corpus(self, site: Site) -> Corpus:
        """Everything that the recipe learns from; what has to be encoded first is encoded, and cached."""

    def losses(
        self, recipe: Recipe, device: Device, model: FrozenModel, batches: Batches
    ) -> MicroBatches:
        """What the loop takes its losses from."""

    def random_batches(self, recipe: Recipe, device: Device) -> Batches:
        """Batches of the recipe's shapes with nothing in them, to measure steps by; what `losses` takes."""

    def watch(self, site: Site, model: FrozenModel, adapter: Adapter, corpus: Corpus) -> Watch:
        """What is measured while training."""

    def compare(self, site: Site, run: RunFolder) -> Compared:
        """Put base and adapter side by side, as the recipe's compare section says."""

    def sample(
        self, site: Site, run: RunFolder, asks: Sequence[Ask], *, with_adapter: bool
    ) -> Iterator[Sampled]:
        """Make what is asked for, by the run's adapter or by its base alone, into samples/ of the run folder."""


class NoWatch:
    """Nothing is measured beside training."""

    def begin(self, step: int) -> None:
        """Nothing."""

    def see(self, report: StepReport) -> None:
        """Nothing."""

    def end(self, step: int) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def table(self) -> Table | None:
        """Nothing."""
        return None


@dataclass(frozen=True, slots=True)
class Watches:
    """Several, one after the other."""

    watches: tuple[Watch, ...]

    def begin(self, step: int) -> None:
        """Each."""
        for one in self.watches:
            one.begin(step)

    def see(self, report: StepReport) -> None:
        """Each."""
        for one in self.watches:
            one.see(report)

    def end(self, step: int) -> None:
        """Each."""
        for one in self.watches:
            one.end(step)

    def finish(self) -> None:
        """Each."""
        for one in self.watches:
            one.finish()

    def table(self) -> Table | None:
        """The first that there is."""
        tables = (one.table() for one in self.watches)
        return next((one for one in tables if one is not None), None)


def task_of(recipe: Recipe) -> Task:
    """The task of the recipe's base.

    Raises: RecipeError when there is no such family.
    """
    from outsize.plan.names import base_family

    task: Task = TASKS.load(base_family(recipe.base.family).objective)
    return task


def numbered(parent: Path) -> Path:
    """The next numbered folder: nothing that was made before is overwritten."""
    numbers = [int(one.name) for one in parent.glob("*") if one.name.isdigit()]
    return parent / f"{max(numbers, default=0) + 1:03d}"
