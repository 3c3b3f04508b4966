"""Whom a piece of work shows, found out by what it uses; and the gate that all of it passes, here, where every caller must.

A recipe names its subjects; files and runs are told by what they hold, by where they lie, and by what they say of themselves.
Whatever is made is bound to the same people. Work that shows nobody who is known asks nobody, and its journal says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.app.contents import items_of, stated_subjects, tensor_files, tensors_digest
from outsize.app.provenance import told_provenance
from outsize.base.files import parse_json
from outsize.registry import acts
from outsize.registry.gate import Gate, Request, default_gate
from outsize.registry.records import Derived, Item, Kind, Purpose
from outsize.registry.standing import place_of
from outsize.runs.checkpoint import newest_checkpoint, read_values

if TYPE_CHECKING:
    from outsize.app.site import Site
    from outsize.recipes.recipe import Recipe
    from outsize.runs.folder import RunFolder

REPORT = "merge.json"  # in the folder of a merged base
STATED = "subjects"  # there, and in a checkpoint's identity
_REQUESTER = "OUTSIZE_REQUESTER"


def _silent(_event: str, /, **_values: Any) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class People:
    """Those whom one piece of work shows, and who asks. tell: writes events to the work's journal.

    provenance: digest of what is stated of the data that it learns from.
    """

    subjects: tuple[str, ...]
    requester: str | None
    tell: Callable[..., None] = _silent
    gate: Gate = field(default_factory=default_gate)
    provenance: str | None = None

    def begin(self, purpose: Purpose, **about: Any) -> None:
        """Say whom the work shows, and ask to begin it.

        Raises: ConsentMissing as `ask`.
        """
        if not self.subjects:
            self.tell("people", subjects=[], note="nobody is said to be shown, so nobody was asked")
        self.ask(purpose, **about)

    def ask(self, purpose: Purpose, **about: Any) -> None:
        """Ask to go on.

        Raises: ConsentMissing naming everybody who has not agreed, with the reason.
        """
        self._require(Request(self.subjects, self.requester, purpose, about=about))

    def release(
        self, purpose: Purpose, kind: Kind | None = None, items: Iterable[Item] = (), **about: Any
    ) -> None:
        """Ask again before a result is let out, and bind it to those whom it shows.

        Raises: ConsentMissing as `ask`; the result must then go nowhere.
        """
        derived = (
            None
            if kind is None or not self.subjects
            else Derived(kind, self.subjects, tuple(items))
        )
        self._require(Request(self.subjects, self.requester, purpose, "release", derived, about))

    def bind(self, kind: Kind, items: Iterable[Item]) -> None:
        """Bind what is there to those whom it shows, whatever they say of it."""
        if self.subjects:
            acts.note(self.gate.ledger, Derived(kind, self.subjects, tuple(items)))

    def note(self, kind: Kind, paths: Sequence[Path]) -> None:
        """Bind files by what they hold and where they lie."""
        if self.subjects:  # else nothing is read for it
            self.bind(kind, (item for path in paths for item in items_of(path)))

    def put_away(self) -> None:
        """Quarantine what was derived from those of them who have revoked."""
        for subject in self.subjects:
            done = acts.put_away(self.gate.ledger, subject)
            self.tell("quarantined", subject=subject, paths=[one.path for one in done])

    def _require(self, request: Request) -> None:
        if request.subjects:
            self.gate.require(request)
            self.tell(
                "consent",
                purpose=request.purpose,
                stage=request.stage,
                subjects=list(self.subjects),
            )


def people_in(
    recipe: Recipe,
    shown: Iterable[str],
    tell: Callable[..., None] = _silent,
) -> People:
    """Those whom work by a recipe shows: whom its base shows, and `shown`."""
    subjects = tuple(sorted({*shown, *shown_by_base(recipe)}))
    return People(subjects, requester_of(recipe), tell)


def people_trained(site: Site, run: RunFolder) -> People:
    """Those whom a training shows: by its recipe, its data, its base, the adapter that it begins from, and what its run has.

    Raises: SourceError when data were edited after it was stated where they come from.
    """
    stated = told_provenance(site)
    start = site.recipe.adapter.start
    begun = set() if start is None else shown_in(start)
    shown = {*site.recipe.people.subjects, *begun, *shown_by_run(run)}
    if stated is None:
        return people_in(site.recipe, shown, site.journal.write)
    people = people_in(site.recipe, {*shown, *stated.subjects}, site.journal.write)
    return replace(people, provenance=stated.digest)


def people_rendered(site: Site, run: RunFolder, *, with_adapter: bool) -> People:
    """Those whom pictures or texts of a site may show; with_adapter: the run's own or the one that is worn."""
    shown: set[str] = set()
    if with_adapter and site.worn is not None:
        shown = set(site.worn.subjects)
    elif with_adapter:
        shown = {*site.recipe.people.subjects, *shown_by_run(run)}
    return people_in(site.recipe, shown, site.journal.write)


def requester_of(recipe: Recipe | None) -> str | None:
    """Who asks: as the environment says, else the recipe."""
    return os.environ.get(_REQUESTER) or (None if recipe is None else recipe.people.requester)


def shown_in(path: Path) -> set[str]:
    """Whom an adapter's files show: as the registry knows what they hold or where they lie, and as they say themselves."""
    files = tensor_files(path)
    standing = default_gate().standing()
    stated = {subject for one in files for subject in stated_subjects(one)}
    digests = [tensors_digest(one) for one in files] if standing.derived else []
    return stated | standing.shown_in(tensors=digests, paths=[path])


def shown_by_run(run: RunFolder) -> set[str]:
    """Whom a run's adapter shows: as its newest checkpoint says, and as the registry knows it."""
    checkpoint, _ = newest_checkpoint(run.checkpoints)
    if checkpoint is None:
        return default_gate().standing().shown_in(paths=[run.checkpoints])
    return {*read_values(checkpoint)["identity"].get(STATED, ()), *shown_in(checkpoint)}


def shown_by_base(recipe: Recipe) -> set[str]:
    """Whom a base shows that an adapter was merged into."""
    source = Path(recipe.base.source)
    if not source.exists():
        return set()
    report = next((one for one in (source / REPORT, source.parent / REPORT) if one.is_file()), None)
    stated = {} if report is None else parse_json(report.read_bytes())
    return {*stated.get(STATED, ()), *default_gate().standing().shown_in(paths=[source])}


def items_of_run(run: RunFolder) -> tuple[Item, ...]:
    """All of a run that shows something: what is put away of it."""
    shown = (
        run.checkpoints, run.previews, run.path / "compare", run.path / "samples", run.path / "export",
        run.report,
    )  # fmt: skip
    return tuple(Item(place_of(one)) for one in shown)
