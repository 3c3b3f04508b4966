"""Which code computes: this package, by version and by content, and the libraries beside it."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from pathlib import Path
from typing import Any

import outsize


def provenance() -> dict[str, Any]:
    """Version and digest of this package, and versions of the libraries imported so far, as JSON values."""
    return {
        "version": outsize.__version__,
        "code": code_digest(),
        "python": platform.python_version(),
        "system": platform.system(),
        "libraries": _libraries(),
    }


@functools.cache
def code_digest() -> str:
    """SHA-256 over all of this package's Python files with their names, hexadecimal; lines end alike on every system."""
    root = Path(outsize.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda one: one.relative_to(root).as_posix()):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _libraries() -> dict[str, str]:
    """Versions of what is imported, as each tells its own, the standard library left out."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if "." in name or name in sys.stdlib_module_names or name == outsize.__name__:
            continue
        version = vars(module).get("__version__")  # asking would run some modules' code
        if isinstance(version, str):
            found[name] = str(version)
    return found
