"""Libraries that only one optimiser needs: extras of the package, asked for when the optimiser is made."""

from __future__ import annotations

import importlib
from typing import Any

from outsize.base.errors import MachineFault


def library(module: str, package: str, optimizer: str) -> Any:
    """The imported module. package: its name where packages are found.

    Raises: MachineFault saying how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise MachineFault(
            f"the optimizer {optimizer} comes from the package {package}, which is not installed; "
            f"pip install {package}, or pip install 'outsize[optimizers]'"
        ) from error
