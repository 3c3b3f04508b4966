"""The content cache: what is read is what was written, or an error that names the file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from data_support import UNHURRIED
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outsize.base.errors import StoreBroken
from outsize.data.cache import ContentCache

TENSORS = {
    "latent": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    "text": torch.linspace(-1, 1, 10).to(torch.bfloat16).reshape(5, 2),
    "mask": torch.tensor([True, False]),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "nothing": torch.zeros(0, 4),
}


@pytest.fixture
def cache(tmp_path: Path) -> ContentCache:
    return ContentCache(tmp_path / "cache")


def same(left: Mapping[str, torch.Tensor] | None, right: Mapping[str, torch.Tensor]) -> bool:
    return (
        left is not None
        and left.keys() == right.keys()
        and all(
            left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
            for name in left
        )
    )


def test_entries_come_back_bit_for_bit_in_their_dtypes(cache: ContentCache) -> None:
    key = cache.key(what="x")
    assert cache.get(key) is None
    cache.put(key, TENSORS)
    assert same(cache.get(key), TENSORS)
    assert same(load_file(cache.path(key)), TENSORS), "any safetensors reader can open it"


def test_rows_of_one_tensor_and_turned_tensors_are_stored_as_they_read(cache: ContentCache) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    entry = {"row": whole[1], "same_row": whole[1], "turned": whole.T}
    cache.put("ab" * 32, entry)
    assert same(cache.get("ab" * 32), entry)
    assert cache.path("ab" * 32).stat().st_size < 1000, "a row is stored, not its whole tensor"


def test_the_key_follows_every_input_and_not_their_order(cache: ContentCache) -> None:
    base = {"picture": "p", "crop": [1, 2], "codec": {"variant": "v"}}
    key = cache.key(**base)
    assert key == cache.key(codec={"variant": "v"}, crop=[1, 2], picture="p")
    others = [base | change for change in ({"picture": "q"}, {"crop": [2, 1]}, {"more": None})]
    assert len({key, *(cache.key(**other) for other in others)}) == 4


@UNHURRIED
@given(st.data())
def test_no_altered_or_torn_entry_is_ever_read_as_another_value(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Flip, cut or append anywhere: header, metadata, padding or data."""
    cache = ContentCache(tmp_path_factory.mktemp("cache"))
    key = cache.key(what="x")
    cache.put(key, TENSORS)
    content = bytearray(cache.path(key).read_bytes())
    how = data.draw(st.sampled_from(["flip", "cut", "append"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if how == "flip":
        content[place] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del content[place:]
    else:
        content += bytes(place + 1)
    cache.path(key).write_bytes(content)
    try:
        read = cache.get(key)
    except StoreBroken as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert str(cache.path(key)) in message
    else:
        assert how == "flip", "a length that changed is always found"
        assert same(read, TENSORS), "only bytes that carry no value (padding) may be ignored"


def test_the_quick_look_finds_torn_entries_and_reading_finds_altered_ones(
    cache: ContentCache,
) -> None:
    keys = [cache.key(number=number) for number in range(4)]
    for key in keys:
        cache.put(key, TENSORS)
    torn, altered, foreign, _ = (cache.path(key) for key in keys)
    torn.write_bytes(torn.read_bytes()[:-1])
    content = bytearray(altered.read_bytes())
    content[-1] ^= 1
    altered.write_bytes(content)
    foreign.write_bytes(cache.path(keys[3]).read_bytes())
    assert set(cache.broken(keys)) == {keys[0], keys[2]}
    assert "its header says" in cache.broken(keys)[keys[0]]
    with pytest.raises(StoreBroken, match="do not have the digest they were stored with"):
        cache.get(keys[1])


def test_another_safetensors_file_in_an_entrys_place_is_broken(cache: ContentCache) -> None:
    key = cache.key(what="x")
    cache.path(key).parent.mkdir(parents=True)
    save_file(TENSORS, cache.path(key))
    with pytest.raises(StoreBroken, match="holds the entry ''"):
        cache.get(key)


def test_missing_names_each_absent_key_once_in_order(cache: ContentCache) -> None:
    keys = [cache.key(number=number) for number in range(3)]
    cache.put(keys[1], TENSORS)
    assert cache.missing([*keys, keys[0]]) == (keys[0], keys[2])
    cache.discard(keys[1])
    cache.discard(keys[1])
    assert cache.missing(keys) == tuple(keys)


def test_an_error_while_writing_leaves_the_old_entry_and_no_temporary(
    cache: ContentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = cache.key(what="x")
    cache.put(key, TENSORS)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outsize.base.files.os.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        cache.put(key, {"latent": torch.zeros(1)})
    assert same(cache.get(key), TENSORS)
    assert [path.name for path in cache.path(key).parent.iterdir()] == [cache.path(key).name]


def test_where_an_open_entry_cannot_be_replaced_the_one_there_must_verify(
    cache: ContentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, two processes: the entry of a key has one value, so the other's is as good."""
    key = cache.key(what="x")

    def held_open(*_: object) -> None:
        raise PermissionError(13, "in use")

    with monkeypatch.context() as patch:
        patch.setattr("outsize.base.files.os.replace", held_open)
        with pytest.raises(PermissionError):
            cache.put(key, TENSORS)
    cache.put(key, TENSORS)
    monkeypatch.setattr("outsize.base.files.os.replace", held_open)
    cache.put(key, TENSORS)
    cache.path(key).write_bytes(b"torn")
    with pytest.raises(StoreBroken):
        cache.put(key, TENSORS)


def test_sweep_deletes_what_killed_writers_left_and_nothing_live(cache: ContentCache) -> None:
    key = cache.key(what="x")
    cache.put(key, TENSORS)
    live = cache.path(key).parent / ".tmp-live"
    dead = cache.path(key).parent / ".tmp-dead"
    for path in (live, dead):
        path.write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(dead, (hours_ago, hours_ago))
    assert cache.sweep() == 1
    assert live.exists()
    assert not dead.exists()
    assert cache.get(key) is not None
