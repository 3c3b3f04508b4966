"""The last sections of a report: plan against measured, warnings, and what the run was made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from outsize.app.report import figures
from outsize.app.report.history import History
from outsize.app.report.markup import Markup, element, folded, raw, section, table
from outsize.base.units import format_bytes, format_seconds


def compared(history: History, plan: Mapping[str, Any]) -> Markup:
    """Estimates beside measurements."""
    rows = [
        (
            one["stage"],
            one["what"],
            _amount(one["planned"], one["unit"]),
            _amount(one["measured"], one["unit"]),
            f"{one['off']:+.0%}",
        )
        for one in figures.compared_of(history)
    ]
    parts = []
    if rows:
        heads = ("stage", "of", "planned", "measured", "off")
        parts.append(table("Plan against measured", heads, rows, words=(0, 1)))
    placement, compute = (plan.get(key) for key in ("placement", "compute"))
    said = [
        f"{label}: {one.get('why')}"
        for label, one in (("placement", placement), ("compute", compute))
        if isinstance(one, Mapping) and one.get("why")
    ]
    notes = plan.get("notes")
    said += [str(one) for one in notes] if isinstance(notes, list) else []
    if said:
        parts.append(element("ul", *(element("li", one) for one in said)))
    return section("Plan", "plan", *parts) if parts else raw("")


def _amount(value: float, unit: str) -> str:
    return format_bytes(int(value)) if unit == "B" else format_seconds(value)


def warnings(history: History) -> Markup:
    """All that was said with a raised finger."""
    found = figures.warnings_of(history)
    if not found:
        return section("Warnings", "warnings", element("p", "none", class_="nothing"))
    items = (
        element("li", one.text + (f" ({one.count} times)" if one.count > 1 else ""))
        for one in found
    )
    return section("Warnings", "warnings", element("ul", *items, class_="warnings"))


def identity(history: History, recipe: Mapping[str, Any]) -> Markup:
    """What the run was made of: digests of base, data and code, and the recipe."""
    found = history.last("identity")
    names = {
        "recipe": "recipe",
        "numbers": "what of it decides numbers",
        "base": "base, as prepared",
        "manifest": "data",
        "code": "code of Outsize",
        "version": "version of Outsize",
        "computed_by": "computed by",
        "python": "Python",
        "system": "system",
    }
    rows = [(label, _hidden(str(found[key]))) for key, label in names.items() if found.get(key)]
    libraries = found.get("libraries")
    if isinstance(libraries, Mapping):
        listed = ", ".join(f"{name} {version}" for name, version in libraries.items())
        rows.append(("libraries", listed))
    rows.append(("starts that trained", str(history.num_sessions)))
    dumped = yaml.safe_dump(json.loads(json.dumps(recipe)), sort_keys=False, allow_unicode=True)
    return section(
        "What it was made of",
        "identity",
        table("Digests are SHA-256", ("of", "value"), rows, words=(0, 1)),
        folded("Recipe", element("pre", _hidden(dumped), tabindex="0")),
    )


def _hidden(text: str) -> str:
    """Without the name of the user's folder, which a page that is passed on need not tell."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
