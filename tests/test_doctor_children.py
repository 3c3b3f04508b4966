"""Risky calls in children: one that hangs and one that dies are told, and what comes after them is still done."""

import sys
import time
import uuid

import psutil

from outsize.doctor.children import Call, run_calls

SLEEP = Call("hangs", "time:sleep", [600], timeout_s=0.5)


def test_a_hang_and_a_death_take_nothing_with_them() -> None:
    calls = [
        Call("before", "json:loads", ['{"a": 1}']),
        SLEEP,
        Call("dies", "os:abort"),
        Call("raises", "math:sqrt", [-1]),
        Call("leaves", "os:_exit", [7]),
        Call("after", "json:loads", ['{"b": 2}']),
    ]
    started, others = time.monotonic(), _children()  # other tests' fork servers, say
    outcomes = {one.name: one for one in run_calls(calls)}
    assert list(outcomes) == [call.name for call in calls]
    ends = {name: one.end for name, one in outcomes.items()}
    assert ends == {
        "before": "done", "hangs": "hung", "dies": "died", "raises": "raised", "leaves": "died",
        "after": "done",
    }  # fmt: skip
    assert outcomes["before"].value == {"a": 1}
    assert outcomes["after"].value == {"b": 2}
    assert outcomes["hangs"].why == "over 0.5 s"
    assert "ABRT" in outcomes["dies"].why or sys.platform == "win32"
    assert outcomes["leaves"].why == "exit code 7"
    assert outcomes["raises"].why.startswith("ValueError: ")
    assert time.monotonic() - started < 60
    assert not _children() - others


def test_what_a_child_has_started_ends_with_it() -> None:
    """A compiler that a hanging call has started must not go on."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", "import time; time.sleep(30)", mark]
    calls = [Call("hangs", "subprocess:check_call", [command], timeout_s=2.0)]
    assert [one.end for one in run_calls(calls)] == ["hung"]
    deadline = time.monotonic() + 5
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _marked(mark)


def test_what_a_dying_child_said_is_kept() -> None:
    calls = [Call("dies", "faulthandler:_fatal_error_c_thread")]
    (outcome,) = run_calls(calls)
    assert outcome.end == "died"
    assert "Fatal Python error" in outcome.said


def _marked(mark: str) -> list[int]:
    """Processes with that argument, whoever their parent is by now."""
    found = psutil.process_iter(["cmdline", "status"])
    return [
        one.pid
        for one in found
        if mark in (one.info["cmdline"] or ()) and one.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _children() -> set[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return {one for one in found if one.status() != psutil.STATUS_ZOMBIE}
