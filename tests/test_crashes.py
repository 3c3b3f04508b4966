"""Writers stopped at every file operation, with what was not fsynced lost: old or new is read, never torn, never neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crash_support import Disk, Recorder, Snapshot, crashes, put, taken
from prepare_support import (
    content_of,
    packing_for,
    prepare,
    prepare_cached,
    small_table,
)
from prepare_support import (
    save_checkpoint as save_source,
)
from safetensors.torch import load_file

from outsize.base import files
from outsize.base.errors import SourceError, StoreBroken
from outsize.base.files import write_json_atomically
from outsize.data.cache import ContentCache
from outsize.runs.checkpoint import (
    Checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    save_checkpoint,
)
from outsize.runs.folder import RunFolder
from outsize.weights.checkpoint_writer import NewTensor, Piece, write_checkpoint
from outsize.weights.locate import locate_weights
from outsize.weights.store import open_store

TABLE = small_table(num_blocks=2, rows=16)
KEY = "ab" * 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder that lives through the crashes; that it is there itself is nobody's work here."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


# ---------------------------------------------------------------- writers and their readers


def checkpoint_of(step: int) -> Checkpoint:
    tensors = {"lora_A": torch.full((2, 3), float(step)), "lora_B": torch.arange(4.0) * step}
    return Checkpoint(
        step, {"adapter": tensors, "optimizer": {"m": torch.ones(3) * step}}, {"seed": step}
    )


def save_and_prune(root: Path, step: int) -> None:
    """As the loop does it, keeping one."""
    save_checkpoint(root / "run" / "checkpoints", checkpoint_of(step))
    prune_checkpoints(root / "run" / "checkpoints", 1)


def step_read(root: Path) -> int | None:
    """The step that a resume would go on from, its content compared; None when it would begin anew."""
    path, _ = newest_checkpoint(root / "run" / "checkpoints")
    if path is None:
        return None
    found = read_checkpoint(path)
    expected = checkpoint_of(found.step)
    assert found.values == expected.values
    for group, tensors in expected.groups.items():
        assert found.groups[group].keys() == tensors.keys()
        assert all(torch.equal(found.groups[group][name], one) for name, one in tensors.items())
    return found.step


def entry_of(number: int) -> dict[str, torch.Tensor]:
    return {"latent": torch.full((5,), float(number)), "mask": torch.ones(2, dtype=torch.bool)}


def entry_read(root: Path) -> int | None:
    cache = ContentCache(root / "cache")
    assert not cache.broken([KEY])
    found = cache.get(KEY)
    assert (found is None) == bool(cache.missing([KEY]))
    return None if found is None else int(found["latent"][0])


def check_all(root: Path, states: list[Snapshot], read: Callable[[Path], object]) -> list[object]:
    """What is read from each state."""
    found = []
    for state in states:
        put(root, state)
        found.append(read(root))
    return found


# ---------------------------------------------------------------- checkpoints


def test_the_first_checkpoint_is_there_whole_or_not_at_all(root: Path) -> None:
    states, after = crashes(root, lambda: save_and_prune(root, 1))
    assert set(check_all(root, states, step_read)) == {None, 1}
    assert set(check_all(root, after, step_read)) == {1}, "saved is saved"
    assert len(states) > 5


def test_a_crash_while_saving_and_pruning_leaves_the_old_checkpoint_or_the_new(root: Path) -> None:
    save_and_prune(root, 1)
    start = taken(root)
    states, after = crashes(root, lambda: save_and_prune(root, 2), start=start)
    assert set(check_all(root, states, step_read)) == {1, 2}
    assert set(check_all(root, after, step_read)) == {2}
    for state in states:  # and the next one goes on from whatever is there
        put(root, state)
        save_and_prune(root, 2)
        assert step_read(root) == 2


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_power_cut_at_a_writer_that_follows_a_killed_one_leaves_old_or_new(
    root: Path, every: int
) -> None:
    """A killed writer's renames are seen by the next one before they are safe."""
    save_and_prune(root, 1)
    start = taken(root)
    first = Recorder(root).run(lambda: save_and_prune(root, 2))
    found = set()
    for number in range(len(first) % every, len(first), every):
        disk = Disk(start)
        for one in first[:number]:
            disk.do(one)
        put(root, disk.now())
        states, after = crashes(root, lambda: save_and_prune(root, 2), first[:number], start)
        found |= set(check_all(root, states, step_read))
        assert set(check_all(root, after, step_read)) == {2}, first[number]
    assert found == {1, 2}


# ---------------------------------------------------------------- the cache, and files of JSON


def test_a_cache_entry_is_there_whole_or_not_at_all(root: Path) -> None:
    def write() -> None:
        ContentCache(root / "cache").put(KEY, entry_of(3))

    states, after = crashes(root, write)
    assert set(check_all(root, states, entry_read)) == {None, 3}
    assert set(check_all(root, after, entry_read)) == {3}
    start = taken(root)
    again, _ = crashes(root, write, start=start)
    assert set(check_all(root, again, entry_read)) == {3}, "written over, it is never away"


def test_a_state_is_the_old_or_the_new(root: Path) -> None:
    run = RunFolder(root / "run")
    run.set_state("running", step=1)
    start = taken(root)
    states, after = crashes(root, lambda: run.set_state("completed", step=9), start=start)
    assert set(check_all(root, states, lambda _: run.state)) == {"running", "completed"}
    assert set(check_all(root, after, lambda _: run.state)) == {"completed"}


# ---------------------------------------------------------------- the store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_source(tmp_path / "x.safetensors", TABLE)


def test_a_store_is_whole_or_is_none_and_the_next_prepare_completes_it(
    root: Path, tmp_path: Path, source: Path
) -> None:
    packing = packing_for(TABLE)
    expected = content_of(prepare(source, tmp_path / "good", TABLE, packing).folder)

    def write() -> None:
        prepare(source, root / "store", TABLE, packing)

    def read(_: Path) -> bool:
        try:
            for full in (False, True):  # by stamps, where they are believed, and by digests
                open_store(root / "store", full=full)
        except StoreBroken:
            return False
        return content_of(root / "store") == expected

    states, after = crashes(root, write)
    found = check_all(root, states, read)
    assert set(found) == {False, True}
    assert set(check_all(root, after, read)) == {True}
    for state in states:
        put(root, state)
        write()
        assert content_of(root / "store") == expected


def test_a_store_named_by_its_content_is_never_torn(
    root: Path, tmp_path: Path, source: Path
) -> None:
    """What a command does: the folder gets its name last."""
    packing = packing_for(TABLE)
    good = prepare_cached(source, tmp_path / "good", TABLE, packing)
    expected, name = content_of(good.folder), good.folder.name

    def write() -> None:
        prepare_cached(source, root / "stores", TABLE, packing)

    def read(_: Path) -> bool:
        if not (root / "stores" / name).exists():
            return False
        open_store(root / "stores" / name, full=True)
        return content_of(root / "stores" / name) == expected

    states, after = crashes(root, write)
    assert set(check_all(root, states, read)) == {False, True}
    assert set(check_all(root, after, read)) == {True}
    for state in states[:: max(1, len(states) // 40)]:
        put(root, state)
        write()
        assert read(root)


# ---------------------------------------------------------------- merged checkpoints


@pytest.mark.parametrize("shard_bytes", [2**20, 100])
def test_a_merged_checkpoint_is_whole_or_is_refused(root: Path, shard_bytes: int) -> None:
    tensors = [NewTensor(f"t{number}", "F32", (4, 5)) for number in range(3)]

    def fill(piece: Piece) -> memoryview:
        count = piece.stop - piece.start
        return torch.full((count,), float(piece.tensor.name[1:]) + 1).numpy().data.cast("B")

    def write() -> None:
        write_checkpoint(
            root / "out", "model", tensors, fill, shard_bytes=shard_bytes, num_threads=1
        )

    def read(_: Path) -> bool:
        try:
            found = locate_weights(str(root / "out"))
        except SourceError:
            return False
        loaded = {name: one for file in found for name, one in load_file(file).items()}
        assert {name: one.unique().tolist() for name, one in loaded.items()} == {
            "t0": [1], "t1": [2], "t2": [3],
        }  # fmt: skip
        return True

    states, after = crashes(root, write)
    assert set(check_all(root, states, read)) == {False, True}
    assert set(check_all(root, after, read)) == {True}


# ---------------------------------------------------------------- that all of this can fail


def _bare_rename(written: Path, target: Path) -> None:
    written.replace(target)
    files.sync_folder(target.parent)


def _unsafe_name(written: Path, target: Path) -> None:
    files.sync_file(written)
    written.replace(target)


def _in_place(written: Path, target: Path) -> None:
    target.write_bytes(written.read_bytes())
    written.unlink()


@pytest.mark.parametrize(
    ("commit", "what"),
    [(_bare_rename, "torn"), (_unsafe_name, "lost"), (_in_place, "torn")],
)
def test_a_writer_that_leaves_a_step_out_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, commit: Callable[[Path, Path], None], what: str
) -> None:
    """Without the fsync of the file, without that of its folder, or written over in place."""
    path = root / "state.json"
    write_json_atomically(path, {"state": "old"})
    old, start = path.read_bytes(), taken(root)
    monkeypatch.setattr(files, "commit_file", commit)
    states, after = crashes(
        root, lambda: write_json_atomically(path, {"state": "new"}), start=start
    )
    new = path.read_bytes() if path.exists() else b""
    contents = check_all(root, states, lambda _: path.read_bytes() if path.exists() else None)
    assert (not set(contents) <= {old, new}) == (what == "torn")
    last = check_all(root, after, lambda _: path.read_bytes() if path.exists() else None)
    assert set(last) != {new}
