"""A whole recipe on disk: tiny model folder, pictures with captions, YAML; and ways to run it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import child_commands
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from tiny import write_tiny

from outsize.app.planning import plan_here
from outsize.app.site import Site, open_site
from outsize.app.train import Trained, train
from outsize.base.journal import read_journal
from outsize.base.progress import Silent
from outsize.devices.protocol import open_device
from outsize.recipes.load import load_recipe
from outsize.runs.checkpoint import all_checkpoints
from outsize.runs.folder import RunFolder

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_COLOURS = ("red", "green", "blue", "black", "white", "orange")


def write_pictures(
    folder: Path, num_pictures: int = 5, *, size: tuple[int, int] = (48, 48)
) -> Path:
    """Pictures of one colour each, with a caption beside each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_pictures):
        colour = _COLOURS[number % len(_COLOURS)]
        wide = (size[0] * 2, size[1]) if number % 3 == 2 else size
        Image.new("RGB", wide, colour).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"a {colour} picture", encoding="utf-8")
    return folder


def write_recipe(
    folder: Path, family: str = "flux2", *, model: Path | None = None, **changes: Mapping[str, Any]
) -> Path:
    """A recipe for the tiny variant; sections in `changes` are merged over the defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    if model is None:
        model = write_tiny(family, "tiny", folder / "model")
    if not (folder / "pictures").exists():
        write_pictures(folder / "pictures")
    recipe: dict[str, Any] = {
        "name": "run",
        "base": {"family": family, "variant": "tiny", "source": str(model)},
        "data": {"resolution": 64, "caption_dropout": 0.2, "sets": [{"folder": "pictures"}]},
        "adapter": {"rank": 4},
        "train": {"steps": 6, "learning_rate": 1.0e-2, "seed": 5, "exact": True},
        "checkpoints": {"every": 2, "keep": 20},
        "compare": {"prompts": ["a red picture"], "controls": ["a blue picture"], "steps": 2},
        "cache": "cache",
    }
    for section, values in changes.items():
        old = recipe.get(section)
        recipe[section] = {**old, **values} if isinstance(old, dict) else values
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@contextmanager
def site_of(recipe: Path, device: str = "cpu") -> Iterator[tuple[Site, RunFolder]]:
    """A site in this process, silent."""
    loaded = load_recipe(recipe)
    run = RunFolder(loaded.run_folder())
    plan = plan_here(loaded, device_kind=device)
    with open_site(loaded, run, plan, open_device(device), Silent()) as site:
        yield site, run


def train_here(recipe: Path, device: str = "cpu") -> tuple[Trained, RunFolder]:
    """Train in this process."""
    with site_of(recipe, device) as (site, run):
        return train(site, run, lambda _report: None), run


def adapter_of(run: RunFolder, step: int | None = None) -> dict[str, torch.Tensor]:
    """The adapter of the newest checkpoint, or of one step."""
    folder = (
        all_checkpoints(run.checkpoints)[0] if step is None else run.checkpoints / f"{step:08d}"
    )
    return load_file(folder / "adapter.safetensors")


def checkpoint_bytes(run: RunFolder) -> dict[str, bytes]:
    """Every file of the newest checkpoint, byte for byte."""
    folder = all_checkpoints(run.checkpoints)[0]
    return {one.name: one.read_bytes() for one in sorted(folder.iterdir())}


def outsize(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The real command in a child process; see child_commands."""
    words = [str(one) for one in arguments]
    return child_commands.run(words, cwd=cwd or Path.cwd(), env=environment())


def outsize_started(*arguments: str | Path, log: Path) -> BaseProcess:
    """The real command in a child process, begun; all that it says is appended to a file."""
    words = [str(one) for one in arguments]
    return child_commands.start(words, log, log, cwd=Path.cwd(), env=environment())


def killed_after_step(step: int, recipe: Path, *options: str) -> None:
    """`outsize train` killed once a step of it is done."""
    child = outsize_started("train", recipe, *options, log=recipe.with_suffix(".log"))
    wait_for_step(child, RunFolder(load_recipe(recipe).run_folder()).journal, step)
    assert child.exitcode is None, f"it ended before step {step} was seen"
    child.kill()
    child.join()


def wait_for_step(child: BaseProcess, journal: Path, step: int) -> None:
    """Until a training has done a step, or has ended."""
    deadline = time.monotonic() + 120
    while child.exitcode is None:
        steps = [one["step"] for one in read_journal(journal) if one["event"] == "step"]
        if steps and steps[-1] >= step:
            return
        assert time.monotonic() < deadline, f"no step {step} within two minutes"
        child.join(0.005)


def command(*arguments: str | Path) -> list[str]:
    """The command line of the real command."""
    return [sys.executable, "-m", "outsize", *map(str, arguments)]


def environment() -> dict[str, str]:
    """This environment, one thread, the package as it is imported here."""
    import outsize as package

    source = str(Path(package.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
