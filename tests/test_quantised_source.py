"""Checkpoints that transformers and bitsandbytes wrote in 4 bits: taken as they are, bit for bit what bitsandbytes decodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from language_support import NAMES
from prepare_support import content_of
from quantised_support import (
    altered,
    decoded_by_bitsandbytes,
    decoded_by_us,
    packing_of,
    source_of,
    tensors_in,
    want,
    write_plain,
    write_quantised,
)
from torch import Tensor

from outsize.app import _encoding as encoding
from outsize.app.prepare import How, prepare_in_cache
from outsize.app.wanted import known_key, store_key
from outsize.base.journal import Journal, read_journal
from outsize.formats._packing import Packing
from outsize.weights import pieces
from outsize.weights.budget import Shares
from outsize.weights.store import Store, open_store

pytest.importorskip("bitsandbytes", exc_type=ImportError)

MIXED = ("lm_head", "layers.1.mlp.down_proj", "layers.2.self_attn.q_proj")


@dataclass(frozen=True)
class Files:
    """Where one family's checkpoints are."""

    family: str
    root: Path

    def quantised(self, name: str, **how: object) -> Path:
        """Written once."""
        folder = self.root / name
        if not folder.exists():
            write_quantised(self.family, self.plain, folder, **how)  # type: ignore[arg-type] # passed on
        return folder

    @property
    def plain(self) -> Path:
        folder = self.root / "plain"
        return folder if folder.exists() else write_plain(self.family, folder)

    @property
    def single(self) -> Path:
        """Scales in fp32."""
        return self.quantised("single", is_double=False)

    @property
    def double(self) -> Path:
        """Scales in 8 bits."""
        return self.quantised("double", is_double=True)

    @property
    def mixed(self) -> Path:
        """Double, some modules left in 16 bits."""
        return self.quantised("mixed", is_double=True, skip=MIXED)


@pytest.fixture(scope="module", params=NAMES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files("mistral3", tmp_path_factory.mktemp("one"))


def prepared(
    files: Files, folder: Path, cache: Path, packing: Packing | None = None
) -> tuple[Store, Packing]:
    """The store of a folder in a cache, and the packing it came to."""
    with source_of(folder) as source:
        one = want(source, files.family, cache, packing)
        return prepare_in_cache(one, How(2**30)), one.packing


def assert_equal_bits(store: Store, packing: Packing, theirs: dict[str, Tensor]) -> None:
    """Every tensor of the store, in the dtype that bitsandbytes gave."""
    ours = decoded_by_us(store, packing, {name: one.dtype for name, one in theirs.items()})
    assert ours
    wrong = [name for name, one in ours.items() if not torch.equal(one, theirs[name])]
    assert not wrong, wrong


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("kind", "scales"),
    [
        ("single", "fp32"),
        ("double", "fp32"),
        ("double", "double"),
        ("mixed", "fp32"),
        ("mixed", "double"),
    ],
)
def test_a_store_decodes_to_the_bits_of_bitsandbytes(
    files: Files, tmp_path: Path, kind: str, scales: str
) -> None:
    """All tensors: what is in 4 bits, what was left out, and thin matrices that the table keeps plain."""
    folder = getattr(files, kind)
    store, packing = prepared(files, folder, tmp_path, packing_of(files.family, scales=scales))
    assert_equal_bits(store, packing, decoded_by_bitsandbytes(files.family, folder))


def test_the_packed_bytes_are_those_of_the_file(mistral: Files, tmp_path: Path) -> None:
    """Equal values could have come of rounding once more; equal bytes did not."""
    store, packing = prepared(
        mistral, mistral.double, tmp_path, packing_of("mistral3", scales="double")
    )
    theirs = tensors_in(mistral.double)
    names = [name for name, fmt in packing.formats.items() if fmt is packing.packed]
    assert len(names) == 7 * 3
    raw = {file.block: store.path(file.block).read_bytes() for file in store.files}
    for name in names:
        block = int(name.split(".")[2])
        begin = store.file(block).data_begin
        entries = store.packet(block).parts(name)
        for part, key in {
            "codes": name,
            "scales": f"{name}.absmax",
            "nested_scales": f"{name}.nested_absmax",
            "nested_table": f"{name}.nested_quant_map",
        }.items():
            one = entries[part]
            found = raw[block][begin + one.offset : begin + one.end]
            assert found == theirs[key].numpy().tobytes(), (name, part)


def test_codes_may_lie_there_as_numbers_of_another_type(mistral: Files, tmp_path: Path) -> None:
    """bnb_4bit_quant_storage, which FSDP wants to be the type of all else."""
    folder = mistral.quantised("stored", is_double=True, bnb_4bit_quant_storage=torch.bfloat16)
    stored = tensors_in(folder)["model.layers.0.mlp.up_proj.weight"]
    assert (stored.dtype, stored.shape[1]) == (torch.bfloat16, 1)
    store, packing = prepared(mistral, folder, tmp_path)
    assert_equal_bits(store, packing, decoded_by_bitsandbytes("mistral3", folder))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_dtype_of_the_state_decodes_alike(tmp_path: Path, dtype: torch.dtype) -> None:
    """A tensor that is not packed lies in the store in bf16, as of any source; it is compared there."""
    plain = write_plain("mistral3", tmp_path / "plain", dtype)
    folder = write_quantised("mistral3", plain, tmp_path / "4bit", is_double=True, dtype=dtype)
    files = Files("mistral3", tmp_path)
    store, packing = prepared(files, folder, tmp_path / "cache")
    theirs = decoded_by_bitsandbytes("mistral3", folder)
    packed = {name for name, fmt in packing.formats.items() if fmt is packing.packed}
    assert {theirs[name].dtype for name in packed} == {dtype}
    expected = {n: one if n in packed else one.bfloat16() for n, one in theirs.items()}
    assert_equal_bits(store, packing, expected)


def test_a_head_in_4_bits_is_decoded_where_it_is_kept_plain(mistral: Files, tmp_path: Path) -> None:
    """Nothing is skipped, not even the head, which no block holds; in windows of few rows."""
    folder = mistral.quantised("headed", is_double=True, skip=())
    assert "lm_head.weight.absmax" in tensors_in(folder)
    store, packing = prepared(mistral, folder, tmp_path)
    assert packing.formats["lm_head.weight"] is packing.plain
    assert_equal_bits(store, packing, decoded_by_bitsandbytes("mistral3", folder))


# ---------------------------------------------------------------- what is packed, and what is said


def test_modules_left_in_16_bits_stay_so_and_are_named(mistral: Files, tmp_path: Path) -> None:
    """They were left out on purpose, as those that suffer most."""
    journal = Journal(tmp_path / "journal.jsonl")
    with source_of(mistral.mixed) as source:
        one = want(source, "mistral3", tmp_path / "cache")
        prepare_in_cache(one, How(2**30, journal=journal))
    journal.close()
    left = {left.name for left in one.packing.left_plain}
    assert left == {
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.2.self_attn.q_proj.weight",
    }
    assert {fmt for name, fmt in one.packing.formats.items() if name in left} == {one.packing.plain}
    (done,) = (
        row for row in read_journal(tmp_path / "journal.jsonl") if row["event"] == "prepare_done"
    )
    assert done["adopted"] == (
        "19 matrices taken as they are (nf4 in groups of 64, double scales), "
        "2 left unpacked, as the files have them"
    )


def test_a_plain_checkpoint_is_packed_as_ever(mistral: Files, tmp_path: Path) -> None:
    """What was left out of one checkpoint must not be left out of another."""
    with source_of(mistral.plain) as source:
        one = want(source, "mistral3", tmp_path)
    assert not one.packing.left_plain
    assert one.adopted() == ""


def test_states_are_no_tensors_of_no_use(mistral: Files, tmp_path: Path) -> None:
    """They are part of what is read, but for the JSON and the values of the codes, which are only looked at."""
    with source_of(mistral.double) as source:
        one = want(source, "mistral3", tmp_path)
        assert one.mapped.extra == ()
        assert one.mapped.num_bytes < sum(info.num_bytes for info in source.tensors.values()), (
            "the JSON and the values of the codes are looked at, not taken"
        )


# ---------------------------------------------------------------- identity, memory, interruption


def test_identity_is_that_of_all_parts(mistral: Files, tmp_path: Path) -> None:
    """The same codes with other scales are another model; the same parts in one file are the same."""
    name = "model.layers.2.mlp.up_proj.weight"
    theirs = tensors_in(mistral.double)
    same = altered(mistral.double, tmp_path / "same", {})
    scale = altered(
        mistral.double,
        tmp_path / "scale",
        {f"{name}.nested_absmax": theirs[f"{name}.nested_absmax"] * 1.5},
    )
    keys = {}
    for label, folder in {"a": mistral.double, "same": same, "scale": scale}.items():
        with source_of(folder) as source:
            keys[label] = store_key(want(source, "mistral3", tmp_path / "cache"))
    assert keys["a"] == keys["same"] != keys["scale"]


def test_a_store_of_4_bits_is_found_again(mistral: Files, tmp_path: Path) -> None:
    store, _ = prepared(mistral, mistral.mixed, tmp_path)
    with source_of(mistral.mixed) as source:
        one = want(source, "mistral3", tmp_path)
        assert known_key(one) == store.key
        assert prepare_in_cache(one, How(2**30)).folder == store.folder
    assert open_store(store.folder, full=True).key == store.key


def test_an_interrupted_import_goes_on_to_the_same_bytes(mistral: Files, tmp_path: Path) -> None:
    """Blocks that were written are kept by the digests of all their parts, also those of a small matrix's scales."""
    whole, _ = prepared(mistral, mistral.mixed, tmp_path / "whole")
    cache, journal = tmp_path / "cache", Journal(tmp_path / "journal.jsonl")

    def stop(done: int, total: int) -> None:
        if done > 0.95 * total:  # in the last block; what was begun before is waited for
            waits_until = time.monotonic() + 60
            while len(list(cache.rglob("[rb]*.safetensors"))) < 2:
                assert time.monotonic() < waits_until
                time.sleep(0.002)
            raise KeyboardInterrupt

    with source_of(mistral.mixed) as source:
        one = want(source, "mistral3", cache)
        with pytest.raises(KeyboardInterrupt):
            prepare_in_cache(one, How(2**30, progress=stop))
        store = prepare_in_cache(one, How(2**30, journal=journal))
    journal.close()
    (start,) = (
        r for r in read_journal(tmp_path / "journal.jsonl") if r["event"] == "prepare_start"
    )
    assert 0 < start["num_kept"] < start["num_files"]
    assert content_of(store.folder) == content_of(whole.folder)


def test_windows_of_few_rows_give_the_same_store(
    mistral: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales and codes are then read in many pieces; the head is decoded in as many."""
    folder = mistral.quantised("headed", is_double=True, skip=())
    monkeypatch.setattr(encoding, "share_out", lambda *_, **__: Shares(3, 2000, 4000))
    monkeypatch.setattr(pieces, "PIECE_BYTES", 700)
    store, packing = prepared(mistral, folder, tmp_path)
    assert_equal_bits(store, packing, decoded_by_bitsandbytes("mistral3", folder))
