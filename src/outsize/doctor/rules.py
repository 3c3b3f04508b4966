"""Known faults of machines as data (rules.toml), judged against facts; a pure function of both and of the day.

A condition holds, does not hold, or cannot be decided because a fact is missing; a rule applies when all its conditions
hold, and one that is certainly false settles it. Past its expiry a rule says "unknown". What a check measured outweighs a
rule that names it as its probe. Nothing is ever set: `recommended` only says what a person may set, and why.
"""

from __future__ import annotations

import datetime as dt
import functools
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any, Literal

from outsize.doctor.facts import PACKAGES, PLATFORM_VERSIONS, Facts, version_matches

Grade = Literal["A", "B", "C"]
Status = Literal["applies", "confirmed", "not seen", "unknown"]

_FACTS = (
    "vendor", "os", "os_class", "arch", "device", "driver_model", "override", "torch_build",
    "is_integrated", "is_wsl", "is_container", "is_virtual", "is_jetson", "torch_hip_unset",
    "has_aotriton_images",
)  # fmt: skip
_KEYS = frozenset({"id", "when", "symptom", "action", "grade", "sources", "seen", "expires"})
_MORE_KEYS = frozenset({"probe", "recommend", "unread"})
GRADES = {
    "A": "the vendor or maintainer says so, or the source was read",
    "B": "a merged fix, or several independent reports",
    "C": "one report",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table; fields as rules.toml describes them. when: by key, what it must be."""

    id: str
    when: Mapping[str, Any]
    symptom: str
    action: str
    grade: Grade
    sources: tuple[str, ...]
    seen: dt.date
    expires: dt.date
    probe: str = ""
    unread: str = ""
    recommend: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule whose conditions hold on a machine.

    status: "applies"; "confirmed" or "not seen" where its probe measured; "unknown" past its expiry.
    """

    rule: Rule
    status: Status

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        rule = self.rule
        return {
            "id": rule.id,
            "status": self.status,
            "symptom": rule.symptom,
            "action": rule.action,
            "grade": rule.grade,
            "sources": list(rule.sources),
            "seen": rule.seen.isoformat(),
            "expires": rule.expires.isoformat(),
            "probe": rule.probe,
            "unread": rule.unread,
        }


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the rules say of a machine. undecided: ids of rules that need a fact nobody knows."""

    findings: tuple[Finding, ...]
    undecided: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One variable that a person may set. value: "" means unset. is_so: the environment has it already."""

    name: str
    value: str
    finding: Finding
    is_so: bool


def judge(
    rules: Iterable[Rule],
    facts: Facts,
    *,
    today: dt.date,
    measured: Mapping[str, bool] | None = None,
) -> Judgement:
    """The rules that apply to a machine. measured: by check, whether it passed; what was not measured is left out."""
    findings, undecided = [], []
    for rule in rules:
        answers = [_holds(facts, key, wanted) for key, wanted in rule.when.items()]
        if all(answers):
            findings.append(Finding(rule, _status(rule, today, measured or {})))
        elif False not in answers:
            undecided.append(rule.id)
    return Judgement(tuple(findings), tuple(undecided))


def recommended(findings: Iterable[Finding], facts: Facts) -> list[Recommendation]:
    """The environment that the findings ask for, by name; none for what is unknown or was measured not to be needed.

    A variable that a finding wants unset is named only while it is set. Where one finding wants a variable unset and
    another wants a value, the value is taken.
    """
    found: dict[str, Recommendation] = {}
    for finding in findings:
        if finding.status in {"unknown", "not seen"}:
            continue
        for name, value in finding.rule.recommend.items():
            is_so = facts.environment.get(name) == value and bool(value)
            if not value and name not in facts.environment:
                continue
            if name not in found or (value and not found[name].value):
                found[name] = Recommendation(name, value, finding, is_so)
    return [found[name] for name in sorted(found)]


@functools.cache
def known_rules() -> tuple[Rule, ...]:
    """All rules of rules.toml."""
    text = resources.files("outsize.doctor").joinpath("rules.toml").read_text(encoding="utf-8")
    return rules_from(tomllib.loads(text))


def rules_from(table: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules from the parsed table.

    Raises: ValueError naming the rule and the key, for a table that this module cannot judge.
    """
    rules = []
    for row in table["rule"]:
        name = row.get("id", "a rule without an id")
        wrong = (_KEYS - row.keys()) | (row.keys() - _KEYS - _MORE_KEYS)
        if wrong or row["grade"] not in GRADES or not row["when"] or not row["sources"]:
            raise ValueError(
                f"{name}: missing, unknown or empty: {sorted(wrong) or 'grade, when or sources'}"
            )
        if row["expires"] <= row["seen"]:
            raise ValueError(f"{name}: expires {row['expires']} before it was seen {row['seen']}")
        for key, wanted in row["when"].items():
            _check_condition(name, key, wanted)
        rules.append(Rule(**{**row, "sources": tuple(row["sources"])}))
    ids = [rule.id for rule in rules]
    if len(set(ids)) < len(ids):
        raise ValueError(f"ids given twice: {sorted({one for one in ids if ids.count(one) > 1})}")
    return tuple(rules)


def _check_condition(name: str, key: str, wanted: object) -> None:
    """Judge a condition once on an empty machine: a range that cannot be read must not wait for the machine that needs it."""
    names = key.split("|")
    is_known = key in {"env", "sysctl", "missing_tool", *_FACTS}
    if not is_known and not {*names} <= {*PACKAGES, *PLATFORM_VERSIONS}:
        raise ValueError(f"{name}: nothing is known by the name {key}")
    one_of_everything = Facts(vendor="", os="linux", versions=dict.fromkeys(names, "1.0"))
    try:
        _holds(one_of_everything, key, wanted)
    except (AssertionError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name}: condition {key} = {wanted!r} cannot be judged: {error}"
        ) from error


def _status(rule: Rule, today: dt.date, measured: Mapping[str, bool]) -> Status:
    if rule.probe in measured:
        return "not seen" if measured[rule.probe] else "confirmed"
    return "applies" if today <= rule.expires else "unknown"


def _holds(facts: Facts, key: str, wanted: Any) -> bool | None:
    """Whether one condition holds; None when the fact is not known."""
    if key == "env":
        return _all(
            _variable_holds(facts, names, one)
            for names, many in wanted.items()
            for one in _listed(many)
        )
    if key == "sysctl":
        have = facts.sysctl
        return _all(have[name] == value if name in have else None for name, value in wanted.items())
    if key == "missing_tool":
        return None if facts.tools is None else wanted not in facts.tools
    if key in _FACTS:
        return _fact_holds(getattr(facts, key), wanted)
    return _any(_version_holds(facts, name, _listed(wanted)) for name in key.split("|"))


def _fact_holds(value: object, wanted: Any) -> bool | None:
    """A value, or one of a list of patterns; "!" before a pattern excludes."""
    if value is None:
        return None
    if isinstance(wanted, bool):
        return value is wanted
    patterns = [str(one) for one in _listed(wanted)]
    banned = [one[1:] for one in patterns if one.startswith("!")]
    allowed = [one for one in patterns if not one.startswith("!")] or ["*"]
    return _matches_any(str(value), allowed) and not _matches_any(str(value), banned)


def _matches_any(value: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(value, one) for one in patterns)


def _version_holds(facts: Facts, name: str, ranges: list[Any]) -> bool | None:
    version = facts.versions.get(name)
    if version is None:
        is_there = name in facts.versions or name in PLATFORM_VERSIONS
        if ranges == ["*"]:
            return is_there
        return None if is_there else False
    return _any(version_matches(version, one) for one in ranges)


def _variable_holds(facts: Facts, names: str, wanted: str) -> bool:
    """Of any of the names: "set" (and not empty), "empty", "contains:TEXT", or "not:TEXT" (unset counts)."""
    values = [facts.environment.get(name) for name in names.split("|")]
    word, _, text = wanted.partition(":")
    tests: dict[str, Callable[[str | None], bool]] = {
        "set": bool,
        "empty": lambda value: value is not None and not value.strip(),
        "contains": lambda value: value is not None and text.lower() in value.lower(),
        "not": lambda value: value != text,
    }
    assert word in tests, f"{wanted!r} is none of {', '.join(tests)}"
    return any(tests[word](value) for value in values)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _all(answers: Iterable[bool | None]) -> bool | None:
    found = list(answers)
    return False if False in found else None if None in found else True


def _any(answers: Iterable[bool | None]) -> bool | None:
    found = list(answers)
    return True if True in found else None if None in found else False
