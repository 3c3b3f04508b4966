"""Run folders as a training would leave them, written in a moment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from outsize.base.journal import Journal
from outsize.runs.folder import RunFolder

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)
EVIL_ATTRIBUTE = "\" onmouseover=\"document.title='owned'\" x='"


def step_event(step: int, loss: float | None = None, **changes: Any) -> dict[str, Any]:
    """What the loop writes of a step; the parts of its seconds add up."""
    loss = 0.3 + math.exp(-step / 50) / 2 if loss is None else loss
    return {
        "step": step,
        "loss": loss,
        "grad_norm": 1 + 0.1 * math.sin(step),
        "learning_rate": 1e-4,
        "seconds": 0.5,
        "compute_s": 0.4,
        "copy_wait_s": 0.075,
        "host_s": 0.025,
    } | changes


def write_session(
    run: RunFolder, steps: Iterable[int], *, resumed: int | None = None, end: str | None = None
) -> None:
    """A start and the steps that it takes, appended to the journal."""
    journal = Journal(run.journal)
    journal.write("device", kind="cuda", name="A card", compute="torch.bfloat16")
    journal.write("stage", name="load base", seconds=3.0, device_bytes=3 << 30, host_bytes=1 << 30)
    journal.write(
        "identity", recipe="a1" * 32, numbers="b2" * 32, base="c3" * 20, manifest="d4" * 32,
        code="e5" * 32, version="0.1.0", computed_by="cuda", python="3.12.1", system="Linux",
        libraries={"torch": "2.9.1", **{f"library{n}": f"1.{n}.0" for n in range(40)}},
    )  # fmt: skip
    if resumed is not None:
        journal.write("resumed", step=resumed)
    legs = [
        {"name": "torch imported", "at_s": 2.0, "seconds": 2.0, "share": 0.4},
        {"name": "first step done", "at_s": 5.0, "seconds": 3.0, "share": 0.6},
    ]
    journal.write("boot", seconds=5.0, legs=legs)
    for step in steps:
        journal.write("step", **step_event(step))
        if step % 10 == 1:
            journal.write(
                "memory",
                step=step,
                device_bytes=4 << 30,
                reserved_bytes=5 << 30,
                host_bytes=1 << 30,
            )
    journal.write("stage", name="train", seconds=50.0, device_bytes=4 << 30, host_bytes=1 << 30)
    if end is not None:
        journal.write(end, step=1)
    journal.close()


def write_run(
    folder: Path, num_steps: int = 120, *, said: str = "a fox", previews: int = 3
) -> RunFolder:
    """A whole run: recipe, plan, journal, previews, a comparison. said: what its people wrote everywhere."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    recipe = {
        "name": "run",
        "base": {"family": "flux2", "variant": "dev", "source": f"{Path.home()}/models/{said}"},
        "train": {"steps": num_steps},
        "compare": {"prompts": [said]},
    }
    run.recipe.write_text(json.dumps(recipe), encoding="utf-8")
    items = [
        {"owner": "blocks kept", "pool": "device", "num_bytes": 3 << 30, "why": "56 packed blocks"},
        {"owner": "context", "pool": "device", "num_bytes": 700 << 20, "why": "of the driver"},
        {"owner": "program", "pool": "private", "num_bytes": 700 << 20, "why": "Python"},
    ]
    phases = [
        {"name": name, "device_bytes": 1, "items": items} for name in ("train step", "train update")
    ]
    plan = {"phases": phases, "notes": [said], "placement": {"why": "all blocks fit"}}
    run.plan.write_text(json.dumps(plan), encoding="utf-8")
    write_session(run, range(1, num_steps + 1), end="completed")
    journal = Journal(run.journal)
    journal.write("warning", step=1, what=said)
    journal.write("evaluated", what="base", step=0, loss=0.7)
    journal.write("evaluated", what="adapter", step=num_steps, loss=0.5)
    journal.close()
    run.set_state("completed", step=num_steps)
    for number in range(previews):
        step = number * num_steps // max(1, previews - 1)
        one = run.previews / f"{step:08d}"
        one.mkdir(parents=True)
        Image.new("RGB", (1200, 400), (60 * number, 90, 160)).save(one / "grid.png")
        values = {"step": step, "pictures": [{"prompt": said, "seed": 0, "file": "000.png"}]}
        (one / "preview.json").write_text(json.dumps(values), encoding="utf-8")
    compared = run.path / "compare" / "001"
    compared.mkdir(parents=True)
    Image.new("RGB", (300, 200), (200, 160, 90)).save(compared / "grid.png")
    return run
