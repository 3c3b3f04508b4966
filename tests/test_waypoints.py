"""Waypoints of a start: counted from the process's own beginning, in order, and adding up."""

from __future__ import annotations

import gc
import subprocess
import sys
import time

import pytest

from outsize.base import waypoints as module
from outsize.base.garbage import collection_paused
from outsize.base.waypoints import Waypoints, process_age_s


class Clock:
    """A clock that goes on when it is told to."""

    now = 50.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "perf_counter", made.perf_counter)
    return made


def test_legs_add_up_and_shares_make_one(clock: Clock) -> None:
    points = Waypoints(age_s=0.5, is_whole=True)
    for name, passed in (("Python", 0.0), ("planned", 1.5), ("first step", 6.0)):
        clock.now += passed
        points.mark(name)
    legs = points.legs()
    assert [(one.name, one.at_s, one.seconds) for one in legs] == [
        ("Python", 0.5, 0.5),
        ("planned", 2.0, 1.5),
        ("first step", 8.0, 6.0),
    ]
    assert sum(one.seconds for one in legs) == points.seconds == 8.0
    assert sum(one.share for one in legs) == pytest.approx(1.0)
    assert points.to_json()["legs"][1] == {
        "name": "planned", "at_s": 2.0, "seconds": 1.5, "share": 0.1875,
    }  # fmt: skip


def test_a_waypoint_is_reached_once(clock: Clock) -> None:
    """A base that is opened again later, for pictures, does not move the start."""
    points = Waypoints()
    points.mark("base loaded")
    clock.now += 9
    points.mark("base loaded")
    assert points.seconds == 0.0
    assert not points.is_whole


def test_without_waypoints_there_is_nothing_to_add_up() -> None:
    assert Waypoints().legs() == ()
    assert Waypoints().seconds == 0.0


def test_a_process_is_as_old_as_its_parent_saw_it_begin() -> None:
    """The age holds what passed before Python ran a line; the slack is this test's own waiting for the child."""
    program = (
        "import time; time.sleep(0.3); from outsize.base.waypoints import process_age_s;"
        "print(process_age_s())"
    )
    began = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    seen_s = time.perf_counter() - began
    age_s = float(child.stdout)
    # the system counts in hundredths
    assert 0.3 <= age_s <= seen_s + 0.02


def _fail_to_import() -> None:
    with collection_paused():
        raise ImportError(f"the collector was {gc.isenabled()}")


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_left_as_it_was(*, is_on: bool) -> None:
    """Also when importing fails: a training without it would leak every cycle."""
    if not is_on:
        gc.disable()
    try:
        with pytest.raises(ImportError, match="the collector was False"):
            _fail_to_import()
        assert gc.isenabled() is is_on
    finally:
        gc.enable()


def test_the_age_of_this_process_goes_on() -> None:
    first = process_age_s()
    time.sleep(0.05)
    assert process_age_s() - first > 0.03
