"""Caching under kill -9, and two processes at once: nothing torn is read, nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from data_support import (
    CountingEncoders,
    cache_as_a_child,
    cache_folder,
    keys_in,
    write_captioned,
)

from outsize.data.cache import ContentCache

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

    Context = ForkServerContext | SpawnContext

NUM = 24
SIZES = [(40, 40), (60, 30), (30, 60)]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Context:
    """Processes with modules of their own; where the system can fork, torch is loaded once."""
    # The fork server finds modules by the environment only.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "safetensors.torch", Path(__file__).stem])
    return context


def start_child(processes: Context, folder: Path, cache: ContentCache) -> BaseProcess:
    ready = processes.Event()
    child = processes.Process(target=cache_as_a_child, args=(folder, cache.folder, ready))
    child.start()
    assert ready.wait(120), "the child did not begin within two minutes"
    return child


def kill_at_random_times_and_complete(
    tmp_path: Path, processes: Context, num_kills: int, seed: int
) -> list[int]:
    """Kill children at random moments of caching; every entry at every time verifies."""
    folder = write_captioned(tmp_path / "pictures", NUM, SIZES)
    clock = random.Random(seed)
    num_cached = []
    for attempt in range(num_kills):
        cache = ContentCache(tmp_path / f"cache{attempt}")
        child = start_child(processes, folder, cache)
        time.sleep(clock.uniform(0, 0.4))
        child.kill()
        child.join()
        child.close()
        keys = keys_in(cache)
        assert all(cache.get(key) for key in keys), "whatever has its name is whole"
        latents, texts, _ = cache_folder(folder, cache, CountingEncoders())
        assert latents.num_reused + texts.num_reused == len(keys)
        assert len(keys_in(cache)) == NUM + NUM + 1
        num_cached.append(len(keys))
    return num_cached


def test_a_killed_caching_loses_nothing_and_the_next_start_completes_it(
    tmp_path: Path, processes: Context
) -> None:
    kill_at_random_times_and_complete(tmp_path, processes, 4, seed=1)


@pytest.mark.slow
def test_twenty_kills_at_random_times_lose_nothing(tmp_path: Path, processes: Context) -> None:
    num_cached = kill_at_random_times_and_complete(tmp_path, processes, 20, seed=2)
    assert len(set(num_cached)) > 5, "the kills came at different moments of the work"


def test_two_processes_caching_the_same_folder_at_once_both_complete(
    tmp_path: Path, processes: Context
) -> None:
    folder = write_captioned(tmp_path / "pictures", NUM, SIZES)
    cache = ContentCache(tmp_path / "cache")
    children = [start_child(processes, folder, cache) for _ in range(2)]
    for child in children:
        child.join(120)
        assert child.exitcode == 0
        child.close()
    encoders = CountingEncoders()
    cache_folder(folder, cache, encoders)
    assert encoders.events == []
    assert len(keys_in(cache)) == NUM + NUM + 1
    assert all(cache.get(key) for key in keys_in(cache))
    assert not list(cache.folder.glob("??/.tmp-*"))
