"""Libraries that only one optimiser needs: extras of the package, asked for before anything slow begins."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from outsize.base.errors import MachineFault


def library(name: str) -> Any:
    """The imported module; its package has the same name.

    Raises: MachineFault saying how to install it.
    """
    require_library(name)
    return importlib.import_module(name)


def require_library(name: str) -> None:
    """Look for a module without importing it.

    Raises: MachineFault saying how to install it.
    """
    if not _is_there(name):
        raise MachineFault(
            f"the optimizer comes from the package {name}, which is not installed; pip install {name}, "
            "or pip install 'outsize[optimizers]'"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that was put in its place, or None, has no spec
        return False
