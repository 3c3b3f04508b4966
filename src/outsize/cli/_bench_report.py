"""What `outsize bench` says: a row as soon as a case is over, and a file that is whole after every case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize.app.bench import Result
    from outsize.cli._site import Cap
    from outsize.devices._profile import MachineProfile
    from outsize.devices.protocol import Device


class Report:
    """Rows as they come, and the file, which is whole after every case."""

    HEADS = (
        ("case", 46), ("step", 9), ("plan", 9), ("a second", 16), ("peak", 10), ("plan", 10), ("first step", 11),
        ("GB/s", 6), ("hidden", 7),
    )  # fmt: skip

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._is_lines = str(file) == "-"
        self._rows = sys.stderr if self._is_lines else sys.stdout
        self._content: dict[str, Any] = {"rates": {}, "cases": []}
        self._has_head = False

    def say(self, line: str) -> None:
        """One line for the person watching."""
        print(line, file=self._rows, flush=True)

    def open(self, machine: MachineProfile, device: Device, cap: Cap | None) -> None:
        """Note the machine and the versions."""
        self._content = {
            "command": sys.argv[1:],
            "device": {"name": device.name, "kind": device.kind},
            "vram_limit": None if cap is None else cap.to_json(),
            "machine": machine.to_json(),
            **self._content,
        }
        if cap is not None:
            self.say(str(cap))
        self._write()

    def rate(self, name: str, value: float, unit: str) -> None:
        """One rate of the machine."""
        scale = {"TFLOP/s": 1e12, "GB/s": 1e9}.get(unit, 1)
        self.say(f"{name:<32}{value / scale:>10.3g} {unit}")
        self._content["rates"][name] = value
        self._emit({"rate": name, "value": value})

    def case(self, result: Result) -> None:
        """One case as a row, and as JSON."""
        values = result.to_json()
        if not self._has_head:
            self._has_head = True
            self.say(_cells([name for name, _ in self.HEADS], [width for _, width in self.HEADS]))
        self.say(_cells(_row(values), [width for _, width in self.HEADS]))
        self._content["cases"].append(values)
        self._emit(values)

    def _emit(self, values: dict[str, Any]) -> None:
        if self._is_lines:
            print(json.dumps(values), flush=True)
        self._write()

    def _write(self) -> None:
        from outsize.app._bench_rates import versions
        from outsize.base.files import write_json_atomically

        if self._file is not None and not self._is_lines:
            self._content["versions"] = versions()  # of what has been imported by now
            write_json_atomically(self._file, self._content)


def _cells(texts: list[str], widths: list[int]) -> str:
    first, *others = zip(texts, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
    return " ".join(cells).rstrip()


def _row(values: dict[str, Any]) -> list[str]:
    from outsize.base.units import format_bytes, format_seconds

    planned, measured = values["planned"], values["measured"]
    name = _case_name(values)
    if measured is None:
        return [f"{name}: {values['fault']}", *[""] * (len(Report.HEADS) - 1)]
    hidden, planned_s = measured["hidden_share"], planned["step_s"]
    rate = measured["copied_bytes"] / measured["step_s"] / 1e9
    return [
        name,
        format_seconds(measured["step_s"]),
        "-" if planned_s is None else format_seconds(planned_s),
        *_per_second(measured),
        format_bytes(measured["peak_bytes"] or measured["private_bytes"]),
        format_bytes(planned["peak_bytes"]),
        format_seconds(measured["first_step_s"]),
        f"{rate:.1f}" if rate else "-",
        "-" if hidden is None else f"{hidden:.0%}",
    ]


def _per_second(measured: dict[str, Any]) -> list[str]:
    rates = {
        key.removesuffix("_per_s"): one for key, one in measured.items() if key.endswith("_per_s")
    }
    return [
        f"{one:.4g} {unit}" if one < 1000 else f"{one:.0f} {unit}" for unit, one in rates.items()
    ]


def _case_name(values: dict[str, Any]) -> str:
    placement = values["placement"]
    held = placement["kind"]
    num_kept, num_blocks = len(placement["kept_blocks"]), placement["num_blocks"]
    if num_kept < num_blocks:
        held += f" {num_kept}/{num_blocks} kept"
    compute = values["compute"] or {}
    words = [
        f"{values['base']} {values['shape']} r{values['rank']}",
        held,
        str(compute.get("arithmetic", "")),
        "compiled" if compute.get("compiles") else "",
    ]
    return ", ".join(word for word in words if word)
