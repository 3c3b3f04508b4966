"""From a run folder to one page that needs nothing else: no network, no other file, no server.

Charts are drawn by the page's own script from the numbers inside it, and each has its numbers as a table, which this module
writes. Everything that people wrote (captions, prompts, names, messages) enters as text: escaped in HTML, and inside the
data with every character escaped that could end a script. The page's policy names its own script and style by their
hashes, so nothing else could run even then.
"""

from __future__ import annotations

import base64
import hashlib
import json
import statistics
from importlib import resources
from typing import TYPE_CHECKING, Any

from outsize.app.report import facts, figures, tables
from outsize.app.report.history import History, read_history, read_json
from outsize.app.report.markup import Markup, element, join, raw
from outsize.app.report.shown import Preview, comparisons_of, previews_of
from outsize.app.report.thinning import thinned
from outsize.base.files import write_atomically
from outsize.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from outsize.runs.folder import RunFolder

_TAIL = 100  # steps that "loss at the end" is the mean of
_ESCAPED = {one: f"\\u{ord(one):04x}" for one in "<>&\u2028\u2029"}


def write_report(run: RunFolder) -> Path:
    """Write the page of a run, whole or not at all; where it lies."""
    write_atomically(run.report, page_of(run).encode())
    return run.report


def page_of(run: RunFolder) -> str:
    """The page as HTML. It reads files only; a folder that holds little gives a page that shows little."""
    history = read_history(run)
    recipe, plan, state = (
        _mapping(read_json(path)) for path in (run.recipe, run.plan, run.path / "state.json")
    )
    previews, left_out = previews_of(run)
    phases = figures.phases_of(plan, history)
    data = _data(history, phases, previews)
    name = str(recipe.get("name") or run.path.name)
    body = join(
        _header(name, recipe, history, str(state.get("state", "new")), phases),
        tables.curves(history),
        tables.seconds(history),
        tables.memory(phases, history),
        tables.boot(history),
        tables.shown(previews, left_out, comparisons_of(run)),
        facts.compared(history, plan),
        facts.warnings(history),
        facts.identity(history, recipe),
    )
    return _document(name, body, data)


def _data(history: History, phases: list[figures.Phase], previews: list[Preview]) -> dict[str, Any]:
    """What the script draws."""
    return {
        "series": thinned(history.steps),
        "resumes": [{"step": one.step, "lost": one.lost} for one in history.resumes],
        "evaluated": figures.evaluated_of(history),
        "memory": figures.memory_of(history),
        "phases": [
            {
                "name": one.name,
                "measured": one.measured,
                "seconds": one.seconds,
                "items": [{"owner": owner, "bytes": size} for owner, size, _ in one.items],
            }
            for one in phases
        ],
        "boot": figures.boot_of(history),
        "previews": [one.step for one in previews],
    }


def _header(
    name: str,
    recipe: dict[str, Any],
    history: History,
    state: str,
    phases: list[figures.Phase],
) -> Markup:
    base = _mapping(recipe.get("base"))
    about = " ".join(str(base.get(key, "")) for key in ("family", "variant")).strip()
    device = history.last("device")
    words = [about, str(device.get("name", "")), str(device.get("compute", ""))]
    tiles = element(
        "dl",
        *(
            element("div", element("dt", label), element("dd", value), class_="tile")
            for label, value in _tiles(recipe, history, phases)
        ),
        class_="tiles",
    )
    return element(
        "header",
        element(
            "div",
            element("h1", name),
            element("span", state, class_=f"state {state}"),
            class_="title",
        ),
        element("p", ", ".join(word for word in words if word), class_="about"),
        tiles,
    )


def _tiles(
    recipe: dict[str, Any], history: History, phases: list[figures.Phase]
) -> list[tuple[str, str]]:
    steps, asked = history.steps, _mapping(recipe.get("train")).get("steps")
    losses = [one.values["loss"] for one in steps[-_TAIL:] if one.values["loss"] is not None]
    seconds = [one.values["seconds"] for one in steps if one.values["seconds"] is not None]
    peaks = [one.measured for one in phases if one.measured]
    boot = figures.boot_of(history)
    found = [("steps", f"{steps[-1].number if steps else 0}" + (f" / {asked}" if asked else ""))]
    if losses:
        found.append((f"loss, last {len(losses)} steps", f"{statistics.fmean(losses):.4g}"))
    if seconds:
        found.append(("median step", format_seconds(statistics.median(seconds))))
        found.append(("training", format_seconds(sum(seconds))))
    if peaks:
        found.append(("peak memory", format_bytes(max(peaks))))
    if boot:
        found.append(("to the first step", format_seconds(boot[-1]["at"])))
    return found


def _document(name: str, body: Markup, data: dict[str, Any]) -> str:
    """The whole page, its script and style named by their hashes."""
    folder = resources.files("outsize.app.report")
    style, script = (
        folder.joinpath(one).read_text(encoding="utf-8").replace("\r\n", "\n")
        for one in ("report.css", "report.js")
    )
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        raw('<meta charset="utf-8">'),
        raw(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        raw('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        raw('<meta name="color-scheme" content="light dark">'),
        element("title", f"{name}: Outsize"),
        raw(f"<style>{style}</style>"),
    )
    main = element("main", body, id="main")
    page = element(
        "body",
        raw('<a class="skip" href="#main">Skip to the figures</a>'),
        main,
        raw(f'<script type="application/json" id="data">{as_script_data(data)}</script>'),
        raw(f"<script>{script}</script>"),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{page}</html>\n'


def as_script_data(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element, or is no JSON."""
    dumped = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(_ESCAPED.get(one, one) for one in dumped)


def _hash(content: str) -> str:
    """As a content security policy names an element."""
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"sha256-{digest}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
