"""TensorBoard: event files in tensorboard/ of the run folder, one for each start.

A run that goes on from a checkpoint tells TensorBoard to forget what had come after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outsize.runs.trackers.protocol import Event, missing, scalars_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from outsize.runs.folder import RunFolder

FOLDER = "tensorboard"
_FLUSH_S = 30  # seconds for which events may wait in memory


class TensorBoard:
    """Writes numbers and preview grids."""

    def __init__(self, run: RunFolder, _recipe: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing(__name__.rpartition(".")[2], error) from error
        self._run, self._make = run, SummaryWriter
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def see(self, event: Event) -> None:
        kind = event["event"]
        if kind == "resumed":
            self._purge_step = event["step"] + 1
        for name, value in scalars_of(event).items():
            self._writing().add_scalar(name, value, event["step"], walltime=event["time"])
        if kind == "preview" and event.get("is_decoded"):
            self._preview(event["step"], event["folder"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _preview(self, step: int, folder: str) -> None:
        grid = self._run.previews / folder / "grid.png"
        if grid.exists():
            import numpy as np
            from PIL import Image

            with Image.open(grid) as opened:
                pixels_HWC = np.asarray(opened.convert("RGB"))
            self._writing().add_image("previews", pixels_HWC, step, dataformats="HWC")

    def _writing(self) -> SummaryWriter:
        """The files, begun with the first number: only then is it known from where a run goes on."""
        if self._writer is None:
            folder = str(self._run.path / FOLDER)
            self._writer = self._make(folder, purge_step=self._purge_step, flush_secs=_FLUSH_S)
        return self._writer


plugin = TensorBoard
