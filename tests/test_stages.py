"""Where time went: stages within stages are counted once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from outsize.app.stages import Stages
from outsize.base.journal import Journal, read_journal
from outsize.devices.protocol import open_device


def test_seconds_of_nested_stages_add_up_to_the_time_that_passed(tmp_path: Path) -> None:
    """Caching opens an encoder, which is prepared and loaded meanwhile: 0.05 s, 0.1 s and 0.02 s of sleep."""
    journal = Journal(tmp_path / "journal.jsonl")
    stages = Stages(open_device("cpu"), journal)
    began = time.perf_counter()
    with stages.stage("cache"):
        time.sleep(0.05)
        with stages.stage("prepare"), stages.stage("hash"):
            time.sleep(0.1)
        with stages.stage("load"):
            time.sleep(0.02)
    passed = time.perf_counter() - began
    seconds = stages.seconds()
    journal.close()
    assert list(seconds) == ["hash", "prepare", "load", "cache"]
    assert sum(seconds.values()) <= passed + 0.004  # each is rounded to a millisecond
    assert seconds["hash"] >= 0.1
    assert seconds["load"] >= 0.02
    assert 0.05 <= seconds["cache"] <= passed - 0.12 + 0.001
    written = [one["seconds"] for one in read_journal(tmp_path / "journal.jsonl")]
    assert written == list(seconds.values())


def test_a_stage_that_fails_is_not_finished_and_leaves_the_next_one_right(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    stages = Stages(open_device("cpu"), journal)
    with pytest.raises(ValueError, match="broken"), stages.stage("one"), stages.stage("two"):
        raise ValueError("broken")
    assert stages.finished == []
    with stages.stage("three"):
        time.sleep(0.02)
    journal.close()
    assert stages.finished[0].seconds >= 0.02
