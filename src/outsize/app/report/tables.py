"""The sections of a report: a place for each chart, and its numbers as a table beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from outsize.app.report import figures
from outsize.app.report.history import History, Step
from outsize.app.report.markup import Markup, element, folded, raw, section, table
from outsize.app.report.shown import Picture, Preview
from outsize.base.units import format_bytes, format_seconds

_ROWS = 40  # of a table that stands for a curve, at even distances
_NOTHING = "nothing is recorded yet"


def _chart(name: str, title: str) -> Markup:
    """Where the script draws."""
    return element(
        "figure",
        element("figcaption", title),
        element("div", id=f"chart-{name}", class_="chart", data_title=title),
        class_="plot",
    )


def curves(history: History) -> Markup:
    """Loss, step size and gradient."""
    if not history.steps:
        return section("Loss", "loss", element("p", _NOTHING, class_="nothing"))
    controls = raw(
        '<form class="controls" id="controls" aria-label="How curves are drawn">'
        '<label for="smoothing">smoothing <output id="smoothing-value" for="smoothing">0.9</output></label>'
        '<input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0.9">'
        '<label for="from">from step <output id="from-value" for="from"></output></label>'
        '<input type="range" id="from" min="0" max="1000" value="0">'
        '<label for="to">to step <output id="to-value" for="to"></output></label>'
        '<input type="range" id="to" min="0" max="1000" value="1000">'
        '<label class="check"><input type="checkbox" id="log"> logarithmic loss</label>'
        '<button type="button" id="reset">show all</button>'
        "</form>"
        '<p id="readout" class="readout" role="status" aria-live="polite"></p>'
    )
    return section(
        "Loss",
        "loss",
        controls,
        _chart("loss", "Loss of each step, and smoothed"),
        element(
            "div",
            _chart("rate", "Learning rate"),
            _chart("norm", "Norm of the gradient, before it is clipped"),
            class_="pair",
        ),
        folded("Loss as a table", _step_table(history)),
        lead="Drag over a chart to look closer, or use the sliders; arrow keys read values once a chart has the focus.",
    )


def _step_table(history: History) -> Markup:
    heads = ("steps", "loss, mean", "least", "largest", "learning rate", "gradient", "a step")
    rows = []
    for group in _groups(history.steps):
        losses = _known(group, "loss")
        rates, norms, times = (
            _known(group, name) for name in ("learning_rate", "grad_norm", "seconds")
        )
        first, last = group[0].number, group[-1].number
        rows.append(
            (
                f"{first}" if first == last else f"{first} to {last}",
                f"{statistics.fmean(losses):.5g}" if losses else "-",
                f"{min(losses):.5g}" if losses else "-",
                f"{max(losses):.5g}" if losses else "-",
                f"{rates[-1]:.3g}" if rates else "-",
                f"{statistics.fmean(norms):.3g}" if norms else "-",
                format_seconds(statistics.median(times)) if times else "-",
            )
        )
    return table("Loss, learning rate and gradient by steps", heads, rows)


def _groups(steps: Sequence[Step]) -> list[Sequence[Step]]:
    size = max(1, -(-len(steps) // _ROWS))
    return [steps[place : place + size] for place in range(0, len(steps), size)]


def _known(group: Sequence[Step], name: str) -> list[float]:
    return [value for one in group if (value := one.values[name]) is not None]


def seconds(history: History) -> Markup:
    """Where each step's seconds went, and where the run's did."""
    parts = []
    if any(one.values["compute_s"] is not None for one in history.steps):
        parts.append(_chart("seconds", "Seconds of a step: computing, waiting for copies, host"))
        parts.append(folded("Seconds as a table", _split_table(history)))
    stages = figures.stages_of(history)
    if stages:
        rows = [
            (
                one["name"] if one["count"] == 1 else f"{one['name']} ({one['count']} times)",
                format_seconds(one["seconds"]),
                format_bytes(one["device"]) if one["device"] else "-",
                format_bytes(one["host"]),
            )
            for one in stages
        ]
        heads = ("stage", "time", "device peak", "host peak")
        parts.append(table("Stages of the last start", heads, rows))
    parts = parts or [element("p", _NOTHING, class_="nothing")]
    lead = (
        "Computing: the device had work, launching it included. Waiting for copies: a streamed block was not there in time. "
        "Host: nothing was queued on the device."
    )
    return section("Time", "time", *parts, lead=lead)


def _split_table(history: History) -> Markup:
    rows = []
    for group in _groups(history.steps):
        means = [
            statistics.fmean(known) if (known := _known(group, name)) else None
            for name in ("seconds", "compute_s", "copy_wait_s", "host_s")
        ]
        whole, *shares = means
        first, last = group[0].number, group[-1].number
        cells = ["-" if whole is None else format_seconds(whole)]
        cells += ["-" if not whole or one is None else f"{one / whole:.1%}" for one in shares]
        rows.append((f"{first}" if first == last else f"{first} to {last}", *cells))
    heads = ("steps", "a step, mean", "computing", "waiting for copies", "host")
    return table("Where the seconds of a step went", heads, rows)


def memory(phases: Sequence[figures.Phase], history: History) -> Markup:
    """Bytes by owner in each phase, the measured peak beside them; and over the steps."""
    if not phases:
        return section("Memory", "memory", element("p", _NOTHING, class_="nothing"))
    parts = [
        _chart("memory", "Planned bytes by owner, phase after phase; marks are measured peaks")
    ]
    if figures.memory_of(history):
        parts.append(_chart("usage", "Measured while training"))
    rows = [
        (
            phase.name if place == 0 else "",
            owner,
            format_bytes(size),
            why,
        )
        for phase in phases
        for place, (owner, size, why) in enumerate(phase.items)
    ]
    peaks = [
        (
            phase.name,
            {"device": "device"}.get(phase.pool, "RAM"),
            format_bytes(phase.planned),
            "-" if phase.measured is None else format_bytes(phase.measured),
        )
        for phase in phases
    ]
    heads = ("phase", "where", "planned", "measured peak")
    parts.append(folded("Memory as a table", table("Peaks by phase", heads, peaks, words=(0, 1))))
    owners = table("Owners by phase", ("phase", "owner", "bytes", "why"), rows, words=(0, 1, 3))
    parts.append(folded("Owners as a table", owners))
    lead = "One big thing at a time: the peak is the largest phase, not the sum. The driver's own memory is not measured."
    return section("Memory", "memory", *parts, lead=lead)


def boot(history: History) -> Markup:
    """The way to the first step."""
    legs = figures.boot_of(history)
    if not legs:
        return raw("")
    rows = [
        (leg["name"], format_seconds(leg["at"]), format_seconds(leg["seconds"])) for leg in legs
    ]
    return section(
        "Start",
        "start",
        _chart("boot", "From the beginning of the process to the end of the first step"),
        folded(
            "Waypoints as a table", table("Waypoints of a start", ("waypoint", "at", "took"), rows)
        ),
    )


def shown(previews: Sequence[Preview], left_out: int, comparisons: Sequence[Picture]) -> Markup:
    """What the adapter makes, step by step, and beside the base."""
    if not previews and not comparisons:
        return raw("")
    parts = [_preview(one) for one in previews]
    if len(previews) > 1:
        parts.insert(
            0,
            raw(
                '<form class="controls" id="preview-controls" aria-label="Which preview is shown" hidden>'
                '<button type="button" id="preview-back">earlier</button>'
                '<label for="preview-place">preview of <output id="preview-step" for="preview-place"></output></label>'
                '<input type="range" id="preview-place" min="0" value="0">'
                '<button type="button" id="preview-on">later</button></form>'
            ),
        )
    if left_out:
        parts.append(element("p", f"{left_out} more previews lie in the run folder", class_="lead"))
    parts += [
        element("figure", _image(one), element("figcaption", one.caption)) for one in comparisons
    ]
    return section("What it makes", "previews", *parts)


def _preview(one: Preview) -> Markup:
    content: list[Markup] = []
    if one.picture is not None:
        content.append(_image(one.picture))
    elif one.waits:
        content.append(
            element("p", "not decoded yet: latents wait in the run folder", class_="nothing")
        )
    for prompt, seed, text in one.texts:
        content.append(
            element(
                "blockquote",
                element("p", f"{prompt} (seed {seed})", class_="prompt"),
                element("p", text, class_="answer"),
            )
        )
    return element(
        "figure", *content, element("figcaption", f"step {one.step}"), class_="preview",
        data_step=str(one.step),
    )  # fmt: skip


def _image(one: Picture) -> Markup:
    return element(
        "img", src=one.source, width=str(one.width), height=str(one.height), alt=one.caption
    )
