"""What a demo ends with, of pictures or of text: the same four scores, where time went, and what was written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scores:
    """What was learned, by the base and with the adapter; and something else, before and after.

    Pictures: shares of generations, 0..1: those that are cats, and those of other subjects that are recognised. More is
    better. Text: perplexities of a play that was held out, and of modern prose. Less is better.
    """

    base: float
    adapter: float
    control_before: float
    control_after: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a demo made. seconds: by phase, and "total"."""

    seconds: dict[str, float]
    scores: Scores
    paths: dict[str, str]


def to_json(result: DemoResult) -> dict[str, Any]:
    """The object that `outsize demo --json` prints last."""
    return {"seconds": result.seconds, "scores": asdict(result.scores), "paths": result.paths}
