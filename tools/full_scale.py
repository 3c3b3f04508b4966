"""Every figure that is claimed of Flux.2-dev at full scale, beside the usual recipe's of the same machine and hour.

    python yardstick.py hf --sides 32 64 > usual.jsonl     # lines with "what": "hf", "side" and "s_per_step"
    python tools/full_scale.py --usual usual.jsonl --cache cache --out out
    python tools/full_scale.py --usual usual.jsonl --cache cache --out out --only fp8 limit

Each case is `outsize bench` in a process of its own; cases of one size and arithmetic share compiled code. A ratio is the
case's seconds per step by those of the usual recipe (bitsandbytes, PEFT, diffusers' checkpointing, resident) at the same size.
The last table sets what was planned beside what was measured, over all cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
PLAN_PEAK, PLAN_STEP = 0.07, 0.20  # shares by which a plan may be off
DISK_SHARE = 0.85  # of the disk's own rate
DISK_HOST_GIB = 4.0
_INEXACT = ("--set", "train.exact=false")
_STREAM = ("--placement", "stream")
_TIGHT = (*_STREAM, "--slots", "2")
_DISK = ("--set", "placement.pinned_bytes=0", "--set", "placement.pageable_bytes=0")


@dataclass(frozen=True, slots=True)
class Case:
    """One row. ratio, peak_gib: what must not be exceeded; None: nothing is asked."""

    name: str
    options: tuple[str, ...]
    side: int = 512
    ratio: float | None = None
    peak_gib: float | None = None

    def command(self, asked: argparse.Namespace) -> list[str]:
        options = (*_INEXACT, "--resolution", str(self.side), *self.options)
        files = ("--cache", str(asked.cache), "--json", str(self.file(asked)))
        return [sys.executable, "-m", "outsize", "bench", asked.model, *options, *files]

    def file(self, asked: argparse.Namespace) -> Path:
        folder: Path = asked.out
        return folder / f"{self.name.replace(' ', '-')}.json"


def _compiled(arithmetic: str, *options: str) -> tuple[str, ...]:
    return ("--compile", "--arithmetic", arithmetic, "--steps", "5", *options)


def _eager(*options: str) -> tuple[str, ...]:
    return ("--eager", "--arithmetic", "bf16", "--rank", "64", "--steps", "3", *options)


CASES = (
    Case("bf16 512 resident", _compiled("bf16", "--placement", "resident"), 512, 0.75),
    Case("bf16 512 streamed", _compiled("bf16", *_TIGHT), 512, 0.92, 6.5),
    Case("bf16 512 mixed", _compiled("bf16", *_STREAM, "--set", "placement.resident_bytes=8GiB")),
    Case("bf16 1024 resident", _compiled("bf16", "--placement", "resident"), 1024),
    Case("bf16 1024 streamed", _compiled("bf16", *_TIGHT), 1024, 0.82),
    Case("bf16 1024 inputs", _compiled("bf16", *_TIGHT, "--offload-inputs"), 1024, 0.86, 6.5),
    Case("fp8 512 resident", _compiled("fp8", "--placement", "resident"), 512, 0.53),
    Case("fp8 1024 streamed", _compiled("fp8", *_TIGHT), 1024, 0.58),
    Case("fp8 1024 inputs", _compiled("fp8", *_TIGHT, "--offload-inputs"), 1024, 0.62, 6.5),
    Case("limit 8", ("--vram-limit", "8GiB", "--compile", "--steps", "43"), 512, 1.0, 8.0),
    Case("limit 24", ("--vram-limit", "24GiB", "--compile", "--steps", "5"), 512, 0.78, 24.0),
    Case("disk 512", _compiled("bf16", *_STREAM, *_DISK, "--warmup", "2"), 512),
    *(
        Case(f"rank64 {side} {name}", _eager(*options), side)
        for side in (512, 1024)
        for name, options in (
            ("resident", ("--placement", "resident")),
            ("streamed", _STREAM),
            ("mixed", (*_STREAM, "--set", "placement.resident_bytes=8GiB")),
        )
    ),
)


def main() -> None:
    """Run what is asked for, then print every table."""
    asked = _arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    chosen = [
        case
        for case in CASES
        if not asked.only or any(word in case.name.split() for word in asked.only)
    ]
    if not asked.merge:
        _run("rates", [sys.executable, "-m", "outsize", "bench", "--rates", "--cache", str(asked.cache),
                       "--json", str(asked.out / "rates.json")], asked)  # fmt: skip
        for case in chosen:
            _run(case.name, case.command(asked), asked)
    usual = _usual(asked.usual)
    rows = [(case, _measured(case, asked)) for case in CASES]
    for case, found in rows:
        if found is not None:
            print(_row(case, found, usual))
    _print_disk(rows, asked)
    _print_plans([(case, found) for case, found in rows if found is not None])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="flux2.dev")
    parser.add_argument(
        "--usual", type=Path, required=True, help="lines of JSON, by side in tokens"
    )
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of cases")
    parser.add_argument("--merge", action="store_true", help="only the tables of what is there")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for each case")
    return parser.parse_args()


def _run(name: str, command: list[str], asked: argparse.Namespace) -> None:
    """One child; what it printed is kept beside its figures."""
    began = time.perf_counter()
    log = asked.out / f"{name.replace(' ', '-')}.txt"
    with log.open("w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(
                command, stdout=stream, stderr=subprocess.STDOUT, check=False, timeout=asked.timeout
            )
            said = "" if done.returncode == 0 else f", exit {done.returncode}"
        except subprocess.TimeoutExpired:
            said = ", stopped: too slow"
    print(f"  {name}: {time.perf_counter() - began:.0f} s{said}", flush=True)


def _usual(path: Path) -> dict[int, float]:
    """Seconds per step by pixels: a side of 32 tokens is 512 pixels."""
    lines = [json.loads(one) for one in path.read_text().splitlines() if one.startswith("{")]
    return {16 * one["side"]: float(one["s_per_step"]) for one in lines if one.get("what") == "hf"}


def _measured(case: Case, asked: argparse.Namespace) -> dict[str, Any] | None:
    """The case as `outsize bench` wrote it; None where it is not there or failed."""
    path = case.file(asked)
    if not path.is_file():
        return None
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return cases[0] if cases and cases[0].get("measured") else None


def _row(case: Case, found: dict[str, Any], usual: dict[int, float]) -> str:
    measured = found["measured"]
    step, peak = measured["step_s"], measured["peak_bytes"] / GIB
    ratio = step / usual[case.side] if case.side in usual else float("nan")
    words = [f"{case.name:20} {step:7.3f} s  {ratio:5.2f}x  {peak:6.2f} GiB"]
    if case.ratio is not None:
        words.append(f"{'meets' if ratio <= case.ratio else 'MISSES'} {case.ratio:.2f}x")
    if case.peak_gib is not None:
        words.append(f"{'meets' if peak <= case.peak_gib else 'MISSES'} {case.peak_gib:.1f} GiB")
    words.append(f"first step {measured['first_step_s']:.1f} s")
    return "  ".join(words)


def _print_disk(rows: list[tuple[Case, dict[str, Any] | None]], asked: argparse.Namespace) -> None:
    """Blocks from disk: their rate by that of the disk, and the process's own memory."""
    rates = asked.out / "rates.json"
    found = next((one for case, one in rows if case.name.startswith("disk")), None)
    if found is None or not rates.is_file():
        return
    known = json.loads(rates.read_text(encoding="utf-8"))["rates"]
    disk = float(known["disk_read_bytes_per_s"])
    measured = found["measured"]
    rate, host = measured["copied_bytes"] / measured["step_s"], measured["private_bytes"] / GIB
    verdicts = [
        "meets" if good else "MISSES" for good in (rate >= DISK_SHARE * disk, host <= DISK_HOST_GIB)
    ]
    print(
        f"disk: {rate / 1e9:.2f} of {disk / 1e9:.2f} GB/s ({verdicts[0]} {DISK_SHARE:.0%}), "
        f"{host:.2f} GiB private ({verdicts[1]} {DISK_HOST_GIB:.0f} GiB)"
    )


def _print_plans(rows: list[tuple[Case, dict[str, Any]]]) -> None:
    print(f"{'plan against measured':20}   peak     step")
    for case, found in rows:
        planned, measured = found["planned"], found["measured"]
        off = [planned[key] / measured[key] - 1 for key in ("peak_bytes", "step_s")]
        good = abs(off[0]) <= PLAN_PEAK and abs(off[1]) <= PLAN_STEP
        print(f"{case.name:20} {off[0]:+7.1%} {off[1]:+8.1%}  {'meets' if good else 'MISSES'}")


if __name__ == "__main__":
    main()
