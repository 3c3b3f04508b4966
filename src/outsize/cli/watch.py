"""`outsize watch`: what a run does now, for a person at a terminal, a log, or a script."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.units import format_bytes, format_seconds
from outsize.cli._site import RunArgument

if TYPE_CHECKING:
    from rich.table import Table

    from outsize.app.watching import View, Watcher
    from outsize.runs.folder import RunFolder

OnceOption = Annotated[bool, typer.Option("--once", help="One look, and done.")]
EveryOption = Annotated[
    float,
    typer.Option(
        "--every", min=1.0, help="Seconds between looks; the card is not asked more often for it."
    ),
]
ProveOption = Annotated[
    bool,
    typer.Option(
        "--prove",
        help="Ask the training for a proof that its memory lies on the card, and wait for it.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="A JSON object a look, each on its own line.")
]
_LOOK_S = 0.5  # between looks for an answer, which come from a file


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("watch")(watch)


def watch(
    run: RunArgument,
    *,
    once: OnceOption = False,
    every: EveryOption = 5.0,
    prove: ProveOption = False,
    as_json: JsonOption = False,
) -> int:
    """Show a run while it trains: step, loss, memory by owner, copying, power, clock, temperature; ends with it.

    A run that has ended or was killed shows its last words. What nobody told is said to be unknown.
    """
    from outsize.app.watching import Watcher
    from outsize.base.errors import RecipeError
    from outsize.cli._site import recipe_and_run

    _, folder = recipe_and_run(run)
    if not folder.journal.exists():
        raise RecipeError(f"{folder.path} holds no journal yet; train first")
    watcher = Watcher(folder)
    if prove:
        return _prove(watcher, folder, as_json=as_json)
    with _shown(as_json=as_json, once=once, name=folder.path.name) as show:
        while True:
            view = watcher.look()
            show(view)
            if once or view.has_ended:
                return 0
            time.sleep(every)


def _prove(watcher: Watcher, folder: RunFolder, *, as_json: bool) -> int:
    """Leave the request, and wait until the training answers at a step boundary.

    Raises: RecipeError where nothing trains; MachineFault where the proof fails.
    """
    from outsize.base.errors import MachineFault, RecipeError

    view = watcher.look()
    before = watcher.num_answers
    if view.doing not in {"training", "silent"}:
        raise RecipeError(f"nothing trains in {folder.path} ({view.doing}), so nobody could answer")
    folder.prove_now.touch()
    while watcher.num_answers == before:
        if view.has_ended:
            folder.prove_now.unlink(missing_ok=True)
            raise MachineFault(f"the training ended ({view.doing}) before it answered")
        time.sleep(_LOOK_S)
        view = watcher.look()
    print(json.dumps(dict(view.proof), allow_nan=False) if as_json else view.proof.get("told"))
    if not view.proof.get("is_well"):
        raise MachineFault(f"not proved: {view.proof.get('verdict')}")
    return 0


@contextmanager
def _shown(*, as_json: bool, once: bool, name: str) -> Iterator[Callable[[View], None]]:
    """How looks are shown: as JSON, live on a terminal, in lines elsewhere."""
    if as_json:
        yield lambda view: print(json.dumps(view.to_json(), allow_nan=False), flush=True)
    elif once or not sys.stdout.isatty():
        yield lambda view: print(
            "\n".join(f"{label}: {text}" for label, text in rows_of(view, name))
            if once or view.has_ended
            else line_of(view),
            flush=True,
        )
    else:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            yield lambda view: live.update(_grid(view, name), refresh=True)


def _grid(view: View, name: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for label, text in rows_of(view, name):
        grid.add_row(Text(label, style="bold"), Text(text))
    return grid


def line_of(view: View) -> str:
    """All that fits a line of a log."""
    parts = [
        view.doing,
        view.stall and "stalled",
        _step(view),
        _loss(view) and f"loss {_loss(view)}",
        _pace(view),
        _card(view),
        _bytes("host", view.host_bytes),
    ]
    return ", ".join(part for part in parts if part)


def rows_of(view: View, name: str) -> list[tuple[str, str]]:
    """Labels and texts, what is unknown among them."""
    rows = [
        (name, ", ".join(part for part in (view.doing, _step(view), _ago(view.age_s)) if part)),
        ("loss", _loss(view) or "unknown"),
        ("pace", _pace(view) or "unknown"),
        ("device", ", ".join(part for part in (view.device, _card(view)) if part) or "unknown"),
        ("memory", _memory(view) or "unknown"),
        ("host", _host(view) or "unknown"),
        ("residency", _residency(view)),
    ]
    if view.sensors_age_s is not None:
        rows.append(("sensors", f"read {_ago(view.sensors_age_s)}"))
    rows += [("unknown", why) for why in view.unknown]
    rows += [("stalled", view.stall)] if view.stall else []
    return [*rows, ("last words", view.last_words)] if view.last_words else rows


def _step(view: View) -> str:
    if view.step is None:
        return ""
    return f"step {view.step}" + (f" of {view.num_steps}" if view.num_steps else "")


def _loss(view: View) -> str:
    if view.loss is None:
        return ""
    mean = "" if view.loss_mean is None else f" (mean of the last steps {view.loss_mean:.4f})"
    return f"{view.loss:.4f}{mean}"


def _pace(view: View) -> str:
    if view.step_s is None:
        return ""
    left = "" if view.left_s is None else f", {format_seconds(view.left_s)} left"
    return f"{format_seconds(view.step_s)} a step{left}"


def _card(view: View) -> str:
    limit = "" if view.power_limit_w is None else f" of {view.power_limit_w:.0f}"
    parts = (
        (view.power_w, f"{view.power_w or 0:.0f}{limit} W"),
        (view.clock_mhz, f"{view.clock_mhz or 0:.0f} MHz"),
        (view.temperature_c, f"{view.temperature_c or 0:.0f} C"),
        (view.busy, f"{view.busy or 0:.0%} busy"),
    )
    return ", ".join(text for value, text in parts if value is not None)


def _memory(view: View) -> str:
    parts = [f"{owner} {format_bytes(size)}" for owner, size in view.memory.items()]
    if view.card_used_bytes is not None:
        of = "" if view.card_total_bytes is None else f" of {format_bytes(view.card_total_bytes)}"
        parts.append(f"all programs {format_bytes(view.card_used_bytes)}{of}")
    return ", ".join(parts)


def _host(view: View) -> str:
    parts = [_bytes("", view.host_bytes), _bytes("for the card", view.spilled_bytes)]
    if view.bus_bytes_per_s is not None:
        parts.append(f"copied to the card at {view.bus_bytes_per_s / 1e9:.3g} GB/s")
    return ", ".join(part for part in parts if part)


def _residency(view: View) -> str:
    if not view.proof:
        return "not proved yet"
    where = f"{view.proof.get('moment')}, step {view.proof.get('step')}, {_ago(view.proof.get('age_s'))}"
    is_well, proof = view.proof.get("is_well"), view.proof
    return f"{proof.get('verdict')} ({where})" if is_well else f"({where}) {proof.get('told')}"


def _bytes(label: str, size: int | None) -> str:
    return "" if size is None else f"{label} {format_bytes(size)}".strip()


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f"{format_seconds(seconds)} ago"
