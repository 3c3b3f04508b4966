"""trackio: a local record with a dashboard of its own (`trackio show`), or whatever its environment variables name.

Numbers only: its pictures would be copies of those in the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outsize.runs.trackers.protocol import Event, missing, scalars_of

if TYPE_CHECKING:
    from outsize.runs.folder import RunFolder

PROJECT = "outsize"
# Of a recipe, for its table of settings: what names folders of this machine stays here.
_TOLD = ("adapter", "train", "placement")


class Trackio:
    """Logs numbers under the run's name."""

    def __init__(self, run: RunFolder, recipe: Mapping[str, Any]) -> None:
        try:
            import trackio
        except ImportError as error:
            raise missing(__name__.rpartition(".")[2], error) from error
        self._trackio: Any = trackio
        settings = {key: recipe[key] for key in _TOLD if key in recipe}
        self._run = trackio.init(
            project=PROJECT,
            name=str(recipe.get("name") or run.path.name),
            config=settings,
            resume="allow",
            embed=False,
        )

    def see(self, event: Event) -> None:
        found = scalars_of(event)
        if found:
            self._run.log(found, step=event["step"])

    def close(self) -> None:
        self._run.finish()


plugin = Trackio
