"""Checkpoints as published: headers, layouts, row windows, identity, and what a recipe's `source` means on disk."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from outsize.base.errors import SourceError
from outsize.base.layout import Layout, Rule
from outsize.base.table import ShapeTable, TensorSpec
from outsize.weights import pieces
from outsize.weights.dtypes import dtype_code, torch_dtype
from outsize.weights.header import build_header, read_header
from outsize.weights.identity import DigestLedger, fingerprint
from outsize.weights.locate import locate_folder, locate_weights, parse_hub_id
from outsize.weights.mismatch import draw_together
from outsize.weights.source import Source

# ---------------------------------------------------------------- headers


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with exactly this header (JSON value or raw bytes) and these data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


FAULTS: dict[str, tuple[object, bytes, str]] = {
    "hole": ({"a": entry(0, 2, [2]), "b": entry(3, 5, [2])}, b"12345", r"b: .* hole after a"),
    "overlap": ({"a": entry(0, 3, [3]), "b": entry(2, 5, [3])}, b"12345", r"b: .* overlaps with a"),
    "cut short": ({"a": entry(0, 4, [4])}, b"12", r"2 B are missing"),
    "trailing": ({"a": entry(0, 1, [1])}, b"12", r"1 bytes follow the last tensor, a"),
    "size": ({"a": entry(0, 2, [3], "F32")}, b"12", r"a: F32 of shape \[3\] takes 12 bytes"),
    "dtype": ({"a": entry(0, 2, [2], "Q4")}, b"12", r"a: dtype 'Q4' is unknown"),
    "shape": ({"a": entry(0, 2, [-2])}, b"12", r"a: shape \[-2\]"),
    "bool": ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"1", r"a: shape"),
    "offsets": ({"a": entry(2, 0, [2])}, b"12", r"a: data_offsets \[2, 0\]"),
    "entry": ({"a": {"dtype": "U8"}}, b"", r"a: expected dtype, shape and data_offsets"),
    "metadata": ({"__metadata__": {"n": 1}}, b"", "__metadata__ must hold texts only"),
    "no JSON": (b'{"a":', b"", "no JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "no JSON"),
    "deep": (b'{"a":' + b"[" * 200_000, b"", "no JSON"),
    "list": (b"[]", b"", "does not begin with"),
    "twice": (b'{"a": {}, "a": {}}', b"", "a is named twice"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_a_header_is_named_with_file_and_tensor(tmp_path: Path, name: str) -> None:
    header, data, message = FAULTS[name]
    path = write_raw(tmp_path / "torn.safetensors", header, data)
    with pytest.raises(SourceError, match=message) as caught:
        read_header(path)
    assert "torn.safetensors" in str(caught.value)


def test_all_faults_of_a_header_are_named_at_once(tmp_path: Path) -> None:
    header = {"a": entry(0, 9, [1]), "b": entry(0, 1, [1], "X"), "c": entry(0, 1, [1])}
    with pytest.raises(SourceError) as caught:
        read_header(write_raw(tmp_path / "x.safetensors", header, b"1"))
    assert "a: U8 of shape [1]" in str(caught.value)
    assert "b: dtype 'X'" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"1234", "has 4 bytes"),
        (struct.pack("<Q", 100_000_001) + b"{}", "header of 100000001 bytes"),
        (struct.pack("<Q", 50) + b"{}", "ends after 10 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused_with_a_remedy(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_header(path)
    with pytest.raises(SourceError, match="cannot be read"):
        read_header(tmp_path / "absent.safetensors")


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5),
    alignment=st.sampled_from([8, 64, 4096]),
)
def test_a_built_header_is_read_back_by_us_and_by_the_library(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], alignment: int
) -> None:
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    rows, position = [], 0
    for number, shape in enumerate(shapes):
        size = 4 * int(torch.tensor(shape).prod()) if shape else 4
        rows.append((f"tensor.{number}", "F32", tuple(shape), position, position + size))
        position += size
    header = build_header(rows, {"note": "ä"}, alignment=alignment)
    path.write_bytes(header + bytes(position))
    read = read_header(path)
    assert len(header) % alignment == 0
    assert read.data_begin == len(header)
    assert {name: info.shape for name, info in read.tensors.items()} == {
        name: shape for name, _, shape, _, _ in rows
    }
    with safe_open(path, "pt") as library:
        assert library.metadata() == read.metadata == {"note": "ä"}
        assert {name: tuple(library.get_tensor(name).shape) for name in library.offset_keys()} == {
            name: shape for name, _, shape, _, _ in rows
        }


def test_dtype_codes_are_those_the_library_writes(tmp_path: Path) -> None:
    codes = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8"]
    tensors = {code: torch.zeros(3, dtype=torch_dtype(code)) for code in [*codes, "BOOL", "U16"]}
    save_file(tensors, tmp_path / "x.safetensors")
    read = read_header(tmp_path / "x.safetensors").tensors
    assert {name: info.dtype for name, info in read.items()} == {name: name for name in tensors}
    assert all(dtype_code(torch_dtype(code)) == code for code in tensors)
    with pytest.raises(SourceError, match="F4 has no counterpart"):
        torch_dtype("F4")
    with pytest.raises(SourceError, match="no safetensors code"):
        dtype_code(torch.complex128)


# ---------------------------------------------------------------- layouts and row windows

FUSED = Layout(
    "fused",
    (
        *(
            Rule(f"b.{{i}}.to_{letter}.weight", "blocks.{i}.qkv.weight", (k, 3))
            for k, letter in enumerate("qkv")
        ),
        Rule("out.weight", "final.weight", is_swapped=True),
        Rule("scale", "s"),
    ),
    prefixes=("", "model.diffusion_model."),
)
OWN = Layout("own")


def small_table() -> ShapeTable:
    blocks = [
        TensorSpec(f"b.{i}.to_{letter}.weight", (5, 8), "attention", i, is_linear=True)
        for i in range(2)
        for letter in "qkv"
    ]
    return ShapeTable(
        (*blocks, TensorSpec("out.weight", (6, 8), "head"), TensorSpec("scale", (), "buffer"))
    )


def fused_tensors(prefix: str = "") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"blocks.{i}.qkv.weight": torch.randn(15, 8, generator=generator).bfloat16()
        for i in range(2)
    }
    tensors["final.weight"] = torch.randn(6, 8, generator=generator)
    tensors["s"] = torch.tensor(3.5)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def expected_tensors() -> dict[str, torch.Tensor]:
    """The same by a plain load and chunk."""
    fused = fused_tensors()
    named = {"scale": fused["s"]}
    for i in range(2):
        chunks = fused[f"blocks.{i}.qkv.weight"].chunk(3)
        named |= {f"b.{i}.to_{letter}.weight": c for letter, c in zip("qkv", chunks, strict=True)}
    first, second = fused["final.weight"].chunk(2)
    return named | {"out.weight": torch.cat((second, first))}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("step", [1, 2, 4, 100])
def test_slabs_of_fused_and_swapped_tensors_equal_a_plain_load_and_chunk(
    tmp_path: Path, prefix: str, step: int
) -> None:
    save_file(fused_tensors(prefix), tmp_path / "x.safetensors")
    buffer = torch.empty(4096, dtype=torch.uint8)
    with Source([tmp_path / "x.safetensors"]) as source:
        mapped = source.locate((OWN, FUSED), small_table())
        assert (mapped.layout, mapped.prefix, mapped.extra) == ("fused", prefix, ())
        for name, expected in expected_tensors().items():
            windows = []
            for start in range(0, mapped.num_rows(name), step):
                stop = min(start + step, mapped.num_rows(name))
                rows = mapped.read_rows(name, start, stop, buffer)
                assert rows.data_ptr() == buffer.data_ptr(), "a window is a view of the buffer"
                windows.append(rows.clone())
            read = torch.cat(windows) if expected.dim() else windows[0]
            torch.testing.assert_close(read, expected, rtol=0, atol=0)
        assert mapped.num_bytes == sum(t.nbytes for t in expected_tensors().values())


def test_rows_that_are_not_there_and_short_buffers_are_errors(tmp_path: Path) -> None:
    save_file(fused_tensors(), tmp_path / "x.safetensors")
    with Source([tmp_path / "x.safetensors"]) as source:
        mapped = source.locate((FUSED,), small_table())
        with pytest.raises(IndexError, match=r"rows 3:7 of out\.weight, which has 6"):
            mapped.read_rows("out.weight", 3, 7, torch.empty(4096, dtype=torch.uint8))
        with pytest.raises(ValueError, match="take 96 bytes"):
            mapped.read_rows("out.weight", 0, 6, torch.empty(8, dtype=torch.uint8))


def test_threads_read_through_handles_of_their_own(tmp_path: Path) -> None:
    tensor = torch.arange(4000, dtype=torch.int32).view(1000, 4)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    wrong: list[int] = []

    def read(source: Source, first: int) -> None:
        buffer = torch.empty(16, dtype=torch.uint8)
        rows = range(first, 1000, 4)
        read = {row: source.read_rows("x", row, row + 1, buffer).tolist() for row in rows}
        wrong.extend(row for row in rows if read[row] != tensor[row : row + 1].tolist())

    with Source([tmp_path / "x.safetensors"]) as source:
        threads = [threading.Thread(target=read, args=(source, first)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(source._opened) == 4
    assert wrong == []


def test_a_file_cut_after_opening_is_an_error_not_a_short_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(64)}, path)
    with Source([path]) as source:
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(SourceError, match="8 bytes early"):
            source.read_rows("x", 0, 64, torch.empty(256, dtype=torch.uint8))


def test_missing_misshapen_and_foreign_tensors_are_all_named_in_one_error(tmp_path: Path) -> None:
    tensors = fused_tensors()
    del tensors["blocks.1.qkv.weight"], tensors["s"]
    tensors["final.weight"] = torch.zeros(6, 9)
    tensors |= {f"lora.{i}.down": torch.zeros(1) for i in range(4)}
    save_file(tensors, tmp_path / "x.safetensors")
    with Source([tmp_path / "x.safetensors"]) as source, pytest.raises(SourceError) as caught:
        source.locate((OWN, FUSED), small_table())
    message = str(caught.value)
    for part in (
        "missing (2 of 4)",
        "blocks.1.qkv.weight",
        "  s\n",
        "final.weight has shape [6, 9], expected [6, 8]",
        "lora.{0..3}.down (4)",
        "x.safetensors",
        "layout 'fused'",
    ):
        assert part in message, message


def test_tensors_of_no_use_are_allowed_and_counted(tmp_path: Path) -> None:
    save_file(fused_tensors() | {"lm_head.weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    with Source([tmp_path / "x.safetensors"]) as source:
        assert source.locate((FUSED,), small_table()).extra == ("lm_head.weight",)


def test_a_pointwise_convolution_serves_as_a_linear(tmp_path: Path) -> None:
    """The first Flux codec keeps attention as 1x1 convolutions; the numbers are those of the linear."""
    save_file({"x": torch.arange(12.0).view(3, 4, 1, 1)}, tmp_path / "x.safetensors")
    with Source([tmp_path / "x.safetensors"]) as source:
        mapped = source.locate((OWN,), ShapeTable((TensorSpec("x", (3, 4), "attention"),)))
        rows = mapped.read_rows("x", 1, 3, torch.empty(64, dtype=torch.uint8))
    assert torch.equal(rows, torch.arange(4.0, 12.0).view(2, 4))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x.weight": torch.zeros(8, 2, dtype=torch.uint8)}, "stored as U8: .* already quantised"),
        (
            {
                "x.weight": torch.zeros(8, 2).to(torch.float8_e4m3fn),
                "x.weight_scale_inv": torch.ones(1, 1),
            },
            "quantised as FP8 in blocks, which is not read",
        ),
        (
            {
                "x.weight": torch.zeros(8, 2).to(torch.float8_e4m3fn),
                "x.weight_range": torch.ones(1),
            },
            "x.weight has x.weight_range beside it, and what that does to it is not known",
        ),
    ],
)
def test_quantised_weights_are_not_mistaken_for_plain_ones(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    table = ShapeTable((TensorSpec("x.weight", (8, 2), "mlp"),))
    with (
        Source([tmp_path / "x.safetensors"]) as source,
        pytest.raises(SourceError, match=message),
    ):
        source.locate((OWN,), table)


def test_two_files_that_hold_the_same_tensor_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(SourceError, match=r"x: in a\.safetensors and in b\.safetensors"):
        Source([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


def test_names_that_differ_in_numbers_only_are_drawn_together() -> None:
    names = [(f"blocks.{i}.w{j}.{{}}", "") for i in (0, 1, 2, 5) for j in (1,)]
    assert draw_together([*names, ("head.2.x", "bad")]) == [
        "blocks.{0..2,5}.w1.{} (4)",
        "head.2.x bad",
    ]


# ---------------------------------------------------------------- identity


def settled(path: Path) -> Path:
    """Make a file's time of change old enough to be believed."""
    old = time.time() - 60
    os.utime(path, (old, old))
    return path


def identity(files: list[Path], ledger: DigestLedger | None = None, **options: Any) -> str:
    """The fingerprint of the small table's tensors in some files."""
    with Source(files) as source:
        return fingerprint(source.locate((OWN, FUSED), small_table()), ledger, **options)


def test_identity_is_that_of_the_tensors_read_whatever_the_files_are_called_and_hold_besides(
    tmp_path: Path,
) -> None:
    """Shards, names of files and tensors that nobody reads make no difference; any byte that is read does."""
    tensors = fused_tensors()
    names = list(tensors)
    save_file(tensors, tmp_path / "a.safetensors")
    for number, some in enumerate((names[:2], names[2:])):
        save_file({name: tensors[name] for name in some}, tmp_path / f"b{number}.safetensors")
    save_file(tensors | {"unused": torch.ones(5)}, tmp_path / "c.safetensors")
    whole = identity([tmp_path / "a.safetensors"])
    assert identity([tmp_path / "b0.safetensors", tmp_path / "b1.safetensors"]) == whole
    assert identity([tmp_path / "c.safetensors"]) == whole
    for name in names:
        other = {key: value.clone() for key, value in tensors.items()}
        other[name].view(-1)[-1] += 1
        save_file(other, tmp_path / "d.safetensors")
        assert identity([tmp_path / "d.safetensors"]) != whole, name
    save_file(tensors | {"s": tensors["s"].view(torch.int32)}, tmp_path / "e.safetensors")
    (tmp_path / "e.safetensors").write_bytes(
        (tmp_path / "e.safetensors").read_bytes().replace(b'"I32"', b'"F32"')
    )
    assert identity([tmp_path / "e.safetensors"]) == whole, "it is the bytes that count"
    save_file(tensors | {"s": tensors["s"].double()}, tmp_path / "f.safetensors")
    assert identity([tmp_path / "f.safetensors"]) != whole


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 40),
    row_bytes=st.integers(1, 60),
    piece=st.integers(1, 100),
    slabs=st.lists(st.integers(100, 5000), min_size=2, max_size=2),
)
def test_a_tensors_digest_does_not_depend_on_the_windows_it_is_read_in(
    num_rows: int, row_bytes: int, piece: int, slabs: list[int]
) -> None:
    """Whatever the slab: windows are whole pieces, cover the rows, and give the same digests, those of hashlib."""
    content = memoryview(bytes(i * 37 % 251 for i in range(num_rows * row_bytes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", piece)
        found = []
        for slab in slabs:
            windows = list(pieces.windows_of("x", num_rows, row_bytes, slab))
            raw = [content[w.start * row_bytes : w.stop * row_bytes] for w in windows]
            assert b"".join(raw) == content
            assert all(len(one) <= slab for one in raw)
            found.append(b"".join(pieces.piece_digests(one, row_bytes) for one in raw))
    step = max(1, piece // row_bytes) * row_bytes
    expected = [
        hashlib.sha256(content[i : i + step]).digest() for i in range(0, len(content), step)
    ]
    assert found == [b"".join(expected)] * 2


def test_a_known_source_is_not_hashed_again_until_a_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    ledger = DigestLedger(tmp_path / "digests.json")

    def look() -> tuple[str, bool]:
        calls: list[int] = []
        found = identity([path], ledger, progress=lambda done, _total: calls.append(done))
        return found, bool(calls)

    save_file(fused_tensors(), path)
    first, was_read = look()
    assert was_read
    assert look() == (first, True), "a file this young is not believed yet"
    settled(path)
    assert look() == (first, True)
    assert look() == (first, False)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    second, was_read = look()
    assert second != first
    assert was_read
    settled(path)
    assert look() == (second, True)
    (tmp_path / "digests.json").write_text("torn {")
    assert look() == (second, True), "a torn ledger costs a reading, nothing else"
    assert look() == (second, False)
    assert len(json.loads((tmp_path / "digests.json").read_text())) == 1, "one row for one place"


def test_a_file_that_changes_while_it_is_hashed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(fused_tensors(), path)
    with pytest.raises(SourceError, match=r"x\.safetensors changed while being read"):
        identity([path], progress=lambda _done, _total: os.utime(path, (1, 1)))


# ---------------------------------------------------------------- where files are


def put(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def put_index(path: Path, *shards: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(shards)}}))


def names_found(source: Path, sub_folder: str = "") -> list[str]:
    return [file.name for file in locate_weights(str(source), sub_folder=sub_folder)]


def test_a_diffusers_folder_gives_the_slot_and_no_variant(tmp_path: Path) -> None:
    put(
        tmp_path,
        "model_index.json",
        "root.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "transformer/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "transformer/a-00001-of-00002.safetensors",
        "transformer/a-00002-of-00002.safetensors",
    )
    put_index(
        tmp_path / "transformer/diffusion_pytorch_model.safetensors.index.json",
        "a-00001-of-00002.safetensors",
        "a-00002-of-00002.safetensors",
    )
    assert names_found(tmp_path, "vae") == ["diffusion_pytorch_model.safetensors"]
    assert names_found(tmp_path, "transformer") == [
        "a-00001-of-00002.safetensors",
        "a-00002-of-00002.safetensors",
    ]
    with pytest.raises(SourceError, match="without the sub-folder 'text_encoder'"):
        locate_weights(str(tmp_path), sub_folder="text_encoder")


def test_single_files_folders_of_shards_and_indices_are_sources(tmp_path: Path) -> None:
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    put(tmp_path / "shards", *shards, "README.md")
    put(tmp_path / "one", "flux2-dev.safetensors")
    put_index(tmp_path / "shards.safetensors.index.json", f"shards/{shards[0]}")
    assert names_found(tmp_path / "shards", "transformer") == shards
    assert names_found(tmp_path / "one", "transformer") == ["flux2-dev.safetensors"]
    assert names_found(tmp_path / "one/flux2-dev.safetensors") == ["flux2-dev.safetensors"]
    assert names_found(tmp_path / "shards.safetensors.index.json") == shards[:1]
    (tmp_path / "shards" / shards[1]).unlink()
    with pytest.raises(SourceError, match=f"lacks 1 of 3 shards: {shards[1]}"):
        names_found(tmp_path / "shards")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.fp16.safetensors"], "only files of a variant"),
        (["a.safetensors", "b.safetensors"], "several checkpoints"),
        (["pytorch_model.bin"], "pickled checkpoint runs code"),
        (["config.json"], "no safetensors file"),
    ],
)
def test_what_cannot_be_chosen_plainly_is_refused(
    tmp_path: Path, names: list[str], message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        locate_weights(str(put(tmp_path, *names)))


def test_one_pickled_file_and_a_path_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="pickled"):
        locate_weights(str(put(tmp_path, "flux.ckpt") / "flux.ckpt"))
    with pytest.raises(SourceError, match="does not exist"):
        locate_weights(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/x.safetensors",
        "C:\\x.safetensors",
        "a\\..\\..\\x.safetensors",
        "x.bin",
    ],
)
def test_an_index_may_not_point_outside_its_folder(tmp_path: Path, shard: str) -> None:
    put(tmp_path, "x.safetensors")
    put_index(tmp_path / "m/model.safetensors.index.json", shard)
    with pytest.raises(SourceError, match="inside its folder"):
        locate_weights(str(tmp_path / "m"))


def test_shards_that_an_index_names_and_the_folder_lacks_are_listed(tmp_path: Path) -> None:
    put_index(tmp_path / "model.safetensors.index.json", "a.safetensors", "b.safetensors")
    put(tmp_path, "a.safetensors")
    with pytest.raises(SourceError, match=r"1 are missing: b\.safetensors"):
        locate_weights(str(tmp_path))


def test_tokenizer_folders_are_found_beside_the_weights(tmp_path: Path) -> None:
    put(tmp_path, "tokenizer/tokenizer.json", "one.safetensors")
    assert locate_folder(str(tmp_path), "tokenizer") == tmp_path / "tokenizer"
    assert locate_folder(str(tmp_path / "one.safetensors"), "tokenizer").name == "tokenizer"
    with pytest.raises(SourceError, match="no folder 'scheduler'"):
        locate_folder(str(tmp_path), "scheduler")


def test_hub_ids_are_told_from_paths() -> None:
    parsed = [
        parse_hub_id(text)
        for text in ("a/b", "a/b@v1", "a/b/c/d.safetensors", "a", "a/b/c", "../b", "/a/b", "a\\b/c")
    ]
    found = [(hub.repo, hub.revision, hub.file) if hub else None for hub in parsed]
    assert found == [
        ("a/b", "main", None),
        ("a/b", "v1", None),
        ("a/b", "main", "c/d.safetensors"),
        *[None] * 5,
    ]


def test_a_cached_repository_is_used_without_the_network(tmp_path: Path) -> None:
    repo = tmp_path / "models--owner--name"
    put(
        repo / "snapshots/abc", "vae/model.safetensors", "tokenizer/tokenizer.json", "x.safetensors"
    )
    put(repo, "refs/main")
    (repo / "refs/main").write_text("abc")
    found = locate_weights("owner/name", sub_folder="vae", cache_dir=tmp_path)
    assert found == (repo / "snapshots/abc/vae/model.safetensors",)
    folder = locate_folder("owner/name", "tokenizer", cache_dir=tmp_path, offline=True)
    assert folder == repo / "snapshots/abc/tokenizer"
    with pytest.raises(
        SourceError, match=r"offline.*hf download owner/name --include .transformer/"
    ):
        locate_weights("owner/name", sub_folder="transformer", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "find", [locate_weights, lambda s, **k: locate_folder(s, "tokenizer", **k)]
)
def test_offline_what_is_missing_is_named_with_the_command(
    tmp_path: Path, find: Callable[..., object]
) -> None:
    with pytest.raises(SourceError, match=r"hf download owner/name") as caught:
        find("owner/name", cache_dir=tmp_path, offline=True)
    assert "offline" in str(caught.value)


# ---------------------------------------------------------------- a hub of our own, over HTTP

HUB = r"""
import hashlib, json, re, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

root, asked, COMMIT = Path(sys.argv[1]), [], "c" * 40

class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_): pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        if path == "/stop":
            self.answer(200, json.dumps(asked).encode())
            threading.Thread(target=server.shutdown).start()
        elif "gated/" in path:
            self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="gated")
        elif "none/" in path:
            self.answer(404, X_Error_Code="RepoNotFound", X_Error_Message="none")
        elif found := re.fullmatch(r"/api/models/(own/\w+)/(revision|tree)/\w+", path):
            folder = root / found[1]
            files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            names = [p.relative_to(folder).as_posix() for p in files]
            body = {"id": found[1], "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            if found[2] == "tree":
                body = [
                    {"type": "file", "path": n, "size": p.stat().st_size, "oid": "0" * 40}
                    for n, p in zip(names, files)
                ]
            self.answer(200, json.dumps(body).encode(), Content_Type="application/json")
        elif found := re.fullmatch(r"/(own/\w+)/resolve/\w+/(.+)", path):
            if self.command == "GET":
                asked.append(found[2])
            body = (root / found[1] / found[2]).read_bytes()
            etag = '"' + hashlib.sha256(body).hexdigest() + '"'
            self.answer(200, body, ETag=etag, X_Repo_Commit=COMMIT, Content_Length=len(body))
        else:
            self.answer(404)

    do_HEAD = do_GET

server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
print(server.server_port, flush=True)
server.serve_forever()
"""

ASK = """
import json, sys
from pathlib import Path
from outsize.base.errors import SourceError
from outsize.weights.locate import locate_folder, locate_weights

answers = []
for source, sub_folder, is_folder in json.loads(sys.argv[2]):
    cache = Path(sys.argv[1])
    try:
        if is_folder:
            found = [locate_folder(source, sub_folder, cache_dir=cache)]
        else:
            found = locate_weights(source, sub_folder=sub_folder, cache_dir=cache)
        answers.append([Path(f).as_posix().split("snapshots/")[1] for f in found])
    except SourceError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def test_only_needed_files_are_fetched_from_the_hub_and_its_refusals_are_explained(
    tmp_path: Path,
) -> None:
    repo = put(
        tmp_path / "hub/own/pipe",
        "model_index.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.bin",
        "transformer/diffusion_pytorch_model.fp16.safetensors",
        "flux2-dev.safetensors",
        "tokenizer/tokenizer.json",
        "tokenizer/big.bin",
    )
    put(repo, "vae/diffusion_pytorch_model.safetensors", "transformer/a.safetensors")
    put_index(repo / "transformer/diffusion_pytorch_model.safetensors.index.json", "a.safetensors")
    put(tmp_path / "hub/own/encoder", "config.json", "model.safetensors")
    for path in (tmp_path / "hub").rglob("*.*"):
        # what is empty, or the same as another file, is not fetched at all
        path.write_bytes(path.read_bytes() or str(path).encode())
    wanted = [
        ("own/pipe", "vae", False),
        ("own/pipe", "transformer", False),
        ("own/pipe/flux2-dev.safetensors", "transformer", False),
        ("own/pipe", "tokenizer", True),
        ("own/encoder", "text_encoder", False),
        ("own/pipe", "text_encoder", False),
        ("gated/x", "vae", False),
        ("none/x", "vae", False),
    ]
    server = subprocess.Popen(
        [sys.executable, "-c", HUB, str(tmp_path / "hub")], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    with server.stdout as output:
        address = f"http://127.0.0.1:{output.readline().strip()}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": address,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HOME": str(tmp_path / "home"),
            "NO_PROXY": "127.0.0.1",
        }
        child = subprocess.run(
            [sys.executable, "-c", ASK, str(tmp_path / "cache"), json.dumps(wanted)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{address}/stop") as reply:
            asked = json.loads(reply.read())
        server.wait(10)
    assert child.returncode == 0, child.stderr
    answers = json.loads(child.stdout.splitlines()[-1])
    commit = "c" * 40
    assert answers[:5] == [
        [f"{commit}/vae/diffusion_pytorch_model.safetensors"],
        [f"{commit}/transformer/a.safetensors"],
        [f"{commit}/flux2-dev.safetensors"],
        [f"{commit}/tokenizer"],
        [f"{commit}/model.safetensors"],
    ]
    assert "has no folder 'text_encoder'" in answers[5]
    assert "accept its licence at https://huggingface.co/gated/x" in answers[6]
    assert "none/x is no folder here, and the hub has no such repository" in answers[7]
    assert sorted(asked) == [
        "config.json",
        "flux2-dev.safetensors",
        "model.safetensors",
        "tokenizer/tokenizer.json",
        "transformer/a.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ]
