"""The run folder: one folder holds all of a run, and a lock says who works in it.

runs/NAME/: recipe.json, plan.json, state.json, journal.jsonl, checkpoints/STEP/, previews/STEP/, compare/, samples/,
export/, report.html. Nothing of a run lives anywhere else; the files SAVE_NOW, STOP_NOW and PROVE_NOW, put there by
anybody, are requests to the process that trains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import filelock

from outsize.base.errors import MachineFault
from outsize.base.files import make_folder, remove_temporaries, write_json_atomically

State = Literal["new", "preparing", "running", "stopped", "completed", "failed"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run, its state, and its lock."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def previews(self) -> Path:
        """One folder for each step that was shown."""
        return self.path / "previews"

    @property
    def report(self) -> Path:
        """The page that shows the run."""
        return self.path / "report.html"

    @property
    def save_now(self) -> Path:
        """A file whose presence asks for a checkpoint at the next step boundary."""
        return self.path / "SAVE_NOW"

    @property
    def stop_now(self) -> Path:
        """A file whose presence asks to save and stop at the next step boundary."""
        return self.path / "STOP_NOW"

    @property
    def prove_now(self) -> Path:
        """A file whose presence asks for a proof, at the next step boundary, of where the base's memory lies."""
        return self.path / "PROVE_NOW"

    @property
    def state(self) -> State:
        """What the run was last said to be; "new" when nothing was said."""
        try:
            value = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return "new"
        state: State = value["state"]
        assert state in get_args(State)
        return state

    def set_state(self, state: State, **details: Any) -> None:
        """Say what the run is now."""
        write_json_atomically(self.path / "state.json", {"state": state} | details)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Work alone in this folder, once what killed writers left in its folders is gone.

        Raises: MachineFault when another process does.
        """
        make_folder(self.path)
        lock = filelock.FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise MachineFault(
                f"another process works in {self.path}; wait for it, or stop it with an empty file {self.stop_now}"
            ) from None
        try:
            for folder in filter(Path.is_dir, self.path.iterdir()):
                remove_temporaries(folder)
            yield
        finally:
            lock.release()
