"""Blocks through torch.compile: one graph for each kind of block and way of running it, shared by all blocks of the kind.

Compiling changes rounding, so it is part of what a run is, not of where it runs. It must never give up in silence: a
block that breaks into several graphs, or needs more graphs than allowed, is an error. What was compiled is kept in a folder,
so that the minute it takes is paid once per machine.

Where pictures come in several sizes the number of tokens is compiled as a variable from the start: a graph that depended on
which size came first would make a resumed run differ from an unbroken one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Kinds of blocks x (upwards without a graph, downwards with one) x what a family's arguments vary in; far above what any
# family needs, so reaching it means that something recompiles every time.
_MAX_GRAPHS = 32

_COMPILED_IN = ("layers", "arithmetic", "formats")

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def block_compiler(
    cache: Path, *, is_one_size: bool, backend: str | Callable[..., Any] = "inductor"
) -> Transform:
    """What makes a compiled forward of a block's own.

    cache: folder for compiled code, kept between runs. is_one_size: every pass has the same number of tokens. backend: what
    torch.compile gives its graphs to.
    """
    folder = cache / _own_code_digest()
    # read by inductor and Triton when they are first used
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    import torch._dynamo.config as settings
    import torch._functorch.config as tracing

    # Its keys do not see the code of autograd functions, so torch leaves such graphs out; the folder's name sees ours.
    tracing.autograd_cache_allow_custom_autograd_functions = True

    settings.recompile_limit = _MAX_GRAPHS
    settings.accumulated_recompile_limit = 8 * _MAX_GRAPHS
    settings.fail_on_recompile_limit_hit = True

    def compile_block(forward: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(forward, fullgraph=True, dynamic=not is_one_size, backend=backend)

    return compile_block


def _own_code_digest() -> str:
    """Of all our code that is compiled into a block."""
    package = Path(__file__).parent.parent
    files = (file for name in _COMPILED_IN for file in sorted((package / name).glob("*.py")))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
