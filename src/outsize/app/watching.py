"""What a run does now, from its folder alone: the journal, its state, and whether its process lives. No torch, no card.

The training process reads the sensors and writes them to the journal (`app/sensing.py`); who watches reads that, so that any
number of people may watch without one more question to the card. A run that has ended or was killed shows its last words.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from outsize.app.report.history import finite, read_json, whole
from outsize.base.journal import JournalTail
from outsize.runs.folder import RunFolder
from outsize.runs.process import ProcessId

Doing = Literal[
    "new", "preparing", "training", "silent", "killed", "stopped", "completed", "failed"
]

_LAST_STEPS = 32  # of which losses and seconds are taken together
_OF_TRAINING = ("residency", "sensors", "stall", "failed")  # what the next training makes old
# Without a word for so long a process on another host is not believed to live: sensors speak every 10 s.
_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class View:
    """One look at a run; None: unknown. ages are seconds since it was told.

    loss_mean, step_s: mean and median of the last steps. left_s: at that pace. sensors: as `devices/_sensors.py` names them.
    memory: bytes by owner, as far as anybody told. proof: the last one. stall: the last one since the training began.
    """

    doing: Doing
    age_s: float | None = None
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    loss_mean: float | None = None
    step_s: float | None = None
    last_step_s: float | None = None
    left_s: float | None = None
    device: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)
    card_used_bytes: int | None = None
    card_total_bytes: int | None = None
    host_bytes: int | None = None
    spilled_bytes: int | None = None
    bus_bytes_per_s: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    temperature_c: float | None = None
    busy: float | None = None
    sensors_age_s: float | None = None
    unknown: Sequence[str] = ()
    proof: Mapping[str, Any] = field(default_factory=dict)
    stall: str = ""
    last_words: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come by itself."""
        return self.doing in {"killed", "stopped", "completed", "failed"}

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class Watcher:
    """Looks at one run, again and again; only what is new in the journal is read.

    num_answers: how many proofs that were asked for were given so far.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run, self._tail = run, JournalTail(run.journal)
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=_LAST_STEPS)
        self._last: dict[str, Mapping[str, Any]] = {}  # the newest event of each kind
        self._process: ProcessId | None = None  # that opened the run last
        self._trainer: ProcessId | None = None  # that trained last
        self._newest: Mapping[str, Any] = {}
        self.num_answers = 0

    def look(self) -> View:
        """The run now."""
        for event in self._tail.new():
            self._see(event)
        now = time.time()
        step = self._steps[-1] if self._steps else {}
        seconds = _known(self._steps, "seconds")
        losses = _known(self._steps, "loss")
        step_s = statistics.median(seconds) if seconds else None
        number, num_steps = whole(step.get("step")), self._num_steps()
        doing = self._doing(now)
        left = None
        if (
            doing == "training"
            and step_s is not None
            and number is not None
            and num_steps is not None
        ):
            left = step_s * max(0, num_steps - number)
        proof = self._last.get("residency", {})
        return View(
            doing=doing,
            age_s=_age(self._newest, now),
            step=number,
            num_steps=num_steps,
            loss=finite(step.get("loss")),
            loss_mean=statistics.fmean(losses) if losses else None,
            step_s=step_s,
            last_step_s=finite(step.get("seconds")),
            left_s=left,
            device=str(self._last.get("device", {}).get("name", "")),
            proof={**proof, "age_s": _age(proof, now)} if proof else {},
            stall=str(self._last.get("stall", {}).get("what", "")),
            last_words=self._last_words(doing),
            **self._sensed(now),
        )

    def _see(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        self._newest = event
        if kind == "device":
            self._process = ProcessId.of_json(event.get("process"))
        if kind == "identity":
            self._trainer = self._process
            self._steps.clear()
            for name in _OF_TRAINING:
                self._last.pop(name, None)
        if kind == "step":
            self._steps.append(event)
        elif isinstance(kind, str):
            self._last[kind] = event
        if kind == "residency" and event.get("moment") == "asked":
            self.num_answers += 1

    def _doing(self, now: float) -> Doing:
        state = self._run.state
        if state not in {"preparing", "running"}:
            return state  # type: ignore[return-value] # the rest of the states are told as they are
        who = self._trainer if state == "running" else self._process
        alive = None if who is None else who.is_alive()
        if alive is None:
            age_s = _age(self._newest, now)
            alive = age_s is not None and age_s < _SILENCE_S
            if not alive:
                return "silent"
        if not alive:
            return "killed"
        return "preparing" if state == "preparing" else "training"

    def _num_steps(self) -> int | None:
        recipe = read_json(self._run.recipe)
        train = recipe.get("train") if isinstance(recipe, dict) else None
        return whole(train.get("steps")) if isinstance(train, dict) else None

    def _sensed(self, now: float) -> dict[str, Any]:
        """What the last reading of the sensors says, by field of View."""
        told = self._last.get("sensors", {})
        process = told.get("process")
        process = process if isinstance(process, Mapping) else {}
        names = (
            "power_w",
            "power_limit_w",
            "clock_mhz",
            "temperature_c",
            "busy",
            "bus_bytes_per_s",
        )
        whys = [one.get("why") for one in (told, process)]
        return {
            **{name: finite(told.get(name)) for name in names},
            "memory": _memory(told, process),
            "card_used_bytes": whole(told.get("used_bytes")),
            "card_total_bytes": whole(told.get("total_bytes")),
            "host_bytes": whole(told.get("host_bytes")),
            "spilled_bytes": whole(process.get("host_bytes")),
            "sensors_age_s": _age(told, now),
            "unknown": tuple(dict.fromkeys(str(why) for why in whys if why)) if told else (),
        }

    def _last_words(self, doing: Doing) -> str:
        if doing == "failed":
            failed = self._last.get("failed", {})
            return f"{failed.get('error', '')}: {failed.get('message', '')}".strip(": ")
        return ""


def _memory(told: Mapping[str, Any], process: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the device by owner: those that were listed, what else is given out, kept unused, and the driver's."""
    owners = told.get("owners")
    found = {
        str(name): size
        for name, size in (owners.items() if isinstance(owners, Mapping) else ())
        if whole(size) is not None
    }
    given, kept, all_ = (
        whole(one)
        for one in (
            told.get("allocated_bytes"),
            told.get("reserved_bytes"),
            process.get("card_bytes"),
        )
    )
    if not given or kept is None:  # the host's memory: nobody gives it out for us
        return found
    listed = sum(found.values())
    found["activations and others"] = max(0, given - listed)
    found["kept unused"] = max(0, kept - given)
    if all_ is not None:
        found["driver's context"] = max(0, all_ - kept)
    return found


def _known(
    events: Sequence[Mapping[str, Any]] | deque[Mapping[str, Any]], name: str
) -> list[float]:
    return [value for one in events if (value := finite(one.get(name))) is not None]


def _age(event: Mapping[str, Any], now: float) -> float | None:
    told = finite(event.get("time"))
    return None if told is None else max(0.0, round(now - told, 1))
