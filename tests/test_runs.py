"""The run folder: checkpoints that are whole or absent, requests that are heard, one worker at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outsize.base.errors import MachineFault, StoreBroken
from outsize.runs.checkpoint import (
    Checkpoint,
    all_checkpoints,
    faults_of,
    newest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    save_checkpoint,
)
from outsize.runs.folder import RunFolder
from outsize.runs.requests import Requests


def _checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    adapter = {f"m{i}.lora_A": torch.randn(4, 8, generator=generator) for i in range(3)}
    optimizer = {"state.0.step": torch.tensor(float(step)), "state.0.exp_avg": torch.ones(4, 8)}
    return Checkpoint(step, {"adapter": adapter, "optimizer": optimizer}, {"identity": {"a": "b"}})


def test_a_checkpoint_reads_back_bit_for_bit(tmp_path: Path) -> None:
    written = _checkpoint(7)
    read = read_checkpoint(save_checkpoint(tmp_path, written))
    assert (read.step, read.values) == (written.step, written.values)
    for group, tensors in written.groups.items():
        assert read.groups[group].keys() == tensors.keys()
        assert all(torch.equal(read.groups[group][name], one) for name, one in tensors.items())


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "state"])
def test_a_harmed_checkpoint_is_named_and_passed_over(tmp_path: Path, harm: str) -> None:
    good = save_checkpoint(tmp_path, _checkpoint(1))
    bad = save_checkpoint(tmp_path, _checkpoint(2))
    file = bad / ("state.json" if harm == "state" else "optimizer.safetensors")
    content = bytearray(file.read_bytes())
    if harm == "remove":
        file.unlink()
    elif harm == "flip":
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2])
    path, faults = newest_checkpoint(tmp_path)
    assert path == good
    assert any(file.name in fault for fault in faults)
    with pytest.raises(StoreBroken, match=file.name):
        read_checkpoint(bad)


def test_a_harmed_checkpoint_is_written_anew_when_its_step_comes_again(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, _checkpoint(2))
    (path / "adapter.safetensors").write_bytes(b"torn")
    assert faults_of(path)
    assert not faults_of(save_checkpoint(tmp_path, _checkpoint(2)))


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save_checkpoint(tmp_path, _checkpoint(step))
    prune_checkpoints(tmp_path, 2)
    assert [int(path.name) for path in all_checkpoints(tmp_path)] == [11, 10]


_WRITER = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_runs import _checkpoint
from outsize.runs.checkpoint import save_checkpoint, prune_checkpoints
step = int(sys.argv[2])
print("ready", flush=True)
while True:
    step += 1
    save_checkpoint(Path(sys.argv[1]), _checkpoint(step))
    prune_checkpoints(Path(sys.argv[1]), 2)
"""


@pytest.mark.parametrize(
    "num_kills", [3, pytest.param(20, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_writer_killed_at_any_time_leaves_a_checkpoint_to_go_on_from(
    tmp_path: Path, num_kills: int
) -> None:
    """Kill -9 while checkpoints are written and old ones deleted: the newest that verifies is never lost."""
    import random
    import time

    dice = random.Random(1)
    folder = tmp_path / "checkpoints"
    code = _WRITER.format(paths=[str(Path(__file__).parent), *[p for p in sys.path if p]])
    step = 0
    for _ in range(num_kills):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(step)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(dice.uniform(0.02, 0.25))
        child.kill()
        child.wait()
        child.stdout.close()
        path, faults = newest_checkpoint(folder)
        assert not faults, "a folder that is there is whole: it was renamed after it was written"
        if path is not None:
            read = read_checkpoint(path)
            expected = _checkpoint(read.step)
            assert read.step >= step
            assert torch.equal(
                read.groups["adapter"]["m0.lora_A"], expected.groups["adapter"]["m0.lora_A"]
            )
            step = read.step
    assert step > 0


def test_files_ask_for_a_save_and_a_stop_once_each(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    requests = Requests(folder)
    assert requests.look() is None
    folder.save_now.touch()
    folder.stop_now.touch()
    assert requests.look() == ("save", "SAVE_NOW")
    assert requests.look() == ("stop", "STOP_NOW")
    assert requests.look() is None


@pytest.mark.skipif(os.name == "nt", reason="Windows delivers no SIGTERM to a living process")
def test_a_signal_asks_to_stop_and_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    requests = Requests(RunFolder(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    with requests.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.look() == ("stop", "SIGTERM")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_process_is_turned_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked(), pytest.raises(MachineFault, match="another process"), folder.locked():
        pass
    with folder.locked():
        folder.set_state("running", step=3)
    assert folder.state == "running"
