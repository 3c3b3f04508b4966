"""The real command in a child process that need not import everything again.

Where the system can fork, a server imports once what a training imports, and every child is a copy of it with the
caller's folder, environment and output: a command takes a tenth of a second instead of five. Else each child is an
interpreter of its own. What a fresh start imports, and when, is tested with real ones (tests/test_cli.py).
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.cli.main import main

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

_HEAVY = (
    "torch",
    "safetensors.torch",
    "peft",
    "outsize.app.train",
    "outsize.app.encode",
    "outsize.app.previews",
    "outsize.app.text_corpus",
    "outsize.app.compare",
    "outsize.app.export",
    "outsize.cli.report",
    "diffusers.models.transformers.transformer_flux2",
    "diffusers.models.autoencoders.autoencoder_kl_flux2",
    "transformers.models.mistral3.modeling_mistral3",
    "transformers.models.llama.modeling_llama",
)
_SECONDS = 600  # no command of a test takes as long


def start(
    arguments: list[str], out: Path, err: Path, *, cwd: Path, env: Mapping[str, str]
) -> BaseProcess:
    """`outsize ARGUMENTS` begun; what it says is appended to two files, which may be one."""
    with _modules_found_by_the_server():
        child = _context().Process(target=_run, args=(arguments, out, err, cwd, dict(env)))
        child.start()
    return child


def run(
    arguments: list[str], *, cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """`outsize ARGUMENTS` to its end, as subprocess.run with captured output tells it."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = start(arguments, out, err, cwd=cwd, env=env)
        child.join(_SECONDS)
        if child.exitcode is None:
            child.kill()
            raise subprocess.TimeoutExpired(arguments, _SECONDS)
        texts = [one.read_text(encoding="utf-8") for one in (out, err)]
    return subprocess.CompletedProcess(arguments, child.exitcode, *texts)


def _run(arguments: list[str], out: Path, err: Path, cwd: Path, env: Mapping[str, str]) -> None:
    """What `python -m outsize` does, from where an interpreter has started."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for path, descriptor in ((out, 1), (err, 2)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = ["outsize", *arguments]
    code = 1
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does at the top
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@functools.cache
def _context() -> ForkServerContext | SpawnContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*_HEAVY, Path(__file__).stem])
    return found


@contextlib.contextmanager
def _modules_found_by_the_server() -> Iterator[None]:
    """The server, begun with the first child, finds modules by the environment only."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
