"""`outsize doctor`: facts, checks and rules of this machine together; what plans can use of it is kept.

Everything that touches a device runs in child processes; this one never imports torch.
"""

from __future__ import annotations

import datetime as dt
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outsize.app.planning import machine_here
from outsize.base.errors import MachineFault
from outsize.base.files import make_folder, write_json_atomically
from outsize.devices._card_lock import lending_card
from outsize.devices._profile import MachineProfile
from outsize.devices._rates import TABLE, rates_folder, rates_of
from outsize.devices._sensors import CardId
from outsize.devices.protocol import DEVICES
from outsize.doctor.checks import PROBES, Check, Probe, Status, Values, Verdict, measured_confidence
from outsize.doctor.children import Call, Outcome, run_calls
from outsize.doctor.facts import Facts
from outsize.doctor.gather import gather_facts, page_files
from outsize.doctor.rules import Finding, Judgement, judge, known_rules, recommended
from outsize.doctor.standing import standing_checks

CPU = "cpu"
REPORT_NAME = "doctor.json"
# Of what the table of cards expects: below it a card is throttled, shared or not the card that it says it is.
_RATE_SHARE = 0.5
_DISK_WANTED = 0.5e9  # bytes per second: a SATA drive; the first start of a 32B base then takes half a minute longer
# Of the way that fp32 moments lead: 3.9 % on a processor, for gradients of many sizes; a wrong kernel leads elsewhere.
_DIFFERENCE_LIMIT = 0.08
_OPTIMIZER = "adamw8bit"


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found of a machine. kept: the file that holds it; plans read the rates beside it."""

    facts: Facts
    machine: MachineProfile
    checks: tuple[Check, ...]
    judgement: Judgement
    seconds: float
    kept: Path

    @property
    def failed(self) -> list[Check]:
        """What training cannot do without and did not get."""
        return [one for one in self.checks if one.status == "fail"]

    def require_health(self) -> None:
        """Raise what the exit code comes from.

        Raises: MachineFault naming every needed check that failed, with its remedy.
        """
        if self.failed:
            told = "; ".join(f"{one.id}: {one.measured}. {one.remedy}" for one in self.failed)
            raise MachineFault(
                f"{len(self.failed)} of {len(self.checks)} checks failed that training needs: {told}"
            )

    def to_json(self) -> dict[str, Any]:
        """As JSON values; numbers that are none become words."""
        whole = {
            "machine": self.machine.to_json(),
            "facts": self.facts.to_json(),
            "checks": [one.to_json() for one in self.checks],
            **rules_json(self.judgement, self.facts),
            "seconds": self.seconds,
            "kept": str(self.kept),
        }
        cleaned = _finite(whole)
        assert isinstance(cleaned, dict)
        return cleaned


def judge_rules(facts: Facts, checks: Sequence[Check] = ()) -> Judgement:
    """What the rules say today, with what was measured."""
    measured = {one.id: one.passed for one in checks if one.passed is not None}
    return judge(known_rules(), facts, today=dt.datetime.now(tz=dt.UTC).date(), measured=measured)


def rules_json(judgement: Judgement, facts: Facts) -> dict[str, Any]:
    """Findings, undecided rules and the recommended environment."""
    return {
        "findings": [one.to_json() for one in judgement.findings],
        "undecided": list(judgement.undecided),
        "environment": [
            {"name": one.name, "value": one.value or None, "is_so": one.is_so, "rule": one.finding.rule.id}
            for one in recommended(judgement.findings, facts)
        ],
    }  # fmt: skip


def examine(
    *, device_kind: str | None, cache: Path | None, told: Callable[[Check], None]
) -> Examination:
    """Examine this machine. cache: whose disk is measured; None: this user's cache folder. told: of each check as it ends.

    Raises: RecipeError when no device is called so; MachineFault when nothing can be written where results are kept.
    """
    if device_kind is not None and device_kind not in DEVICES.names():
        DEVICES.load(device_kind)  # says which there are
    started = time.monotonic()
    facts = gather_facts()
    if device_kind == CPU:
        facts = _without_card(facts)
    folder = cache or rates_folder()
    for one, remedy in (
        (folder, "name another with --cache"),
        (rates_folder(), "set XDG_CACHE_HOME (on Windows LOCALAPPDATA)"),
    ):
        _require_writable(one, remedy)
    machine = machine_here(folder, device_kind=device_kind)
    checks = []

    def note(check: Check) -> None:
        checks.append(check)
        told(check)

    for check in standing_checks(facts, page_files=page_files()):
        note(check)
    for check in _measured(facts, machine, device_kind, folder):
        note(check)
    kept = rates_folder() / REPORT_NAME
    judgement = judge_rules(facts, checks)
    seconds = time.monotonic() - started
    examination = Examination(facts, machine, tuple(checks), judgement, seconds, kept)
    write_json_atomically(kept, examination.to_json())
    return examination


def _require_writable(folder: Path, remedy: str) -> None:
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MachineFault(
            f"{folder} cannot be written ({error}), so neither a disk's rate nor a report could be; {remedy}"
        ) from error


def _measured(
    facts: Facts, machine: MachineProfile, kind: str | None, folder: Path
) -> Iterator[Check]:
    """Checks that run in children, one by one; the disk's is read from the rates."""
    has_card = facts.vendor in {"nvidia", "amd"}
    probes = [*PROBES, _OPTIMIZER_PROBE, _rates_probe(machine)]
    more: dict[str, tuple[Any, ...]] = {
        "optimizer": (_OPTIMIZER,),
        "rates": (str(folder), machine.device),
    }
    calls = [
        one.call(kind, *more.get(one.id, ())) for one in probes if has_card or not one.for_cards
    ]
    with _card_lent(kind, has_card=has_card) as environment:
        outcomes = run_calls(calls, environment)
        closed = ""
        for probe in probes:
            if closed:
                yield probe.skipped(closed)
                continue
            if probe.for_cards and not has_card:
                yield probe.skipped("no card: a processor trains eagerly, from its own memory")
                continue
            outcome = next(outcomes)
            yield probe.judged(outcome, facts)
            if probe.id == "device" and outcome.end != "done":
                closed = "no device opened: see check `device`"  # whatever else needs one would say the same
            if probe.id == "rates" and outcome.end == "done":
                yield _disk_check(outcome, facts, folder)


@contextmanager
def _card_lent(kind: str | None, *, has_card: bool) -> Iterator[dict[str, str]]:
    """The card held for the children, so that none of them waits for it within its time; what tells them so.

    Which card it is only torch knows, which this process does not import; where it cannot tell, check `device` says why.
    """
    outcome = None
    if has_card:
        (outcome,) = run_calls([Call("card", "outsize.doctor.probes:card", (kind,))])
    found = outcome.value.get("card") if outcome is not None and outcome.end == "done" else None
    with lending_card(
        CardId(**found) if found else None, str(outcome.value["name"]) if found and outcome else ""
    ) as environment:
        yield environment


def _without_card(facts: Facts) -> Facts:
    """The same machine as if its card were not there, as --device cpu has it."""
    return replace(facts, vendor="none", arch=None, num_devices=0, vram_bytes=None)


def _judge_optimizer(values: Values, facts: Facts) -> Verdict:
    del facts
    is_right = values["difference"] <= _DIFFERENCE_LIMIT and "uint8" in values["state_types"]
    measured = f"{values['difference']:.1%} from fp32 after {values['steps']} steps, state in {', '.join(values['state_types'])}"
    wanted = f"{_DIFFERENCE_LIMIT:.0%} at most, state in uint8"
    return ("pass" if is_right else "fail"), measured, wanted


_OPTIMIZER_PROBE = Probe(
    "optimizer",
    "outsize.app._doctor_probes:eight_bit_optimizer",
    _judge_optimizer,
    "update bitsandbytes, or train with `optimizer: adamw`",
    is_needed=False,
)


def _rates_probe(machine: MachineProfile) -> Probe:
    expected = rates_of(machine)

    def judge_rate(values: Values, facts: Facts) -> Verdict:
        del facts
        name = "matmul_flops.bf16"
        measured = f"products {values[name] / 1e12:.3g} TFLOP/s, memory {values['device_memory_bytes_per_s'] / 1e9:.3g} GB/s"
        if "bus_bytes_per_s" in values:
            measured += f", bus {values['bus_bytes_per_s'] / 1e9:.3g} GB/s"
        if expected.origin("matmul_flops") != TABLE:
            return "pass", measured, "nothing: the table of cards does not know it"
        wanted = _RATE_SHARE * expected.matmul_flops["bf16"]
        status: Status = "pass" if values[name] >= wanted else "warn"
        return (
            status,
            measured,
            f"products at {wanted / 1e12:.3g} TFLOP/s, half of what such a card reaches",
        )

    remedy = "look at clocks, power limit and temperature, and at what else runs on the card"
    target = "outsize.app._doctor_probes:rates"
    return Probe("rates", target, judge_rate, remedy, is_needed=False, timeout_s=180.0)


def _disk_check(outcome: Outcome, facts: Facts, folder: Path) -> Check:
    read, write = (
        outcome.value[name] for name in ("disk_read_bytes_per_s", "disk_write_bytes_per_s")
    )
    is_fast = read >= _DISK_WANTED
    confidence = measured_confidence(facts)
    if facts.os != "linux":
        confidence += "; read back from the page cache, which cannot be told to forget here"
    return Check(
        "disk",
        "pass" if is_fast else "warn",
        f"read {read / 1e9:.2f} GB/s, written {write / 1e9:.2f} GB/s in {folder}",
        f"read at {_DISK_WANTED / 1e9:g} GB/s or more",
        "" if is_fast else "put `cache` on an SSD",
        confidence,
        is_needed=False,
        seconds=0.0,
        values={"disk_read_bytes_per_s": read, "disk_write_bytes_per_s": write},
    )


def _finite(value: Any) -> Any:
    """The same with what JSON cannot hold as words."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def unread_variables(findings: Sequence[Finding]) -> list[Finding]:
    """Findings about variables that nothing reads."""
    return [one for one in findings if one.rule.unread and one.status != "unknown"]
