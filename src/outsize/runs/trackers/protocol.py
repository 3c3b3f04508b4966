"""What a tracker is: a program's own record of a run, told what the journal is told.

Nothing of a run depends on one: the run folder and its report hold everything without. A plug-in binds `plugin` to a
callable (run folder, recipe as JSON values) that gives a `Tracker`; it imports its program only when it is called, and
raises RecipeError with what to install where that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from outsize.base.catalogue import Catalogue
from outsize.base.errors import RecipeError
from outsize.runs.folder import RunFolder

TRACKERS = Catalogue("outsize.runs.trackers", "tracker")

Event = Mapping[str, Any]
# Numbers of a "step" event by the names under which people look for them.
_OF_STEP = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "seconds": "time/step_s",
    "compute_s": "time/compute_s",
    "copy_wait_s": "time/copy_wait_s",
    "host_s": "time/host_s",
}
_OF_MEMORY = {
    "device_bytes": "memory/device_bytes",
    "reserved_bytes": "memory/reserved_bytes",
    "host_bytes": "memory/host_bytes",
}


class Tracker(Protocol):
    """One record of one run."""

    def see(self, event: Event) -> None:
        """Something happened, as the journal has it."""

    def close(self) -> None:
        """The run is over, or stops for now; everything told so far must be kept."""


MakeTracker = Callable[[RunFolder, Mapping[str, Any]], Tracker]


def scalars_of(event: Event) -> dict[str, float]:
    """The numbers of an event that belong to its step, by name; none of most events."""
    kind = event["event"]
    if kind == "step":
        return _named(event, _OF_STEP)
    if kind == "memory":
        return _named(event, _OF_MEMORY)
    if kind == "evaluated":
        what = f"held_out/{event.get('what', 'adapter')}"
        return _named(event, {"loss": f"{what}_loss", "perplexity": f"{what}_perplexity"})
    return {}


def missing(program: str, error: ImportError) -> RecipeError:
    """What to say where a tracker's program is not installed."""
    return RecipeError(
        f'track: {program} is not installed ({error}); install it with `pip install "outsize[{program}]"`, or leave it out '
        "of the recipe: the run folder's report.html needs none"
    )


def _named(event: Event, names: Mapping[str, str]) -> dict[str, float]:
    return {
        name: float(event[key])
        for key, name in names.items()
        if isinstance(event.get(key), int | float)
    }
