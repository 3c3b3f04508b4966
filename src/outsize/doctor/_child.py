"""The child's side of children.py: runs calls one after the other and writes a line before and after each.

Started as `python -m outsize.doctor._child CALLS REPORT`, two files. It ends after the first call that raises: a device
whose context has failed fails everything after it, and the next call deserves a fresh one.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path

from outsize.base.threads import settle_threads


def main(calls: Path, report: Path) -> int:
    """Run what the file of calls names; 1 when a call raised."""
    settle_threads()
    with report.open("a", encoding="utf-8", buffering=1) as lines:
        for name, target, arguments in json.loads(calls.read_text(encoding="utf-8")):
            lines.write(json.dumps({"begin": name}) + "\n")
            started = time.perf_counter()
            try:
                module, _, function = target.partition(":")
                value = getattr(importlib.import_module(module), function)(*arguments)
            except Exception as error:  # noqa: BLE001 - whatever a kernel raises is what was to be learned
                traceback.print_exc()
                told = {"end": name, "error": f"{type(error).__name__}: {error}"}
                lines.write(json.dumps(told) + "\n")
                return 1
            seconds = time.perf_counter() - started
            lines.write(json.dumps({"end": name, "value": value, "seconds": seconds}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
