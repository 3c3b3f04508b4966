"""Preparing: equal to encoding whole tensors, within its memory, and whole after any interruption."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
import torch
from prepare_support import (
    LAYOUTS,
    content_of,
    in_layout,
    packing_for,
    prepare,
    prepare_cached,
    prepare_in_child,
    save_checkpoint,
    small_table,
    tensors_of,
)
from safetensors.torch import load_file, save_file

from outsize.app import _encoding as encoding
from outsize.app import prepare as subject
from outsize.app.prepare import prepare_store
from outsize.app.wanted import Wanted, known_key, store_key, store_name, wanted
from outsize.base.errors import DoesNotFit, FormatError, SourceError, StoreBroken
from outsize.base.journal import read_journal
from outsize.base.table import ShapeTable
from outsize.families.protocol import FAMILIES
from outsize.formats._packing import Packing
from outsize.weights import pieces
from outsize.weights.budget import Shares, smallest_budget
from outsize.weights.conveyor import Conveyor
from outsize.weights.identity import LEDGER_NAME
from outsize.weights.lanes import Lanes
from outsize.weights.readahead import read_ahead
from outsize.weights.source import Source
from outsize.weights.store import MANIFEST, Store, open_store

TABLE = small_table()


def least_budget(table: ShapeTable, name: str = "nf4") -> int:
    packing = packing_for(table, name)
    return smallest_budget(table, {spec.name: packing.parts(spec.name) for spec in table})


@contextmanager
def want(root: Path, packing: Packing | None = None, checkpoint: str = "a") -> Iterator[Wanted]:
    """The store of a checkpoint in a cache folder."""
    with Source([root / f"{checkpoint}.safetensors"]) as source:
        yield wanted(
            name="x",
            table=TABLE,
            layouts=LAYOUTS,
            source=source,
            packing=packing or packing_for(TABLE),
            cache_root=root / "cache",
        )


def key_of(root: Path, packing: Packing | None = None, checkpoint: str = "a") -> str:
    """The key of its store."""
    with want(root, packing, checkpoint) as one:
        return store_key(one)


def is_known(root: Path, checkpoint: str = "a") -> bool:
    """Whether its key is known without making the store."""
    with want(root, checkpoint=checkpoint) as one:
        return known_key(one) is not None


def settle(path: Path) -> None:
    """Make a file's time of change old enough to be believed."""
    os.utime(path, (1e9, 1e9))


def parts_in(store: Store) -> dict[str, torch.Tensor]:
    """Every part of every tensor, by key, as the safetensors library reads it."""
    loaded = {
        key: part for file in store.files for key, part in load_file(store.path(file.block)).items()
    }
    return {key: part for key, part in loaded.items() if not key.startswith("__pad__")}


def read_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make windows so small that tiny tensors take several, and slabs so few that they are used again."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(encoding, "share_out", lambda *_, **__: Shares(3, 2000, 4000))


# ---------------------------------------------------------------- the result


@pytest.mark.parametrize(
    ("name", "options"),
    [("plain", {}), ("nf4", {}), ("nf4", {"group": 32, "scales": "double"}), ("int4", {})],
)
def test_prepare_equals_encoding_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Every tensor is read in windows of few rows."""
    read_few_rows(monkeypatch)
    packing = packing_for(TABLE, name, **options)
    tensors = tensors_of(TABLE)
    save_file(in_layout(LAYOUTS[1], tensors), tmp_path / "x.safetensors")
    store = prepare(tmp_path / "x.safetensors", tmp_path / "s", TABLE, packing)
    expected = {}
    for spec in TABLE:
        encoder = packing.formats[spec.name].encoder(spec.shape)
        encoder.push(tensors[spec.name])
        for part, value in encoder.finish().items():
            expected[f"{spec.name}.{part}" if part else spec.name] = value
    found = parts_in(store)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value.reshape(found[key].shape)), key
    assert store.provenance["layout"] == "fused"


@pytest.mark.parametrize("family_name", FAMILIES.names())
def test_every_tiny_family_prepares_alike_from_each_of_its_layouts(
    tmp_path: Path, family_name: str
) -> None:
    """No layout changes a number: the packets are the same whichever files the weights come in."""
    family = FAMILIES.load(family_name)
    table = family.table("tiny")
    tensors = tensors_of(table)
    packing = packing_for(table)
    digests = []
    for number, layout in enumerate(family.layouts("tiny")):
        path = tmp_path / f"{number}.safetensors"
        save_file(
            {k: v.contiguous() for k, v in in_layout(layout, tensors).items()}
            | {"unused.weight": torch.zeros(1)},
            path,
        )
        with Source([path]) as source:
            store = prepare_store(
                table=table,
                layouts=family.layouts("tiny"),
                source=source,
                packing=packing,
                folder=tmp_path / f"store-{number}",
                ram_budget_bytes=2**30,
            )
        assert {file.block for file in store.files} == {None, *range(table.num_blocks)}
        assert store.provenance["layout"] == layout.name
        digests.append({file.name: parts_digest(store, file.block) for file in store.files})
    assert all(digest == digests[0] for digest in digests)


def parts_digest(store: Store, block: int | None) -> str:
    return next(file.data_sha256 for file in store.files if file.block == block)


def test_the_key_holds_everything_that_shapes_the_bytes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.safetensors", TABLE)
    save_file(
        tensors_of(TABLE) | {"extra": torch.zeros(1)},
        tmp_path / "b.safetensors",
    )

    def key(checkpoint: str = "a", **options: object) -> str:
        return key_of(tmp_path, packing_for(TABLE, "nf4", **options), checkpoint)

    tensors = tensors_of(TABLE)
    tensors["mean"][0] += 1
    save_file(tensors, tmp_path / "c.safetensors")
    keys = [key(), key("c"), key(group=32), key(scales="fp16")]
    assert len(set(keys)) == 4
    assert key() == key("b") == keys[0], "what nobody reads shapes nothing"
    name = store_name("flux2", "dev/x@2+6", "vae")
    with want(tmp_path) as one:
        folder = replace(one, name=name).folder(keys[0])
    assert folder.name == f"flux2-dev_x_2_6-vae-{keys[0][:16]}"


def test_progress_and_journal_tell_what_happened(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x.safetensors", TABLE)
    seen: list[tuple[int, int]] = []

    def run() -> Store:
        return prepare(
            tmp_path / "x.safetensors",
            tmp_path / "s",
            TABLE,
            packing_for(TABLE),
            journal=tmp_path / "journal.jsonl",
            progress=lambda done, total: seen.append((done, total)),
        )

    store = run()
    total = sum(tensor.nbytes for tensor in tensors_of(TABLE).values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    events = list(read_journal(tmp_path / "journal.jsonl"))
    assert [event["event"] for event in events] == [
        "prepare_start",
        *["prepare_block"] * 5,
        "prepare_done",
    ]
    assert [event["block"] for event in events[1:-1]] == [None, 0, 1, 2, 3]
    assert events[-1]["store_bytes"] == store.nbytes
    assert events[-1]["peak_private_bytes"] > 2**20
    assert run() == store
    assert len(list(read_journal(tmp_path / "journal.jsonl"))) == len(events), "a no-op is silent"


# ---------------------------------------------------------------- refusals


def test_a_budget_too_small_is_refused_naming_the_smallest_that_works(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x.safetensors", TABLE)
    packing, least = packing_for(TABLE), least_budget(TABLE)

    def run(budget: int) -> Store:
        return prepare(
            tmp_path / "x.safetensors", tmp_path / "s", TABLE, packing, budget_bytes=budget
        )

    with pytest.raises(DoesNotFit, match=rf"--ram {-(-least // 2**20)}MiB"):
        run(least - 4096)
    assert not (tmp_path / "s").exists()
    run(least)
    run(0)  # what is there is used, whatever the budget


def test_a_disk_too_small_is_refused_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "x.safetensors", TABLE)
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DoesNotFit, match="the disk has 1000 B free"):
        prepare(tmp_path / "x.safetensors", tmp_path / "s", TABLE, packing_for(TABLE))


def test_a_weight_that_is_not_finite_is_named_and_leaves_no_half_block(tmp_path: Path) -> None:
    tensors = tensors_of(TABLE)
    tensors["b.2.q.weight"][40, 3] = torch.nan
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(FormatError, match=r"b\.2\.q\.weight, in rows .*row 40"):
        prepare(tmp_path / "x.safetensors", tmp_path / "s", TABLE, packing_for(TABLE))
    assert "block-002.safetensors" not in content_of(tmp_path / "s")
    with pytest.raises(StoreBroken, match="did not finish"):
        open_store(tmp_path / "s")


def test_a_folder_with_another_store_is_not_overwritten(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x.safetensors", TABLE)
    prepare(tmp_path / "x.safetensors", tmp_path / "s", TABLE, packing_for(TABLE))
    before = content_of(tmp_path / "s")
    with pytest.raises(StoreBroken, match="holds another store"):
        prepare(tmp_path / "x.safetensors", tmp_path / "s", TABLE, packing_for(TABLE, "int4"))
    assert content_of(tmp_path / "s") == before


# ---------------------------------------------------------------- torn stores and killed processes


@pytest.mark.parametrize("damage", ["truncate", "flip", "manifest", "missing"])
def test_prepare_mends_what_is_torn_and_says_what_it_was(tmp_path: Path, damage: str) -> None:
    save_checkpoint(tmp_path / "x.safetensors", TABLE)
    packing, folder = packing_for(TABLE), tmp_path / "s"
    prepare(tmp_path / "x.safetensors", folder, TABLE, packing)
    whole = content_of(folder)
    victim = folder / (MANIFEST if damage == "manifest" else "block-001.safetensors")
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(content[:-9] if damage == "truncate" else content)
    journal = tmp_path / "journal.jsonl"
    prepare(tmp_path / "x.safetensors", folder, TABLE, packing, journal=journal)
    assert content_of(folder) == whole
    events = {event["event"]: event for event in read_journal(journal)}
    assert victim.name in events["prepare_found_broken"]["fault"]
    assert events["prepare_start"]["num_kept"] == (5 if damage == "manifest" else 4)


def children(monkeypatch: pytest.MonkeyPatch) -> BaseContext:
    """Processes that start with torch imported where the system can, and so within milliseconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # Python below 3.12 does not give the server our sys.path, and preloading fails without a word.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["prepare_support"])
    return context


def start_child(context: BaseContext, *arguments: object, is_cache: bool) -> Any:
    """A child that has begun to prepare: (checkpoint, folder, num_blocks, journal)."""
    begins = context.Event()
    checkpoint, folder, num_blocks, journal = arguments
    process = context.Process(
        target=prepare_in_child,
        args=(checkpoint, folder, num_blocks, begins, journal),
        kwargs={"is_cache": is_cache},
    )
    process.start()
    assert begins.wait(120)
    return process


def kill_and_finish(
    context: BaseContext,
    tmp_path: Path,
    *,
    num_rounds: int,
    kills_per_round: int,
    seed: int,
    is_cache: bool,
) -> None:
    """Kill preparing at random times; the next whole run must give the undisturbed bytes."""
    num_blocks = 12
    table, chance = small_table(num_blocks), random.Random(seed)
    checkpoint = save_checkpoint(tmp_path / "x.safetensors", table)
    prepare(checkpoint, tmp_path / "whole", table, packing_for(table))
    whole = content_of(tmp_path / "whole")
    num_killed = 0
    for number in range(num_rounds):
        folder = tmp_path / f"s{number}"
        for _ in range(kills_per_round):
            process = start_child(context, checkpoint, folder, num_blocks, None, is_cache=is_cache)
            wait_for_files(process, folder, chance.randint(0, num_blocks))
            time.sleep(chance.uniform(0, 0.02))  # a block takes about ten milliseconds
            process.kill()
            process.join()
            num_killed += process.exitcode != 0
        run = prepare_cached if is_cache else prepare
        made = run(checkpoint, folder, table, packing_for(table)).folder
        assert content_of(made) == whole, "nothing torn is kept, nothing temporary stays"
        open_store(made, full=True)
        if is_cache:
            assert [one for one in folder.iterdir() if one.is_dir()] == [made], "no part is left"
    assert num_killed > num_rounds * kills_per_round / 4, "most children ended before their kill"


def wait_for_files(process: Any, folder: Path, count: int) -> None:
    """Until a child has finished so many blocks, or ended."""
    while process.is_alive() and len(list(folder.rglob("*.safetensors"))) < count:
        time.sleep(0.001)


@pytest.mark.parametrize("is_cache", [False, True])
def test_a_killed_prepare_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cache: bool
) -> None:
    kill_and_finish(
        children(monkeypatch), tmp_path, num_rounds=2, kills_per_round=2, seed=1, is_cache=is_cache
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_cache", [False, True])
def test_twenty_killed_prepares_continue_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cache: bool
) -> None:
    kill_and_finish(
        children(monkeypatch), tmp_path, num_rounds=20, kills_per_round=2, seed=2, is_cache=is_cache
    )


@pytest.mark.parametrize("is_cache", [False, True])
def test_two_processes_prepare_the_same_store_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cache: bool
) -> None:
    context = children(monkeypatch)
    num_blocks = 12
    table = small_table(num_blocks)
    checkpoint = save_checkpoint(tmp_path / "x.safetensors", table)
    folder = tmp_path / "s"
    pair = [
        start_child(
            context, checkpoint, folder, num_blocks, tmp_path / f"{name}.jsonl", is_cache=is_cache
        )
        for name in ("a", "b")
    ]
    for process in pair:
        process.join()
        assert process.exitcode == 0
    prepare(checkpoint, tmp_path / "alone", table, packing_for(table))
    made = next(one for one in folder.iterdir() if one.is_dir()) if is_cache else folder
    assert content_of(made) == content_of(tmp_path / "alone")
    events = [e["event"] for name in ("a", "b") for e in read_journal(tmp_path / f"{name}.jsonl")]
    assert events.count("prepare_start") == 1
    assert events.count("prepare_done") == 1


# ---------------------------------------------------------------- one pass over the source


class Reads:
    """Counts the bytes that are read of sources' tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        plain = Source.read_into

        def counted(source: Source, *arguments: Any) -> int:
            count = plain(source, *arguments)
            self.num_bytes += count
            return count

        monkeypatch.setattr(Source, "read_into", counted)

    def taken(self) -> int:
        """How many since the last call."""
        count, self.num_bytes = self.num_bytes, 0
        return count


def test_a_source_that_was_never_seen_is_read_once_and_then_never_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing goes along with encoding, and what is known then is what hashing alone would have found."""
    checkpoint = save_checkpoint(tmp_path / "a.safetensors", TABLE)
    settle(checkpoint)
    total = sum(tensor.nbytes for tensor in tensors_of(TABLE).values())
    cache, reads = tmp_path / "cache", Reads(monkeypatch)
    assert not is_known(tmp_path)
    assert reads.taken() == 0, "asking reads nothing"
    store = prepare_cached(checkpoint, cache, TABLE, packing_for(TABLE))
    assert reads.taken() == total
    assert is_known(tmp_path)
    assert prepare_cached(checkpoint, cache, TABLE, packing_for(TABLE)) == store
    assert reads.taken() == 0
    (cache / LEDGER_NAME).unlink()
    assert key_of(tmp_path) == store.key
    assert reads.taken() == total
    assert store.folder == cache / f"x-{store.key[:16]}"


def test_a_copy_of_a_source_is_hashed_and_finds_the_store_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    store = prepare_cached(
        save_checkpoint(tmp_path / "a.safetensors", TABLE), cache, TABLE, packing_for(TABLE)
    )
    save_checkpoint(tmp_path / "b.safetensors", TABLE)
    reads = Reads(monkeypatch)
    journal = tmp_path / "journal.jsonl"
    again = prepare_cached(
        tmp_path / "b.safetensors", cache, TABLE, packing_for(TABLE), journal=journal
    )
    assert again == store
    assert reads.taken() > 0
    assert not list(read_journal(journal))
    other = prepare_cached(
        tmp_path / "b.safetensors", cache, TABLE, packing_for(TABLE, "int4"), journal=journal
    )
    assert other.folder != store.folder


def test_content_that_turns_out_to_be_there_already_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the store came to be after it was looked for."""
    cache = tmp_path / "cache"
    checkpoint = save_checkpoint(tmp_path / "a.safetensors", TABLE)
    store = prepare_cached(checkpoint, cache, TABLE, packing_for(TABLE))
    monkeypatch.setattr(subject, "known_key", lambda _one: None)
    assert prepare_cached(checkpoint, cache, TABLE, packing_for(TABLE)) == store
    (store.folder / MANIFEST).unlink()
    assert prepare_cached(checkpoint, cache, TABLE, packing_for(TABLE)) == store
    assert [one for one in cache.iterdir() if one.is_dir()] == [store.folder]


class Interrupted(Exception):  # noqa: N818 - it stands for a kill
    """Ends preparing in the middle."""


def interrupt(checkpoint: Path, cache: Path, share: float) -> None:
    """Prepare until so much of the source is done, and what was handed over before is safe: four files."""

    def stop(done: int, total: int) -> None:
        if done >= share * total:
            waits_until = time.monotonic() + 60
            while len(list(cache.rglob("[rb]*.safetensors"))) < 4:
                assert time.monotonic() < waits_until
                time.sleep(0.002)
            raise Interrupted

    with pytest.raises(Interrupted):
        prepare_cached(checkpoint, cache, TABLE, packing_for(TABLE), progress=stop)


@pytest.mark.parametrize("is_changed", [False, True])
def test_blocks_of_an_interrupted_run_are_kept_only_if_they_are_of_these_bytes(
    tmp_path: Path, *, is_changed: bool
) -> None:
    """A file changed behind the clock is found: a block is believed for what it was made of, by digest."""
    cache, journal = tmp_path / "cache", tmp_path / "journal.jsonl"
    checkpoint = save_checkpoint(tmp_path / "a.safetensors", TABLE)
    settle(checkpoint)
    interrupt(checkpoint, cache, 0.8)
    (partial,) = (one for one in cache.iterdir() if one.is_dir())
    files = sorted(one.name for one in partial.glob("*.safetensors"))
    assert files == [f"block-00{number}.safetensors" for number in range(3)] + ["rest.safetensors"]
    if is_changed:
        tensors = tensors_of(TABLE)
        tensors["b.1.q.weight"][5, 7] += 1
        save_file(tensors, checkpoint)
        settle(checkpoint)
    store = prepare_cached(checkpoint, cache, TABLE, packing_for(TABLE), journal=journal)
    events = {event["event"]: event for event in read_journal(journal)}
    assert events["prepare_start"]["num_kept"] == (3 if is_changed else 4)
    whole = prepare(checkpoint, tmp_path / "whole", TABLE, packing_for(TABLE))
    assert content_of(store.folder) == content_of(whole.folder)
    assert [one for one in cache.iterdir() if one.is_dir()] == [store.folder], "nothing torn stays"
    assert key_of(tmp_path) == store.key


def test_a_source_that_changes_while_it_is_encoded_is_an_error_and_no_store(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "a.safetensors", TABLE)
    with pytest.raises(SourceError, match=r"a\.safetensors changed while being read"):
        prepare_cached(
            checkpoint,
            tmp_path / "cache",
            TABLE,
            packing_for(TABLE),
            progress=lambda _done, _total: os.utime(checkpoint, (1, 1)),
        )
    assert not list((tmp_path / "cache").rglob(MANIFEST))


# ---------------------------------------------------------------- the three lines of work


def test_reading_ahead_keeps_order_and_never_shares_a_slab() -> None:
    slabs: list[object] = [None] * 3

    def fill(item: int, slab: int) -> int:
        assert slabs[slab] is None, "the slab is another's"
        slabs[slab] = item
        time.sleep(random.Random(item).uniform(0, 0.002))
        return item * item

    seen = []
    for item, slab, found in read_ahead(range(60), fill, num_slabs=3, num_threads=3):
        assert slabs[slab] == item
        assert found == item * item
        seen.append(item)
        slabs[slab] = None
    assert seen == list(range(60))


def test_an_error_while_reading_ahead_is_raised_in_its_turn() -> None:
    def fill(item: int, _slab: int) -> int:
        return 6 // (3 - item)

    seen = []
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - what came before the error counts
        for item, _, _ in read_ahead(range(9), fill, num_slabs=4, num_threads=2):
            seen.append(item)
    assert seen == [0, 1, 2]


def test_a_conveyor_works_in_order_within_its_limit() -> None:
    done: list[int] = []
    held, most = 0, 0

    def work(number: int, size: int) -> None:
        nonlocal held
        time.sleep(0.0005)
        done.append(number)
        held -= size

    with Conveyor(100, "test") as conveyor:
        for number in range(40):
            size = 250 if number == 20 else 30
            conveyor.reserve(size)
            held += size
            most = max(most, held)
            conveyor.put(partial(work, number, size), size)
    assert done == list(range(40))
    assert most == 250, "a large one waits until it is alone"


def test_an_error_on_a_conveyor_reaches_the_one_who_puts() -> None:
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"), Conveyor(10, "test") as conveyor:  # noqa: PT012
        conveyor.put(fail, 5)
        while True:
            conveyor.put(lambda: None, 6)
    done: list[int] = []
    with pytest.raises(ZeroDivisionError), Conveyor(10, "test") as conveyor:  # noqa: PT012
        conveyor.put(partial(time.sleep, 0.05))
        conveyor.put(partial(done.append, 1))
        done.append(1 // 0)
    assert not done, "what waits is dropped"


class PretendedCard(Lanes):
    """A card whose memory is the host's: twins of their own, marks that can be checked, copies through staging."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.has_queues = True
        self.marks = 0
        self.waited: list[Any] = []
        self.threads: set[int] = set()
        self.is_given_back = False

    @contextmanager
    def lane(self, after: Any = None) -> Iterator[None]:
        self.waited.append(after)
        self.threads.add(threading.get_ident())
        yield

    def mark(self) -> Any:
        self.marks += 1
        return self.marks

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 251, dtype=torch.uint8)

    def peak_bytes(self) -> int:
        return 77

    def give_back(self) -> None:
        self.is_given_back = True


@pytest.mark.parametrize("name", ["nf4", "plain"])
def test_on_a_card_rows_go_through_twins_and_parts_through_staging_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What a card adds to the work, without one: nothing is encoded from, or written from, the wrong memory."""
    checkpoint = save_checkpoint(tmp_path / "x.safetensors", TABLE)
    packing = packing_for(TABLE, name)
    plain = prepare(checkpoint, tmp_path / "plain", TABLE, packing)
    cards: list[PretendedCard] = []

    def card(device: torch.device) -> PretendedCard:
        cards.append(PretendedCard(device))
        return cards[-1]

    monkeypatch.setattr(encoding, "Lanes", card)
    monkeypatch.setattr(encoding, "_STAGING_BYTES", 100)
    read_few_rows(monkeypatch)
    store = prepare(
        checkpoint, tmp_path / "card", TABLE, packing, journal=tmp_path / "journal.jsonl"
    )
    found, expected = parts_in(store), parts_in(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    (used,) = cards
    appended = [mark for mark in used.waited if mark is not None]
    assert len(appended) == len(set(appended)), "each copy waits for a mark of its own"
    assert len(used.threads) > 1
    assert used.is_given_back
    assert list(read_journal(tmp_path / "journal.jsonl"))[-1]["peak_device_bytes"] == 77


# ---------------------------------------------------------------- memory and time, in a process of their own

MEASURE = """
import json, os, sys, time
from pathlib import Path
import torch
from prepare_support import packing_for, prepare, write_sparse_checkpoint
from outsize.base.table import ShapeTable, TensorSpec
from outsize.weights.budget import MemoryWatch

folder, shapes, budget = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
table = ShapeTable(tuple(
    TensorSpec(name, tuple(shape), "mlp", block, is_linear=True) for name, shape, block in shapes
))
source_bytes = write_sparse_checkpoint(folder / "x.safetensors", table)
packing = packing_for(table)
os.utime(folder / "x.safetensors", (1e9, 1e9))  # old enough for its digest to be remembered
prepare_it = lambda: prepare(folder / "x.safetensors", folder / "s", table, packing, budget_bytes=budget)
with MemoryWatch(0.005) as watch:
    began = time.monotonic()
    store = prepare_it()
    seconds = time.monotonic() - began
again = []
for _ in range(3):
    began = time.monotonic()
    prepare_it()
    again.append(time.monotonic() - began)
print(json.dumps({"growth": watch.growth_bytes, "seconds": seconds, "again": min(again),
    "source": source_bytes, "store": store.nbytes, "baseline": watch.baseline_bytes}))
"""


def measure(folder: Path, shapes: list[tuple[str, list[int], int | None]], budget: int) -> Any:
    paths = [str(Path(__file__).parent), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), json.dumps(shapes), str(budget)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    for path in folder.rglob("*.safetensors"):
        path.unlink()  # pytest keeps the folders of three runs
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    print(figures)  # noqa: T201 - the figures are what the run is for
    return figures


def test_preparing_200_mb_stays_within_a_tight_budget_and_is_instant_when_done(
    tmp_path: Path,
) -> None:
    shapes: list[tuple[str, list[int], int | None]] = [
        ("b.0.up.weight", [1024, 2048], 0),
        ("b.0.plain.weight", [8000, 2047], 0),
        ("b.1.plain.weight", [8000, 2047], 1),
        ("table.weight", [33000, 2048], None),
    ]
    budget = 80 * 2**20
    figures = measure(tmp_path, shapes, budget)
    assert figures["source"] > 200e6
    assert figures["growth"] < budget
    assert figures["again"] < 0.3


@pytest.mark.slow
def test_preparing_2_gb_takes_less_than_600_mb_above_the_interpreter(tmp_path: Path) -> None:
    shapes: list[tuple[str, list[int], int | None]] = [
        ("b.0.up.weight", [8192, 16384], 0),
        ("b.1.up.weight", [8192, 16384], 1),
        ("b.0.plain.weight", [16000, 8191], 0),
        ("b.1.plain.weight", [16000, 8191], 1),
        ("table.weight", [120000, 4096], None),
    ]
    figures = measure(tmp_path, shapes, 512 * 2**20)
    assert figures["source"] > 2e9
    assert figures["growth"] < 600e6
