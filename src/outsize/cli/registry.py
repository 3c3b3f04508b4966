"""`outsize registry`: who is shown, what each of them agreed to, and what came of it."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.base.errors import RecipeError, StoreBroken
from outsize.cli._registry_reading import (
    JsonOption,
    SubjectArgument,
    audit,
    head,
    show_all,
    this_ledger,
    verify,
)

if TYPE_CHECKING:
    from outsize.registry.acts import Revoked
    from outsize.registry.records import Scope

IdOption = Annotated[
    str | None,
    typer.Option("--id", help="An id that was made elsewhere; left out: a fresh one."),
]
ScopeOption = Annotated[
    str, typer.Option("--scope", help="self, named, group or public.", show_default=False)
]
PurposeOption = Annotated[
    list[str],
    typer.Option(
        "--purpose",
        help="train, render, export or merge; may be given several times.",
        show_default=False,
    ),
]
EvidenceOption = Annotated[
    str,
    typer.Option(
        "--evidence",
        help="The signed document, of which only the SHA-256 is kept, or that SHA-256.",
        show_default=False,
    ),
]
UntilOption = Annotated[
    str, typer.Option("--until", help="Last day, as in 2027-12-31 (UTC).", show_default=False)
]
SinceOption = Annotated[
    str | None,
    typer.Option("--from", help="First day (UTC); left out: from now on.", show_default=False),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        help="SCOPE:ID, as in named:p-0c11d2e93a5f: a third party who is admitted from that scope on. May be given several "
        "times.",
        show_default=False,
    ),
]
ReplacesOption = Annotated[
    list[int] | None,
    typer.Option(
        "--replaces", help="Number of a grant that ends with this one.", show_default=False
    ),
]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DAY_S = 86400


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Who is shown, and what they agreed to.", no_args_is_help=True)
    subject = typer.Typer(help="People who are shown.", no_args_is_help=True)
    subject.command("add")(add_subject)
    party = typer.Typer(help="People who ask, or are named in grants.", no_args_is_help=True)
    party.command("add")(add_party)
    group.add_typer(subject, name="subject")
    group.add_typer(party, name="party")
    for name, command in (
        ("grant", grant), ("revoke", revoke), ("bind", bind), ("list", show_all),
        ("audit", audit), ("verify", verify), ("head", head),
    ):  # fmt: skip
        group.command(name)(command)
    app.add_typer(group, name="registry")


def add_subject(
    *,
    basis: Annotated[
        str,
        typer.Option(
            "--basis",
            help="On what legal basis their pictures are held: consent, public_domain, own_work or licence. None of them is "
            "a grant.",
        ),
    ] = "consent",
    pseudonym: IdOption = None,
) -> int:
    """Add somebody who is shown, and print the id; whose it is stays on paper."""
    from outsize.base.legal_basis import BASES
    from outsize.registry import acts

    if basis not in BASES:
        raise RecipeError(f"--basis: {basis!r} is none of {', '.join(BASES)}")
    print(acts.add_subject(this_ledger(), basis, pseudonym))
    return 0


def add_party(*, pseudonym: IdOption = None) -> int:
    """Add somebody who asks or is named in grants, and print the id."""
    from outsize.registry import acts

    print(acts.add_party(this_ledger(), pseudonym))
    return 0


def grant(
    subject: SubjectArgument,
    *,
    scope: ScopeOption,
    purpose: PurposeOption,
    evidence: EvidenceOption,
    until: UntilOption,
    since: SinceOption = None,
    allow: AllowOption = None,
    replaces: ReplacesOption = None,
) -> int:
    """Write down what somebody agreed to, and print the grant's number."""
    from typing import cast

    from outsize.registry import acts
    from outsize.registry.records import Grant

    ledger = this_ledger()
    allowed: dict[str, list[str]] = {}
    for text in allow or []:
        where, _, party = text.partition(":")
        allowed.setdefault(where, []).append(party)
    made = Grant(
        subject=subject,
        scope=cast("Scope", scope),
        purposes=cast("Any", tuple(dict.fromkeys(purpose))),
        evidence=_evidence(evidence),
        starts=ledger.now() if since is None else _midnight(since, "--from"),
        ends=_midnight(until, "--until") + _DAY_S,
        allowed=cast("Any", {where: tuple(parties) for where, parties in allowed.items()}),
        replaces=tuple(replaces or ()),
    )
    print(acts.give_grant(ledger, made))
    return 0


def revoke(subject: SubjectArgument, *, as_json: JsonOption = False) -> int:
    """End everything somebody agreed to, at once, and put away all that was derived from them (NAME becomes NAME.quarantined)."""
    from dataclasses import asdict

    from outsize.registry import acts

    made = acts.revoke(this_ledger(), subject)
    if as_json:
        print(json.dumps({"subject": subject} | asdict(made), indent=2, allow_nan=False))
    else:
        _tell_revoked(subject, made)
    stuck = [one for one in made.quarantined if one.became == "stuck"]
    if stuck:
        listed = "\n  ".join(f"{one.path}: {one.why}" for one in stuck)
        raise StoreBroken(
            f"the revocation holds, but {len(stuck)} things could not be put away; close what uses them and revoke again:\n"
            f"  {listed}"
        )
    return 0


def bind(
    subject: SubjectArgument,
    paths: Annotated[
        list[Path],
        typer.Argument(help="Adapters, merged bases or run folders.", show_default=False),
    ],
) -> int:
    """Note that something made before, or elsewhere, shows a subject: from then on it needs a grant. Twice is once."""
    from outsize.app.contents import items_of
    from outsize.registry import acts
    from outsize.registry.records import Derived

    gone = [str(one) for one in paths if not one.exists()]
    if gone:
        raise RecipeError(f"there is no {', '.join(gone)}")
    ledger, num_new = this_ledger(), 0
    for path in paths:
        num_new += acts.note(ledger, Derived("adapter", (subject,), items_of(path)))
    print(f"{num_new} of {len(paths)} were not bound to {subject} before")
    return 0


def _evidence(text: str) -> str:
    """The SHA-256 that was given, or that of the document that was named."""
    from outsize.base.files import file_digest

    if _SHA256.fullmatch(text):
        return text
    if not Path(text).is_file():
        raise RecipeError(
            f"--evidence: there is no document {text}, and it is no SHA-256 (64 of 0-9 and a-f)"
        )
    return file_digest(Path(text))


def _midnight(text: str, option: str) -> int:
    try:
        day = dt.date.fromisoformat(text)
        return int(dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC).timestamp())
    except ValueError as error:
        raise RecipeError(f"{option}: {text!r} is no day; write it as in 2027-12-31") from error


def _tell_revoked(subject: str, made: Revoked) -> None:
    if made.is_new:
        print(f"{subject} has revoked: every request is refused from now on")
    else:
        print(f"{subject} had revoked already, and agreed to nothing since")
    moved = [one for one in made.quarantined if one.became == "moved"]
    num_gone = sum(one.became == "gone" for one in made.quarantined)
    print(
        f"put away {len(moved)} of {len(made.quarantined)} things derived, {num_gone} are not there"
    )
    for one in moved:
        print(f"  {one.path} -> {Path(one.lies_at or '').name}")
