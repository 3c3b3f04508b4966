"""Where a recipe's data come from, as it is stated beside them: told to people, and proved before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.app.tasks.protocol import TASKS, Table, task_of
from outsize.base.errors import SourceError
from outsize.data.provenance import (
    Provenance,
    Survey,
    Traced,
    home_of,
    is_begun,
    provenance_of,
    survey,
)
from outsize.data.statements import PROVENANCE, STATED

if TYPE_CHECKING:
    from outsize.app.site import Site
    from outsize.recipes.recipe import Recipe

_MOST_SHOWN = 40  # files on a terminal


def files_in(folder: Path) -> tuple[Traced, ...]:
    """All that some task would learn from in a folder.

    Raises: SourceError when there is nothing.
    """
    tasks = [TASKS.load(name) for name in TASKS.names()]
    found = tuple(one for task in tasks for one in task.traced_in(folder))
    if not found:
        raise SourceError(f"{folder}: holds neither pictures nor texts that are read")
    return found


def stated_of(recipe: Recipe) -> Provenance | None:
    """What is stated of all that a recipe learns from: who is shown, and a digest of it all; None where nothing is stated.

    Raises: SourceError naming every file that was edited since, and every line that is none.
    """
    task = task_of(recipe)
    if not is_begun({home_of(one) for one in task.places(recipe)}):
        return None  # before any caption is read: scanning tells all faults of the data at once
    surveys = survey(task.traced(recipe))
    edited = [str(one.folder / name) for one in surveys for name in one.edited]
    if edited:
        raise SourceError(
            f"{len(edited)} files were edited after it was stated where they come from: {', '.join(edited)}; what is "
            f"said in {PROVENANCE} is of something else: put them back, or `outsize data manifest --accept-edits` and say "
            "what was done to them"
        )
    return provenance_of(surveys)


def told_provenance(site: Site) -> Provenance | None:
    """As `stated_of`; what it says, and what it lacks, is told and goes to the journal."""
    stated = stated_of(site.recipe)
    if stated is not None:
        site.progress.say(f"{'warning: ' if stated.num_lacking else ''}{stated}")
        site.journal.write(
            "provenance",
            digest=stated.digest,
            files=stated.num_files,
            lacking=stated.num_lacking,
            missing=dict(stated.missing),
            subjects=list(stated.subjects),
        )
    return stated


def checked(recipe: Recipe) -> tuple[str, dict[str, Any] | None]:
    """What `data check` says of it: a sentence, and JSON values."""
    surveys = survey(task_of(recipe).traced(recipe))
    stated = provenance_of(surveys)
    if stated is None:
        return "no provenance is stated; `outsize data manifest` begins it", None
    edited = sum(len(one.edited) for one in surveys)
    more = f"; {edited} were edited since: training refuses them" if edited else ""
    return f"{stated}{more}", facts_of(surveys)


def faults_of(surveys: Iterable[Survey]) -> list[tuple[str, str]]:
    """What is wrong, by file."""
    found: list[tuple[str, str]] = []
    for one in surveys:
        missing = {line.file: ", ".join(line.missing) for line in one.statements()}
        unlisted, edited = set(one.unlisted), set(one.edited)
        for name in one.digests:
            said = ["is not listed"] if name in unlisted else []
            said += ["was edited since"] if name in edited else []
            said += ["cannot be read"] if one.digests[name] is None else []
            said += [f"lacks {missing[name]}"] if missing.get(name) else []
            if said:
                found.append((str(one.folder / name), "; ".join(said)))
    return found


def gone_of(surveys: Iterable[Survey]) -> list[str]:
    """Files that have a line and are not there any more."""
    return [str(one.folder / name) for one in surveys for name in sorted(one.gone)]


def facts_of(surveys: Sequence[Survey]) -> dict[str, Any]:
    """All of it as JSON values."""
    stated = provenance_of(surveys)
    return {
        "manifests": [str(one.folder / PROVENANCE) for one in surveys if one.lines is not None],
        "digest": None if stated is None else stated.digest,
        "subjects": [] if stated is None else list(stated.subjects),
        "files": sum(len(one.digests) for one in surveys),
        "missing": {} if stated is None else dict(stated.missing),
        "faults": [{"file": name, "fault": fault} for name, fault in faults_of(surveys)],
        "vanished": gone_of(surveys),
    }


def tables_of(surveys: Sequence[Survey]) -> tuple[Table, ...]:
    """By field in sum, and by file what is wrong with it."""
    lines = [line for one in surveys for line in one.statements()]
    sums = tuple(
        (name, str(len(lines) - lacking), str(lacking))
        for name in STATED
        for lacking in [sum(name in line.missing for line in lines)]
    )
    total = Table(f"Provenance of {len(lines)} files", ("field", "in order", "missing"), sums)
    faults = faults_of(surveys)
    if not faults:
        return (total,)
    rows = tuple(faults[:_MOST_SHOWN])
    more = (
        f", the first {_MOST_SHOWN} of {len(faults)}; --json has all"
        if rows != tuple(faults)
        else ""
    )
    return total, Table(f"What is missing{more}", ("file", "what"), rows, has_figures=False)
