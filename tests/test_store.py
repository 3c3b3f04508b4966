"""Packets and stores: what is written is what is read, and every way of being torn is found and named."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from outsize.base.errors import DoesNotFit, SourceError, StoreBroken
from outsize.base.files import json_digest
from outsize.base.parts import Part
from outsize.base.table import ShapeTable, TensorSpec
from outsize.devices._host import pageable
from outsize.weights.budget import (
    MAX_SLAB_BYTES,
    OVERHEAD_BYTES,
    MemoryWatch,
    Shares,
    private_bytes,
    share_out,
    smallest_budget,
)
from outsize.weights.dtypes import torch_dtype
from outsize.weights.header import read_header
from outsize.weights.packet import ALIGNMENT, Packet, plan_packet, view
from outsize.weights.pieces import PIECE_BYTES
from outsize.weights.reading import StoreReader, _read_direct, why_no_direct_reads
from outsize.weights.store import DATA_ALIGNMENT, MANIFEST, STAMPS, Store, open_store
from outsize.weights.store_writer import StoreWriter

TABLE = ShapeTable(
    (
        TensorSpec("emb.weight", (7, 3), "embed"),
        TensorSpec("step", (), "buffer"),
        *(
            spec
            for block in range(3)
            for spec in (
                TensorSpec(f"b.{block}.norm", (5,), "norm", block),
                TensorSpec(f"b.{block}.up.weight", (30, 16), "mlp", block, is_linear=True),
                TensorSpec(f"b.{block}.up.bias", (30,), "mlp", block),
                TensorSpec(f"b.{block}.down.weight", (16, 30), "mlp", block, is_linear=True),
            )
        ),
    )
)


def parts_of(spec: TensorSpec) -> tuple[Part, ...]:
    if spec.is_linear:
        rows, columns = spec.shape
        return Part("codes", "U8", (rows, columns // 2)), Part("scales", "F32", (rows, 1))
    return (Part("", "BF16", spec.shape),)


PARTS = {spec.name: parts_of(spec) for spec in TABLE}
BLOCKS: tuple[int | None, ...] = (None, 0, 1, 2)
PACKETS = {block: plan_packet(TABLE.of_block(block), PARTS) for block in BLOCKS}


def values_of(packet: Packet) -> dict[str, torch.Tensor]:
    """Seeded values for every entry."""
    values = {}
    for entry in packet.entries:
        generator = torch.Generator().manual_seed(len(entry.key) + entry.offset)
        raw = torch.randint(0, 100, entry.shape, generator=generator)
        values[entry.key] = raw.to(torch_dtype(entry.dtype))
    return values


def write_blocks(writer: StoreWriter, blocks: tuple[int | None, ...] = BLOCKS) -> None:
    for block in blocks:
        with writer.block(block) as file:
            for entry in PACKETS[block].entries:
                file.append(entry, values_of(PACKETS[block])[entry.key])


def new_writer(folder: Path) -> StoreWriter:
    return StoreWriter(folder, maker="m" * 64, packets=PACKETS)


def finish(writer: StoreWriter) -> Store:
    return writer.finish("k" * 64, {"source": "test"})


def write_store(folder: Path) -> Store:
    with new_writer(folder) as writer:
        assert writer.keep_complete() == {}
        write_blocks(writer)
        return finish(writer)


def read_checked(store: Store, block: int | None, *targets: torch.Tensor) -> None:
    with StoreReader(store).checked(block) as reading:
        for target in targets:
            reading.into(target)


def content_of(folder: Path) -> dict[str, bytes]:
    """All bytes of a store; the stamps hold times and the lock holds nothing."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name not in {STAMPS, ".lock"}
    }


# ---------------------------------------------------------------- packets


def test_linears_come_first_and_everything_is_aligned() -> None:
    packet = PACKETS[1]
    assert packet.tensors() == ("b.1.up.weight", "b.1.down.weight", "b.1.norm", "b.1.up.bias")
    streamed = [entry for entry in packet.entries if entry.offset < packet.streamed_bytes]
    assert {entry.tensor for entry in streamed} == {"b.1.up.weight", "b.1.down.weight"}
    assert all(entry.offset % ALIGNMENT == 0 for entry in packet.entries)
    assert packet.num_bytes % ALIGNMENT == packet.streamed_bytes % ALIGNMENT == 0
    assert packet.parts("b.1.up.weight")["scales"].key == "b.1.up.weight.scales"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 20), max_size=3),
            st.booleans(),
            st.sampled_from(["F32", "BF16", "U8", "I64"]),
        ),
        max_size=8,
    )
)
def test_entries_and_pads_cover_a_packet_exactly(
    tensors: list[tuple[list[int], bool, str]],
) -> None:
    specs = [
        TensorSpec(f"t{i}", tuple(shape), "mlp", 0, is_linear=is_linear)
        for i, (shape, is_linear, _) in enumerate(tensors)
    ]
    parts = {
        spec.name: (Part("", dtype, spec.shape),)
        for spec, (_, _, dtype) in zip(specs, tensors, strict=True)
    }
    packet = plan_packet(specs, parts)
    position = 0
    for entry in sorted((*packet.entries, *packet.pads()), key=lambda e: (e.offset, e.end)):
        assert entry.offset == position
        position = entry.end
    assert position == packet.num_bytes
    assert Packet.from_json(json.loads(json.dumps(packet.as_json()))) == packet


def test_views_share_memory_with_the_buffer() -> None:
    packet = PACKETS[None]
    buffer = torch.zeros(packet.num_bytes, dtype=torch.uint8)
    for entry in packet.entries:
        view(entry, buffer).copy_(values_of(packet)[entry.key])
    for entry in packet.entries:
        seen = view(entry, buffer)
        assert seen.shape == entry.shape
        assert torch.equal(seen, values_of(packet)[entry.key])
        assert seen.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


# ---------------------------------------------------------------- writing and reading


def test_a_store_reads_back_what_was_written(tmp_path: Path) -> None:
    written = write_store(tmp_path / "s")
    store = open_store(tmp_path / "s", full=True)
    assert store == written
    assert {file.block for file in store.files} == {None, 0, 1, 2}
    assert store.nbytes == sum(packet.num_bytes for packet in PACKETS.values())
    for block in BLOCKS:
        packet = store.packet(block)
        assert packet == PACKETS[block]
        buffer = torch.empty(packet.num_bytes, dtype=torch.uint8)
        read_checked(store, block, buffer)
        for entry in packet.entries:
            assert torch.equal(view(entry, buffer), values_of(packet)[entry.key])


def test_the_safetensors_library_reads_every_file_and_data_begin_at_a_page(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s")
    for block in BLOCKS:
        loaded = load_file(store.path(block))
        named = {name: t for name, t in loaded.items() if not name.startswith("__pad__")}
        values = values_of(PACKETS[block])
        assert named.keys() == values.keys()
        assert all(torch.equal(named[name], values[name]) for name in values)
        header = read_header(store.path(block))
        assert header.data_begin % DATA_ALIGNMENT == 0
        assert header.file_bytes - header.data_begin == PACKETS[block].num_bytes


def test_rows_of_an_entry_may_be_appended_in_pieces(tmp_path: Path) -> None:
    whole = content_of(write_store(tmp_path / "whole").folder)
    with new_writer(tmp_path / "rows") as writer:
        for block in BLOCKS:
            with writer.block(block) as file:
                for entry in PACKETS[block].entries:
                    value = values_of(PACKETS[block])[entry.key]
                    for rows in value.split(2) if value.dim() else [value]:
                        file.append(entry, rows)
        finish(writer)
    assert content_of(tmp_path / "rows") == whole


def test_a_packet_that_is_not_wholly_written_leaves_no_file(tmp_path: Path) -> None:
    first, second = PACKETS[0].entries[:2]
    values = values_of(PACKETS[0])

    def attempt(act: Callable[..., None], match: str) -> None:
        with (
            new_writer(tmp_path) as writer,
            pytest.raises(ValueError, match=match),
            writer.block(0) as file,
        ):
            act(file)
        assert not list(tmp_path.glob("*block*"))

    attempt(lambda file: file.append(second, values[second.key]), "not wholly written: b.0.up")
    attempt(lambda file: file.append(first, values[first.key]), "not wholly written: b.0.up")
    attempt(lambda file: file.append(first, values[first.key].float()), "is U8, given")
    attempt(lambda file: file.append(first, torch.zeros(999, dtype=torch.uint8)), "would leave it")


# ---------------------------------------------------------------- torn, altered, missing


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda s: (s / "block-001.safetensors").unlink(), r"block-001.*missing"),
    "truncated": (lambda s: os.truncate(s / "rest.safetensors", 4200), r"rest.*torn: 4200 bytes"),
    "empty": (lambda s: os.truncate(s / "block-002.safetensors", 0), r"block-002.*torn: 0 bytes"),
    "header": (lambda s: flip(s / "block-000.safetensors", 40), r"block-000.*header was altered"),
    "data": (lambda s: flip(s / "block-000.safetensors", -1), r"block-000.*data are not those"),
    "manifest": (
        lambda s: (s / MANIFEST).write_text(
            (s / MANIFEST).read_text().replace('"source": "test"', '"source": "tesT"')
        ),
        r"manifest\.json was altered",
    ),
    "torn manifest": (lambda s: os.truncate(s / MANIFEST, 50), r"manifest\.json cannot be read"),
    "no manifest": (lambda s: (s / MANIFEST).unlink(), "its preparing did not finish"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_every_damage_is_found_and_named_on_opening(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    write_store(tmp_path / "s")
    damage(tmp_path / "s")
    with pytest.raises(StoreBroken, match=message):
        open_store(tmp_path / "s")


def test_a_manifest_cannot_name_a_file_outside_its_store(tmp_path: Path) -> None:
    write_store(tmp_path / "s")
    values = json.loads((tmp_path / "s" / MANIFEST).read_bytes())
    del values["digest"]
    values["files"][0]["name"] = "../rest.safetensors"
    values["digest"] = json_digest(values)
    (tmp_path / "s" / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(StoreBroken, match=r"'\.\./rest\.safetensors' is not the file of block"):
        open_store(tmp_path / "s")


def test_all_damaged_files_are_named_at_once(tmp_path: Path) -> None:
    write_store(tmp_path)
    for name in ("missing", "truncated", "data"):
        DAMAGE[name][0](tmp_path)
    with pytest.raises(StoreBroken) as caught:
        open_store(tmp_path)
    for file in ("rest", "block-000", "block-001"):
        assert f"{file}.safetensors: " in str(caught.value)
    assert "block-002" not in str(caught.value)
    with pytest.raises(StoreBroken, match="is not there"):
        open_store(tmp_path / "absent")


def test_a_bit_flipped_behind_the_clock_is_found_by_full_checks_and_verified_reads(
    tmp_path: Path,
) -> None:
    store = write_store(tmp_path)
    path = store.path(1)
    status = path.stat()
    flip(path, -5)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    buffer = torch.empty(PACKETS[1].num_bytes, dtype=torch.uint8)
    assert open_store(tmp_path) == store, "the quick check believes size, header and time"
    with pytest.raises(StoreBroken, match=r"block-001.*SHA-256"):
        read_checked(store, 1, buffer)
    with pytest.raises(StoreBroken, match=r"block-001.*SHA-256"):
        open_store(tmp_path, full=True)


def test_a_block_that_vanishes_or_shrinks_while_open_is_named(tmp_path: Path) -> None:
    store = write_store(tmp_path)
    buffer = torch.empty(PACKETS[1].num_bytes, dtype=torch.uint8)
    os.truncate(store.path(1), 5000)
    with pytest.raises(StoreBroken, match=r"block-001.*early"):
        read_checked(store, 1, buffer)
    store.path(1).unlink()
    with pytest.raises(StoreBroken, match="block-001"):
        read_checked(store, 1, buffer)


def test_a_copied_store_is_hashed_once_and_believed_from_then_on(tmp_path: Path) -> None:
    store = write_store(tmp_path)
    for file in store.files:
        os.utime(tmp_path / file.name, (1, 1))
    before = (tmp_path / STAMPS).read_bytes()
    assert open_store(tmp_path) == store
    assert (tmp_path / STAMPS).read_bytes() != before
    (tmp_path / STAMPS).write_text("torn {")
    assert open_store(tmp_path) == store


# ---------------------------------------------------------------- reading while training


@pytest.mark.parametrize("way", ["direct", "buffered"])
def test_streamed_bytes_are_read_from_anywhere_into_anything(tmp_path: Path, way: str) -> None:
    """Aligned or not, past the page cache or through it: the bytes are those of the packet."""
    reader = StoreReader(write_store(tmp_path))
    if way == "buffered":
        reader.why_buffered = "a test says so"
    elif reader.why_buffered:
        pytest.skip(reader.why_buffered)
    packet = PACKETS[1]
    whole = torch.empty(packet.num_bytes, dtype=torch.uint8)
    read_checked(reader.store, 1, whole[:100], whole[100:])
    room = pageable(packet.streamed_bytes + 8192)
    for begin, shift in ((0, 0), (0, 256), (256, 0), (packet.streamed_bytes - 7, 1)):
        into = room[shift : shift + packet.streamed_bytes - begin]
        into.fill_(255)
        reader.read_streamed(1, begin, into)
        assert torch.equal(into, whole[begin : packet.streamed_bytes]), f"from {begin} at {shift}"
    small = torch.empty(packet.num_bytes - packet.streamed_bytes, dtype=torch.uint8)
    reader.read_small(1, small)
    assert torch.equal(small, whole[packet.streamed_bytes :])


def test_direct_reads_of_more_than_a_page_equal_ordinary_ones(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = torch.randint(0, 256, (3 * 4096 + 1000,), dtype=torch.uint8)
    path.write_bytes(content.numpy().tobytes())
    if why := why_no_direct_reads(path):
        pytest.skip(why)
    into = pageable(2 * 4096 + 1000)
    _read_direct(path, 4096, into.numpy().data)
    assert torch.equal(into, content[4096:])
    for size in (3 * 4096, 2 * 4096 + 1001):
        with pytest.raises(SourceError, match="bytes early"):
            _read_direct(path, 4096, pageable(size).numpy().data)


def test_a_streamed_read_names_the_file_that_is_gone_or_shrank(tmp_path: Path) -> None:
    reader = StoreReader(write_store(tmp_path))
    into = pageable(PACKETS[1].streamed_bytes)
    os.truncate(reader.store.path(1), 4096)
    with pytest.raises(StoreBroken, match=r"block-001.*early"):
        reader.read_streamed(1, 0, into)
    with pytest.raises(StoreBroken, match=r"block-001.*early"):
        reader.read_small(1, torch.empty(10, dtype=torch.uint8))
    reader.store.path(1).unlink()
    with pytest.raises(StoreBroken, match="block-001"):
        reader.read_streamed(1, 0, into)


# ---------------------------------------------------------------- going on after an interruption


def test_a_writer_keeps_whole_blocks_and_writes_the_rest(tmp_path: Path) -> None:
    undisturbed = content_of(write_store(tmp_path / "whole").folder)
    folder = tmp_path / "s"
    with new_writer(folder) as writer:
        write_blocks(writer, (None, 0, 1))
    flip(folder / "block-001.safetensors", -1)
    (folder / ".tmp-block-002.safetensors-abc").write_bytes(b"half a block")
    with new_writer(folder) as writer:
        assert writer.keep_complete().keys() == {None, 0}
        write_blocks(writer, (1, 2))
        finish(writer)
    assert content_of(folder) == undisturbed


def test_files_that_were_made_in_another_way_are_not_kept(tmp_path: Path) -> None:
    write_store(tmp_path)
    other = StoreWriter(tmp_path, maker="n" * 64, packets=PACKETS)
    with other as writer:
        assert writer.keep_complete() == {}
    with pytest.raises(StoreBroken, match="did not finish"):
        open_store(tmp_path)


def test_a_second_writer_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        writer = StoreWriter(tmp_path, maker="m", packets={}, on_wait=waits.set)
        with writer:
            order.append("second")

    with new_writer(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


# ---------------------------------------------------------------- host memory


def test_a_watch_sees_memory_that_comes_and_goes() -> None:
    with MemoryWatch(interval_s=0.002) as watch:
        held = torch.ones(64 * 2**20, dtype=torch.uint8)
        threading.Event().wait(0.02)
        del held
    assert 60 * 2**20 < watch.growth_bytes < 90 * 2**20
    assert abs(private_bytes() - watch.baseline_bytes) < 20 * 2**20


def test_a_budget_is_shared_out_or_refused_naming_the_smallest() -> None:
    specs = (TensorSpec("w", (1000, 1000), "mlp", 0, is_linear=True),)
    packed = {"w": (Part("codes", "U8", (1000, 500)),)}
    plain = {"w": (Part("", "BF16", (1000, 1000)),)}
    least = OVERHEAD_BYTES + 2 * PIECE_BYTES
    assert smallest_budget(specs, packed) == least + 2 * 500_000
    assert smallest_budget(specs, plain) == least, "rows are not gathered"
    budget = smallest_budget(specs, packed)

    def share(budget_bytes: int, **options: int) -> Shares:
        return share_out(
            specs, packed, row_bytes=4000, budget_bytes=budget_bytes, max_slabs=18, **options
        )

    assert share(budget) == Shares(1, PIECE_BYTES, PIECE_BYTES)
    large = share(2 * 2**30)
    assert (large.num_slabs, large.slab_bytes) == (18, MAX_SLAB_BYTES)
    for size in (budget, 2 * budget, 2**30, 2**40):
        got = share(size)
        assert got.num_slabs * got.slab_bytes + got.queue_bytes == size - OVERHEAD_BYTES - 10**6
    card = share(2**40, device_bytes=2 * 2**30)
    assert card.num_slabs * card.slab_bytes + card.queue_bytes < 2**30
    with pytest.raises(DoesNotFit, match=r"of it for the encoded parts of w.*--ram 73MiB"):
        share(budget - 2)
    with pytest.raises(DoesNotFit, match=r"on the card needs 1\.0 GiB.*--device cpu"):
        share(2**40, device_bytes=2**30)
