"""The trackers that a recipe names, told of every event while it trains.

Training never depends on them: one that fails is said to have, and is told nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outsize.runs.trackers.protocol import TRACKERS, MakeTracker, Tracker

if TYPE_CHECKING:
    from outsize.app.site import Site


@contextmanager
def tracked(site: Site) -> Iterator[None]:
    """Within the block the recipe's trackers follow the journal.

    Raises: RecipeError when a tracker's program is not installed; before anything slow has begun.
    """
    recipe = site.recipe
    makers: dict[str, MakeTracker] = {name: TRACKERS.load(name) for name in recipe.track}
    values = recipe.to_json()
    open_: dict[str, Tracker] = {name: make(site.run, values) for name, make in makers.items()}

    def see(event: dict[str, Any]) -> None:
        for name, tracker in list(open_.items()):
            try:
                tracker.see(event)
            except Exception as error:  # noqa: BLE001 - somebody else's program must not end a training
                del open_[name]
                _give_up(site, name, error)

    try:
        with site.journal.followed_by(see):
            yield
    finally:
        for name, tracker in open_.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - as above
                _give_up(site, name, error)


def _give_up(site: Site, name: str, error: Exception) -> None:
    text = f"the tracker {name} failed and is told nothing more: {type(error).__name__}: {error}"
    site.progress.say(f"warning: {text}")
    site.journal.write("warning", what=text)
