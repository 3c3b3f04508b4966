"""What the test of random kills starts and kills: the command in a process of its own, everything heavy imported before.

Where the system can fork, a server imports once what a training imports, and every child is a copy of it; else each
child imports for itself, which takes most of its time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.cli.main import main

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

    Context = ForkServerContext | SpawnContext

HEAVY = (
    "torch",
    "safetensors.torch",
    "outsize.app.train",
    "outsize.app.encode",
    "outsize.app.previews",
    "outsize.cli.report",
    "diffusers.models.transformers.transformer_flux2",
    "diffusers.models.autoencoders.autoencoder_kl_flux2",
    "transformers.models.mistral3.modeling_mistral3",
)


def context() -> Context:
    """Processes that share what was imported, or on Windows begin anew."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*HEAVY, Path(__file__).stem])
    return found


def train_as_a_child(recipe: Path, log: Path) -> None:
    """`outsize train RECIPE`, what it prints in a file; ends with the command's exit code."""
    with (
        log.open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        code = main(["train", str(recipe)])
    sys.stderr.flush()
    os._exit(code)


def start(processes: Context, recipe: Path, log: Path) -> BaseProcess:
    """The child, begun."""
    child = processes.Process(target=train_as_a_child, args=(recipe, log))
    child.start()
    return child
