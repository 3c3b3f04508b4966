"""The commands of `outsize registry` that change nothing: list, audit, verify, head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.errors import RecipeError, StoreBroken

if TYPE_CHECKING:
    from outsize.registry.ledger import Ledger

SubjectArgument = Annotated[str, typer.Argument(help="Id of the subject.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def this_ledger() -> Ledger:
    from outsize.registry.ledger import Ledger, registry_folder

    return Ledger(registry_folder())


def show_all(*, as_json: JsonOption = False) -> int:
    """List subjects with their grants that still hold, and parties."""
    from outsize.registry.decide import written
    from outsize.registry.standing import standing_of
    from outsize.registry.telling import grant_in_words

    ledger = this_ledger()
    with ledger.opened() as opened:
        standing = standing_of(opened.entries)
    if as_json:
        print(json.dumps(standing.to_json(), indent=2, allow_nan=False))
        return 0
    print(f"registry: {ledger.folder}, {standing.revision} entries")
    for subject, basis in standing.subjects.items():
        num_derived = sum(len(one.items) for one in standing.derived_from(subject))
        told = ", has revoked" if subject in standing.revoked else ""
        print(f"{subject}: legal basis {basis}{told}; {num_derived} things derived")
        for number, one in standing.grants_of(subject).items():
            state = "is over" if ledger.now() >= one.ends else f"until {written(one.ends)}"
            print(f"  grant {number} ({state}): {grant_in_words(one)[0]}")
    for party in sorted(standing.parties):
        print(f"{party}: a party")
    return 0


def audit(subject: SubjectArgument, *, as_json: JsonOption = False) -> int:
    """Print one person's whole history in plain words: grants, requests with their answers, what came of them."""
    from dataclasses import asdict

    from outsize.registry.telling import entries_about, history

    with this_ledger().opened() as opened:
        entries = opened.entries
    found = entries_about(entries, subject)
    if not found:
        raise RecipeError(
            f"the registry holds nothing about {subject}; `outsize registry list` shows who is known"
        )
    if as_json:
        rows = [asdict(one) for one in found]
        print(json.dumps({"subject": subject, "entries": rows}, indent=2, allow_nan=False))
        return 0
    print(f"{subject}, {len(found)} entries")
    for paragraph in history(found, subject):
        print(paragraph)
    return 0


def verify(
    *,
    kept: Annotated[
        Path | None,
        typer.Option(
            "--head",
            help="A head that `outsize registry head` printed and that was kept elsewhere: only it shows that the end was cut "
            "off, or everything written anew.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check every entry's digest and link, and find what was edited, taken out, moved or cut off. Changes nothing."""
    from outsize.registry.chain import head_faults, parse_head

    ledger = this_ledger()
    chain, faults = ledger.examined()
    if kept is not None:
        try:
            faults += head_faults(chain, parse_head(kept.read_bytes()))
        except (OSError, ValueError) as error:
            raise RecipeError(f"--head: {kept} is no head: {error}") from error
    if as_json:
        values = {
            "entries": len(chain.entries),
            "unfinished_bytes": chain.num_torn,
            "faults": faults,
        }
        print(json.dumps(values, indent=2, allow_nan=False))
    if faults:
        listed = "\n  ".join(faults)
        raise StoreBroken(
            f"the registry in {ledger.folder} is not as it was written, so every request is refused; put back the copy that "
            f"you trust:\n  {listed}"
        )
    if not as_json:
        torn = (
            f"; {chain.num_torn} bytes of an interrupted write count for nothing"
            if chain.num_torn
            else ""
        )
        against = "" if kept is None else ", and the head that was kept is among them"
        print(f"{len(chain.entries)} entries, each as it was written{against}{torn}")
    return 0


def head(
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; left out: standard output.", show_default=False),
    ] = None,
) -> int:
    """Print how far the ledger has come, to be kept elsewhere: on paper, or on another machine."""
    from outsize.base.files import write_json_atomically

    ledger = this_ledger()
    with ledger.opened():  # nothing is vouched for that cannot be believed
        chain, _ = ledger.examined()
    if not chain.entries:
        raise RecipeError(
            f"there is no registry in {ledger.folder}; `outsize registry subject add` begins one"
        )
    if out is None:
        print(json.dumps(chain.head.to_json(), indent=2, allow_nan=False))
    else:
        write_json_atomically(out, chain.head.to_json())
        print(out)
    return 0
