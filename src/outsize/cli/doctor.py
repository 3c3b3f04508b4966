"""`outsize doctor`: measure this machine, judge it, and say what is known to go wrong on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.base.units import format_seconds
from outsize.cli._site import DeviceOption

if TYPE_CHECKING:
    from outsize.doctor.checks import Check
    from outsize.doctor.facts import Facts
    from outsize.doctor.rules import Finding, Judgement

CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", help="Folder for stores, whose disk is measured.", show_default=False),
]
EnvOption = Annotated[
    bool,
    typer.Option(
        "--env", help="Only the environment that the rules recommend, and why; nothing is set."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    *,
    device: DeviceOption = None,
    cache: CacheOption = None,
    env: EnvOption = False,
    as_json: JsonOption = False,
) -> int:
    """Measure what training needs of this machine, judge it, and name what is known to go wrong on it."""
    if env:
        return _show_environment(as_json=as_json)
    from outsize.app.doctor import examine

    found = examine(device_kind=device, cache=cache, told=_note)
    if as_json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        _show_checks(found.checks)
        _show_findings(found.judgement)
        _show_recommended(found.judgement, found.facts)
        has_rates = any(one.id == "rates" and one.status != "skipped" for one in found.checks)
        beside = ", the rates beside it for plans" if has_rates else ""
        print(f"\n{format_seconds(found.seconds)}; kept in {found.kept}{beside}")
    found.require_health()
    return 0


def _note(check: Check) -> None:
    """What goes on, for a person who waits."""
    if sys.stderr.isatty():
        print(f"{check.id}: {check.status}", file=sys.stderr, flush=True)


def _show_checks(checks: Sequence[Check]) -> None:
    from outsize.cli._tables import print_table

    head = ("check", "result", "measured", "wanted", "confidence")
    rows = [(one.id, one.status, one.measured, one.wanted, one.confidence) for one in checks]
    print_table("This machine", head, rows, words=range(len(head)))
    for one in checks:
        if one.remedy:
            print(f"{one.id}: {one.remedy}")


def _show_findings(judgement: Judgement) -> None:
    if not judgement.findings and not judgement.undecided:
        print("\nNo rule names this machine.")
        return
    print("\nWhat is known to go wrong on such a machine")
    for one in judgement.findings:
        print("\n".join(_finding_lines(one)))
    if judgement.undecided:
        print(f"Undecided, for want of a fact: {', '.join(judgement.undecided)}")


def _finding_lines(finding: Finding) -> list[str]:
    from outsize.doctor.rules import GRADES

    rule = finding.rule
    state = {
        "applies": f"check `{rule.probe}` was not made" if rule.probe else "applies",
        "confirmed": f"confirmed by check `{rule.probe}`",
        "not seen": f"not seen by check `{rule.probe}`",
        "unknown": f"unknown: true until {rule.expires}, not looked at since",
    }[finding.status]
    return [
        f"- {rule.id} ({state}): {rule.symptom}",
        f"  {rule.action}",
        f"  grade {rule.grade} ({GRADES[rule.grade]}), {rule.seen}: {', '.join(rule.sources)}",
    ]


def _show_recommended(judgement: Judgement, facts: Facts) -> None:
    from outsize.app.doctor import unread_variables
    from outsize.doctor.rules import recommended

    for finding in unread_variables(judgement.findings):
        print(f"{finding.rule.unread} is set, and nothing reads it: {finding.rule.action}")
    said = recommended(judgement.findings, facts)
    if not said:
        print("\nNo variable is recommended.")
        return
    print("\nRecommended environment; nothing was set")
    for one in said:
        rule = one.finding.rule
        line = f"{one.name}={one.value}" if one.value else f"unset {one.name}"
        print(f"{line}{'  (is so)' if one.is_so else ''}")
        decides = (
            f"; check `{rule.probe}` decides"
            if one.finding.status == "applies" and rule.probe
            else ""
        )
        print(f"  {rule.symptom} ({rule.id}, grade {rule.grade}{decides})")


def _show_environment(*, as_json: bool) -> int:
    from outsize.app.doctor import judge_rules, rules_json
    from outsize.doctor.gather import gather_facts

    facts = gather_facts()
    judgement = judge_rules(facts)
    if as_json:
        told: dict[str, Any] = {"facts": facts.to_json(), **rules_json(judgement, facts)}
        print(json.dumps(told, indent=2, allow_nan=False))
        return 0
    _show_recommended(judgement, facts)
    return 0
