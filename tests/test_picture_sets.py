"""Sets of pictures as people have them: JSON captions, manifests, imagefolders, datasets, broken files left out and named."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from data_support import write_captioned, write_picture

from outsize.base.errors import SourceError
from outsize.data.found import PictureSet
from outsize.data.manifest import Manifest
from outsize.data.scanning import scan


def scanned(folder: Path, **options: Any) -> Manifest:
    return scan([PictureSet(folder=folder, **options)])


def faults_of(folder: Path, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        scanned(folder, **options)
    return str(caught.value)


def captions(manifest: Manifest) -> dict[str, str]:
    return {one.name: one.caption for one in manifest.pictures}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_json_beside_a_picture_is_its_caption_where_no_text_is(tmp_path: Path) -> None:
    for name, value in {
        "a": {"caption": " two\n words "},
        "b": "only a text",
        "c": {"tags": ["red", "small"]},
        "d": {"prompt": "as outsize sample writes it", "seed": 3},
    }.items():
        write_picture(tmp_path / f"{name}.png").with_suffix(".json").write_text(json.dumps(value))
    write_picture(tmp_path / "e.png").with_suffix(".json").write_text('{"caption": "not this"}')
    (tmp_path / "e.txt").write_text("the text")
    (tmp_path / "f.jpg.txt").write_text("named after the whole file")
    write_picture(tmp_path / "f.jpg")
    assert list(captions(scanned(tmp_path)).values()) == [
        "two words", "only a text", "red, small", "as outsize sample writes it", "the text",
        "named after the whole file",
    ]  # fmt: skip
    assert not any("a caption without" in one for one in scanned(tmp_path).warnings)
    (tmp_path / "f.jpg").unlink()
    assert captions(scanned(tmp_path, caption_extension=".json"))["e.png"] == "not this"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "a.json: is not JSON"),
        ("[1]", "a.json: must hold a text, or an object with a caption"),
        ('{"caption": 5}', "a.json: 'caption' must be text, and is 5"),
        ('{"caption": ["a", "b"]}', "holds 2 captions; give each a row of its own"),
        ('{"title": "a"}', "a.json: holds no caption (caption, text, prompt); write a.txt"),
    ],
)
def test_json_that_is_no_caption_is_a_fault(tmp_path: Path, content: str, message: str) -> None:
    write_picture(tmp_path / "a.png").with_suffix(".json").write_text(content)
    assert message in faults_of(tmp_path)


def test_a_manifest_names_captions_weights_masks_and_repeats(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    for name in ("a.png", "deep/b.png", "c.png"):
        write_picture(folder / name, (40, 20), seed=len(name))
    write_picture(tmp_path / "lists" / "m.png", (20, 10))
    manifest = write_rows(
        tmp_path / "lists" / "list.jsonl",
        [
            {"file_name": "deep/b.png", "text": "first", "weight": 0.5, "mask": "m.png"},
            {"file_name": "a.png", "caption": "second", "repeats": 3, "licence": "mine"},
            {"file_name": "a.png", "caption": "the same with other words"},
        ],
    )
    found = scanned(folder, manifest=manifest, trigger="sks")
    assert [(one.name, one.caption, one.weight, one.repeats) for one in found.pictures] == [
        ("deep/b.png", "sks, first", 0.5, 1),
        ("a.png", "sks, second", 1.0, 3),
        ("a.png", "sks, the same with other words", 1.0, 1),
    ]
    first = found.pictures[0]
    assert first.mask is not None
    assert first.mask.origin.path == tmp_path / "lists" / "m.png"
    told = "\n".join(found.warnings)
    assert "list.jsonl: columns not used: licence" in told
    assert "1 pictures are not listed, and not taken: c.png" in told


def test_every_row_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    rows: list[Any] = [
        {"caption": "no file"},
        {"file_name": "gone.png", "caption": "x"},
        {"file_name": "a.png", "caption": "x", "weight": 0},
        {"file_name": "a.png", "caption": "x", "weight": "heavy"},
        {"file_name": "a.png", "caption": "x", "repeats": 1.5},
        {"file_name": "a.png", "caption": ["x"]},
        {"file_name": "a.png"},
        {"file_name": "a.png", "caption": "x", "mask": 3},
        5,
    ]
    manifest = write_rows(tmp_path / "list.jsonl", rows)
    with manifest.open("a") as file:
        file.write("{torn")
    message = faults_of(tmp_path, manifest=manifest)
    assert message.startswith("10 faults in the pictures")
    for number, fault in {
        1: "names no picture; give it one of the columns file_name",
        3: "weight must be a number, above 0, and is 0",
        4: "weight must be a number, above 0, and is 'heavy'",
        5: "repeats must be a number, 1 or more, and is 1.5",
        6: "'caption' holds 1 captions",
        7: "has no caption (caption, text, prompt); write one, or set a trigger or default_caption",
        8: "mask must be a path, and is 3",
        9: "must be an object with columns, and is a number",
        10: "is not JSON",
    }.items():
        assert f"list.jsonl: line {number}: {fault}" in message
    assert "gone.png: there is no such file" in message


def test_an_imagefolder_is_read_by_its_metadata_and_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_picture(tmp_path / split / "a.png", seed=len(split))
    write_rows(tmp_path / "train" / "metadata.jsonl", [{"file_name": "a.png", "text": "trained"}])
    (tmp_path / "test" / "metadata.csv").write_text("file_name,text,weight\na.png,tested,2\n")
    found = scanned(tmp_path)
    assert captions(found) == {"a.png": "trained"}
    assert any(
        "metadata.csv: of another split than train: not taken" in one for one in found.warnings
    )
    tested = scanned(tmp_path, split="test").pictures
    assert [(one.caption, one.weight, one.path) for one in tested] == [
        ("tested", 2.0, tmp_path / "test" / "a.png")
    ]
    assert "has no manifest of a split 'dev'" in faults_of(tmp_path, split="dev")


def test_folders_of_plain_pictures_are_taken_whole_unless_a_split_is_asked_for(
    tmp_path: Path,
) -> None:
    for split in ("train", "test"):
        write_captioned(tmp_path / split, 2, [(16, 16)])
    assert len(scanned(tmp_path).pictures) == 4
    assert set(captions(scanned(tmp_path, split="test"))) == {"test/00.png", "test/01.png"}
    assert "its folders name: test, train" in faults_of(tmp_path, split="validation")


@pytest.mark.parametrize("row", ["a.png", "a.png,b,c"])
def test_a_torn_line_of_csv_is_a_fault(tmp_path: Path, row: str) -> None:
    write_picture(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text(f"file_name,text\n{row}\n")
    assert "metadata.csv: line 2: has more or fewer cells" in faults_of(tmp_path)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Five pictures in two row groups, as Hugging Face's datasets library writes them."""
    arrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    source = write_captioned(tmp_path / "source", 5, [(40, 40), (60, 30)])
    rows = [
        {
            "image": {"bytes": one.read_bytes(), "path": one.name},
            "text": one.with_suffix(".txt").read_text(),
            "score": 0.5,
        }
        for one in sorted(source.glob("*.png"))
    ]
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    table = arrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "train-00000-of-00001.parquet", row_group_size=3)
    parquet.write_table(table.slice(0, 1), folder / "test-00000-of-00001.parquet")
    return tmp_path


def test_a_dataset_holds_the_pictures_of_the_folder_it_was_made_from(dataset: Path) -> None:
    plain = scanned(dataset / "source")
    held = scanned(dataset / "set")
    assert [(one.digest, one.caption, one.look) for one in held.pictures] == [
        (one.digest, one.caption, one.look) for one in plain.pictures
    ]
    assert held.digest() == plain.digest()
    last = held.pictures[4]
    assert str(last.origin).endswith("train-00000-of-00001.parquet: row 5")
    assert last.origin.read() == (dataset / "source" / "04.png").read_bytes()
    assert len(scanned(dataset / "set", split="test").pictures) == 1
    (table,) = (dataset / "set" / "data").glob("train*")
    assert len(scanned(table).pictures) == 5


def test_a_dataset_saved_to_disk_as_arrow_is_read_too(dataset: Path) -> None:
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    (source,) = (dataset / "set" / "data").glob("train*")
    table = parquet.read_table(source)
    folder = dataset / "saved"
    folder.mkdir()
    with arrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text("{}")
    assert scanned(folder).digest() == scanned(dataset / "set").digest()


def test_faults_of_a_dataset_are_named(dataset: Path) -> None:
    assert "no column of pictures; set image_column to one of: image (picture), text (text)" in (
        faults_of(dataset / "set", image_column="jpg")
    )
    assert "has no split 'dev'" in faults_of(dataset / "set", split="dev")
    assert "row 2: has no caption (words)" in faults_of(dataset / "set", caption_column="words")
    (table,) = (dataset / "set" / "data").glob("train*")
    torn = dataset / "torn.parquet"
    torn.write_bytes(table.read_bytes()[:900])
    assert "torn.parquet: no table that can be read" in faults_of(torn)


def test_broken_pictures_are_left_out_and_listed_when_asked_for(tmp_path: Path) -> None:
    """Never skipped in silence, never replaced by another: ai-toolkit draws a random picture instead."""
    write_captioned(tmp_path, 4, [(16, 16)])
    (tmp_path / "01.png").write_bytes(b"")
    (tmp_path / "02.png").write_bytes((tmp_path / "02.png").read_bytes()[:70])
    message = faults_of(tmp_path)
    assert "01.png: the file is empty (0 bytes)" in message
    assert "02.png: not a readable picture" in message
    made = scan([PictureSet(folder=tmp_path)], leaves_out_broken=True)
    assert [one.name for one in made.pictures] == ["00.png", "03.png"]
    assert [one.origin.path.name for one in made.left_out] == ["01.png", "02.png"]
    assert made.left_out[0].reason == "the file is empty (0 bytes)"
    whole = scan([PictureSet(folder=write_captioned(tmp_path / "x", 4, [(16, 16)]))])
    assert whole.digest() != made.digest(), "a repaired picture is other data"


def test_leaving_out_does_not_reach_captions_nor_leave_nothing(tmp_path: Path) -> None:
    write_captioned(tmp_path, 1, [(16, 16)])
    (tmp_path / "00.png").write_bytes(b"")
    with pytest.raises(SourceError, match="the file is empty"):
        scan([PictureSet(folder=tmp_path)], leaves_out_broken=True)
    write_picture(tmp_path / "01.png")
    with pytest.raises(SourceError, match="has no caption beside it"):
        scan([PictureSet(folder=tmp_path)], leaves_out_broken=True)


def test_masks_are_matched_by_name_and_checked(tmp_path: Path) -> None:
    folder = write_captioned(tmp_path / "pictures", 4, [(40, 20)])
    masks = folder / "masks"  # inside: its pictures are masks, not pictures
    for name in ("00.jpg", "01.png", "02.png"):
        write_picture(masks / name, (20, 10))
    found = scanned(folder, masks=masks)
    assert [one.mask is not None for one in found.pictures] == [True, True, True, False]
    assert any("03.png: has no mask: it is learned whole" in one for one in found.warnings)
    write_picture(masks / "01.png", (10, 20))
    (masks / "02.png").write_bytes(b"")
    message = faults_of(folder, masks=masks)
    assert "01.png has 10 x 20 px, which is another shape than the picture's 40 x 20" in message
    assert "02.png: the file is empty" in message
    assert "no such folder of masks" in faults_of(folder, masks=tmp_path / "gone")


def test_the_digest_follows_repeats_flips_weights_and_masks(tmp_path: Path) -> None:
    folder = write_captioned(tmp_path / "pictures", 2, [(40, 20)])
    shutil.copytree(folder, tmp_path / "masks")
    options: list[dict[str, Any]] = [
        {}, {"repeats": 2}, {"flip": 0.5}, {"background": (0, 0, 0)}, {"masks": tmp_path / "masks"},
        {"masks": tmp_path / "masks", "mask_floor": 0.1},
        {"masks": tmp_path / "masks", "mask_normalised": False},
    ]  # fmt: skip
    assert len({scanned(folder, **one).digest() for one in options}) == len(options)
    assert scanned(folder, mask_floor=0.1).digest() == scanned(folder).digest(), "there is no mask"
    rows = [{"file_name": f"0{number}.png", "caption": "x"} for number in range(2)]
    extras: list[dict[str, Any]] = [{}, {"weight": 2}, {"repeats": 2}, {"caption": "y"}]
    manifests = [
        write_rows(tmp_path / f"{number}.jsonl", [rows[0] | extra, rows[1]])
        for number, extra in enumerate(extras)
    ]
    assert len({scanned(folder, manifest=one).digest() for one in manifests}) == len(extras)
