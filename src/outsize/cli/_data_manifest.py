"""`outsize data manifest`: state where data come from, and see what nobody has stated yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.errors import RecipeError, SourceError

if TYPE_CHECKING:
    from outsize.data.provenance import Order, Survey, Traced

_NONE = "none"

PlaceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE_OR_FOLDER",
        help="A recipe, or a folder of pictures or texts.",
        show_default=False,
    ),
]
SourceOption = Annotated[
    str | None, typer.Option("--source", help="Where they come from: an id or URL.")
]
LicenceOption = Annotated[
    str | None, typer.Option("--licence", help="An SPDX id, or the licence's text.")
]
BasisOption = Annotated[
    str | None,
    typer.Option("--basis", help="On what ground: consent, public_domain, own_work or licence."),
]
SubjectOption = Annotated[
    list[str] | None,
    typer.Option("--subject", help="Id of somebody who is shown, again for each; none: nobody is."),
]
RetrievedOption = Annotated[
    str | None, typer.Option("--retrieved", help="When they were fetched, as 2026-11-30.")
]
TransformOption = Annotated[
    list[str] | None,
    typer.Option("--transform", help="What was done to them since, again for each; none: nothing."),
]
OnlyOption = Annotated[
    str | None,
    typer.Option(
        "--for", help="Which files are meant, as in 'holiday/*.jpg'; left out: all of them."
    ),
]
ReplaceOption = Annotated[
    bool, typer.Option("--replace", help="Also where something else is stated.")
]
AcceptEditsOption = Annotated[
    bool,
    typer.Option(
        "--accept-edits", help="Take files as they are now; say anew what was done to them."
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option("--check", help="Write nothing; fail when something is missing or changed."),
]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")]


def manifest(
    place: PlaceArgument,
    *,
    source: SourceOption = None,
    licence: LicenceOption = None,
    basis: BasisOption = None,
    subject: SubjectOption = None,
    retrieved: RetrievedOption = None,
    transform: TransformOption = None,
    only: OnlyOption = None,
    replace: ReplaceOption = False,
    accept_edits: AcceptEditsOption = False,
    check: CheckOption = False,
    as_json: AsJsonOption = False,
) -> int:
    """Begin or bring up to date provenance.jsonl beside the data: a line for each picture or file of texts.

    What is stated stays: options fill in what is not, unless --replace is given. New files are added, renamed ones are found
    again by their content, vanished ones are marked.
    """
    from outsize.app.provenance import facts_of, faults_of
    from outsize.data.provenance import Order, survey
    from outsize.data.statements import faults_in

    asked = {
        "source": source, "licence": licence, "basis": basis, "subjects": _listed(subject),
        "retrieved": retrieved, "transforms": _listed(transform),
    }  # fmt: skip
    values = {key: value for key, value in asked.items() if value is not None}
    if faults := list(faults_in(values)):
        raise RecipeError("; ".join(faults))
    if check and (values or accept_edits):
        raise RecipeError("--check writes nothing, so it takes nothing to state; leave one out")
    order = Order(values, only, replaces=replace, accepts=accept_edits)
    files = _files(place)
    surveys = survey(files)
    if not check:
        _bring_up(surveys, order)
        surveys = survey(files)
    if as_json:
        print(json.dumps(facts_of(surveys), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        _print(surveys)
    lacking = faults_of(surveys)
    if check and lacking:
        raise SourceError(
            f"{len(lacking)} of {len(files)} files lack something or were edited since: {lacking[0][0]} {lacking[0][1]}"
        )
    return 0


def _print(surveys: tuple[Survey, ...]) -> None:
    from outsize.app.provenance import gone_of, tables_of
    from outsize.cli._tables import print_table

    for table in tables_of(surveys):
        print_table(table.title, table.heads, table.rows, words=table.words)
        print()
    for one in gone_of(surveys):
        print(f"vanished: {one}")


def _files(place: Path) -> tuple[Traced, ...]:
    from outsize.app.provenance import files_in
    from outsize.app.tasks.protocol import task_of
    from outsize.cli._site import names_a_run, recipe_and_run

    if place.is_dir() and not names_a_run(place):
        return files_in(place)
    chosen, _ = recipe_and_run(place)
    task = task_of(chosen)
    task.require(chosen)
    found: tuple[Traced, ...] = task.traced(chosen)
    return found


def _bring_up(surveys: tuple[Survey, ...], order: Order) -> None:
    from outsize.data.provenance import brought_up
    from outsize.data.statements import faults_in, write_statements

    if not any(order.is_for(name) for one in surveys for name in one.digests):
        raise RecipeError(
            f"--for {order.glob} names none of the files; it is matched whole, as in 'a/*.png'"
        )
    made = {one.folder: brought_up(one, order) for one in surveys}
    faults = [
        f"{folder / line.file}: {fault}"
        for folder, lines in made.items()
        for line in lines.values()
        for fault in faults_in({"basis": line.basis, "subjects": line.subjects})
    ]
    if faults:
        raise RecipeError("; ".join(faults))
    for one in surveys:
        if made[one.folder] != one.lines:
            write_statements(one.folder, made[one.folder])


def _listed(asked: list[str] | None) -> tuple[str, ...] | None:
    """Several texts; an empty tuple where "none" is said, None where nothing is."""
    if not asked:
        return None
    return () if asked == [_NONE] else tuple(asked)
