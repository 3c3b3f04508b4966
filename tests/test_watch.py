"""`outsize watch`: runs that train, have ended or were killed, by the real command; and what it makes of a card's journal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_support import (
    command,
    environment,
    outsize,
    outsize_started,
    train_here,
    wait_for_step,
    write_recipe,
)

from outsize.app.watching import Watcher
from outsize.base.journal import Journal, read_journal
from outsize.cli.watch import line_of, rows_of
from outsize.recipes.load import load_recipe
from outsize.runs.folder import RunFolder
from outsize.runs.process import ProcessId

GIB = 1 << 30
SENSORS: dict[str, Any] = {
    "step": 2, "source": "NVML", "power_w": 312.4, "power_limit_w": 450.0, "clock_mhz": 2520.0,
    "max_clock_mhz": 3105.0, "memory_clock_mhz": 10501.0, "temperature_c": 64.0, "busy": 0.98,
    "memory_busy": 0.41, "used_bytes": 22 * GIB, "total_bytes": 24 * GIB, "why": "",
    "process": {"source": "NVML", "card_bytes": 21 * GIB, "host_bytes": None, "evicted_ms": None, "why": ""},
    "owners": {"blocks": 16 * GIB, "optimiser": GIB}, "allocated_bytes": 19 * GIB, "reserved_bytes": 20 * GIB,
    "host_bytes": 3 * GIB, "bus_bytes_per_s": 11.2e9,
}  # fmt: skip


class Made:
    """A run folder of a card, written as the trainer writes it."""

    def __init__(self, folder: Path, process: ProcessId) -> None:
        self.run = RunFolder(folder)
        self.journal = Journal(self.run.journal)
        recipe = load_recipe(write_recipe(folder.parent, name=folder.name, train={"steps": 40}))
        self.run.recipe.write_text(json.dumps(recipe.to_json()), encoding="utf-8")
        self.begin(process)

    def begin(self, process: ProcessId) -> None:
        self.journal.write("device", kind="cuda", name="RTX 4090", process=process.to_json())
        self.run.set_state("preparing")

    def train(self) -> None:
        self.journal.write("identity", recipe="x")
        self.run.set_state("running")
        told = {
            "moment": "loaded",
            "step": 0,
            "verdict": "on the card",
            "is_well": True,
            "told": "all of it",
        }
        self.journal.write("residency", **told)

    def steps(self, first: int, last: int, seconds: float = 0.5) -> None:
        for number in range(first, last + 1):
            self.journal.write("step", step=number, loss=1 / number, seconds=seconds)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    run = Made(tmp_path / "dog", ProcessId.own())
    yield run
    run.journal.close()


def shown(made: Made) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for label, text in rows_of(Watcher(made.run).look(), "dog"):
        found.setdefault(label, []).append(text)
    return found


# --- what is shown -------------------------------------------------------------------------------


def test_a_stall_is_shown_until_a_fresh_process_trains(made: Made) -> None:
    """A run that goes on slowly looks well from its loss alone."""
    made.train()
    made.steps(1, 3)
    made.journal.write("stall", what="clock at its floor: 41 MHz")
    assert shown(made)["stalled"] == ["clock at its floor: 41 MHz"]
    assert line_of(Watcher(made.run).look()).startswith("training, stalled, step 3 of 40")
    made.train()
    assert "stalled" not in shown(made)


def test_a_card_that_trains_is_shown_whole(made: Made) -> None:
    """Memory adds up: 19 GiB given out of which 17 are listed, 20 kept, 21 counted by the system."""
    made.train()
    made.steps(1, 10)
    made.journal.write("sensors", **SENSORS)
    view = Watcher(made.run).look()
    assert (view.doing, view.step, view.num_steps, view.step_s, view.left_s) == (
        "training",
        10,
        40,
        0.5,
        15.0,
    )
    assert view.loss_mean == pytest.approx(sum(1 / n for n in range(1, 11)) / 10)
    assert view.memory == {
        "blocks": 16 * GIB, "optimiser": GIB, "activations and others": 2 * GIB, "kept unused": GIB,
        "driver's context": GIB,
    }  # fmt: skip
    assert sum(view.memory.values()) == 21 * GIB
    rows = shown(made)
    assert rows["dog"][0].startswith("training, step 10 of 40")
    assert rows["device"] == ["RTX 4090, 312 of 450 W, 2520 MHz, 64 C, 98% busy"]
    assert "blocks 16.0 GiB" in rows["memory"][0]
    assert "all programs 22.0 GiB of 24.0 GiB" in rows["memory"][0]
    assert rows["host"] == ["3.0 GiB, copied to the card at 11.2 GB/s"]
    assert rows["residency"][0].startswith("on the card (loaded, step 0, ")
    assert "unknown" not in rows
    line = line_of(view)
    assert line.startswith("training, step 10 of 40, loss 0.1000")
    assert "\n" not in line


def test_what_nobody_told_is_unknown_and_never_a_number(made: Made) -> None:
    """0 W or 0 bytes would look like a stalled card, or like one that was left alone."""
    made.train()
    made.steps(1, 1)
    process = {
        "source": "NVML",
        "card_bytes": None,
        "host_bytes": None,
        "evicted_ms": None,
        "why": "under WDDM",
    }
    silent = dict.fromkeys(
        ("power_w", "power_limit_w", "clock_mhz", "temperature_c", "busy", "used_bytes")
    )
    told = {
        **SENSORS,
        **silent,
        "process": process,
        "why": "NVML does not tell: power",
        "bus_bytes_per_s": None,
    }
    made.journal.write("sensors", **told)
    rows = shown(made)
    assert rows["device"] == ["RTX 4090"]
    assert rows["unknown"] == ["NVML does not tell: power", "under WDDM"]
    assert "driver's context" not in rows["memory"][0]
    assert not re.search(r"\b0 (W|MHz|C|B)\b", str(rows))


def test_a_failed_proof_is_told_whole(made: Made) -> None:
    made.train()
    told = "residency: off the card: 1 GiB ...: block 3 (blocks, 1.0 GiB) is read at 24 GB/s"
    made.journal.write(
        "residency", moment="slow step", step=9, verdict="off the card", is_well=False, told=told
    )
    (row,) = shown(made)["residency"]
    assert told in row
    assert "slow step, step 9" in row


def test_a_run_without_readings_says_so(made: Made) -> None:
    """A run of an older release, or one that is still preparing."""
    rows = shown(made)
    assert rows["dog"][0].startswith("preparing")
    assert rows["loss"] == rows["pace"] == rows["memory"] == rows["host"] == ["unknown"]
    assert rows["residency"] == ["not proved yet"]


def test_a_resumed_run_counts_its_own_steps(made: Made) -> None:
    """The pace of yesterday's card is not today's."""
    made.train()
    made.steps(1, 20, seconds=9.0)
    watcher = Watcher(made.run)
    assert watcher.look().step_s == 9.0
    made.begin(ProcessId.own())
    made.train()
    made.steps(16, 18, seconds=0.5)
    view = watcher.look()
    assert (view.step, view.step_s, view.left_s) == (18, 0.5, 11.0)


def test_torn_and_foreign_lines_are_passed_over(made: Made) -> None:
    made.train()
    made.steps(1, 2)
    with made.run.journal.open("a", encoding="utf-8") as file:
        file.write(
            '{"event": "sensors", "power_w": "much", "owners": 3, "process": 4, "time": "now"}\n'
        )
        file.write('{"event": "step", "step": "x", "loss": NaN}\n[1]\n{"event": 5}\n{"torn": \n')
    view = Watcher(made.run).look()
    assert (view.power_w, view.memory, view.sensors_age_s) == (None, {}, None)
    assert view.loss is None
    json.dumps(view.to_json(), allow_nan=False)


# --- whether it lives ----------------------------------------------------------------------------


def dead_process() -> ProcessId:
    """One that lived a moment ago."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    found = ProcessId(child.pid, psutil.Process(child.pid).create_time(), ProcessId.own().host)
    assert found.is_alive()
    child.kill()
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert found.is_alive() is False  # nobody has taken note of its end yet
    child.wait()
    return found


def test_a_killed_training_is_told_from_one_that_lives(made: Made) -> None:
    """Its state still says running: nobody was there to change it."""
    gone = dead_process()
    assert gone.is_alive() is False
    made.begin(gone)
    assert Watcher(made.run).look().doing == "killed"
    made.train()
    assert Watcher(made.run).look().doing == "killed"
    made.begin(
        ProcessId.own()
    )  # another command opens the run; its life says nothing of the training's
    made.run.set_state("running")
    assert Watcher(made.run).look().doing == "killed"
    made.train()
    assert Watcher(made.run).look().doing == "training"


def test_a_pid_that_was_given_again_is_another_process(made: Made) -> None:
    own = ProcessId.own()
    made.begin(ProcessId(own.pid, own.began - 3600, own.host))
    assert Watcher(made.run).look().doing == "killed"


def test_a_run_of_another_host_is_believed_while_it_speaks(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a shared disk nobody can ask for the process."""
    made.begin(ProcessId(1, 0.0, "elsewhere"))
    made.train()
    assert Watcher(made.run).look().doing == "training"
    now = time.time()
    monkeypatch.setattr("outsize.app.watching.time.time", lambda: now + 61)
    view = Watcher(made.run).look()
    assert view.doing == "silent"
    assert not view.has_ended


def test_proof_and_sensors_of_an_earlier_training_are_not_this_ones(made: Made) -> None:
    """What lay on the card yesterday says nothing of today."""
    made.train()
    made.journal.write("sensors", **SENSORS)
    watcher = Watcher(made.run)
    assert watcher.look().power_w == 312.4
    made.journal.write("identity", recipe="x")
    view = watcher.look()
    assert (view.power_w, view.memory, view.proof) == (None, {}, {})


def test_how_a_training_failed_is_its_last_word(made: Made) -> None:
    made.train()
    made.journal.write("failed", error="NotFinite", message="the loss of step 7 is nan")
    made.run.set_state("failed")
    assert shown(made)["last words"] == ["NotFinite: the loss of step 7 is nan"]


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_on_a_processor_is_watched_to_its_end(tmp_path: Path) -> None:
    """A real run folder, read without torch."""
    recipe = write_recipe(tmp_path)
    _, run = train_here(recipe)
    code = (
        "import sys; from outsize.cli.main import main; rc = main(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(rc)"
    )
    done = subprocess.run(
        [command()[0], "-c", code, "watch", str(run.path), "--json"],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "False\n"), done.stderr
    found = json.loads(done.stdout)
    last = [one for one in read_journal(run.journal) if one["event"] == "step"][-1]
    assert (found["doing"], found["step"], found["num_steps"]) == ("completed", 6, 6)
    assert found["loss"] == last["loss"]
    assert found["memory"]["blocks"] > 0
    assert found["host_bytes"] > 0
    assert found["power_w"] is None
    assert found["proof"]["verdict"] == "nothing to prove"
    assert "processor" in found["unknown"][0]
    text = outsize("watch", recipe, "--once").stdout
    assert re.match(r"run: completed, step 6 of 6, [\d.]+ s ago\n", text), text
    asked = outsize("watch", run.path, "--prove")
    assert asked.returncode == 2
    assert "nothing trains" in asked.stderr
    assert not run.prove_now.exists()


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    done = outsize("watch", write_recipe(tmp_path))
    assert done.returncode == 2
    assert "no journal" in done.stderr


def test_a_log_gets_a_line_a_look_and_the_whole_at_the_end(made: Made) -> None:
    """Not a terminal: no bars, nothing overwritten."""
    made.train()
    made.steps(1, 3)
    child = subprocess.Popen(
        [*command("watch", made.run.path, "--every", "1")],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline().startswith("training, step 3 of 40, loss 0.3333")
    made.steps(4, 40)
    made.run.set_state("completed")
    rest = child.communicate(timeout=30)[0]
    assert "\ndog: completed, step 40 of 40" in f"\n{rest}"
    assert "\x1b" not in rest
    assert child.returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="there are no terminals of this kind")
def test_a_terminal_gets_a_picture_that_is_drawn_anew(made: Made) -> None:
    import pty

    made.train()
    made.steps(1, 3)
    made.run.set_state("stopped")
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        command("watch", made.run.path),
        stdout=theirs,
        stderr=theirs,
        env={**environment(), "TERM": "xterm"},
    )
    assert child.wait(30) == 0
    text = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert "stopped, step 3 of 40" in text
    assert "\x1b[" in text


@pytest.mark.slow
def test_a_training_is_watched_asked_and_killed(tmp_path: Path) -> None:
    """All of it by the real commands: what lives answers, what was killed is said to be."""
    recipe = write_recipe(tmp_path, train={"steps": 5000}, checkpoints={"every": 1000, "keep": 2})
    run = RunFolder(load_recipe(recipe).run_folder())
    child = outsize_started("train", recipe, "--device", "cpu", log=tmp_path / "log")
    wait_for_step(child, run.journal, 3)
    found = json.loads(outsize("watch", recipe, "--once", "--json").stdout)
    assert found["doing"] == "training", found
    assert found["step"] >= 3
    assert found["left_s"] > 0
    asked = outsize("watch", recipe, "--prove")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert "nothing to prove" in asked.stdout
    moments = [one["moment"] for one in read_journal(run.journal) if one["event"] == "residency"]
    assert moments == ["loaded", "asked"]
    child.kill()
    child.join()
    done = outsize("watch", recipe)  # ends by itself
    assert done.stdout.startswith("run: killed, step "), done.stdout
    assert outsize("watch", recipe, "--prove").returncode == 2
