"""Scanning folders: everything found, everything faulty named, nothing left out quietly."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from data_support import write_captioned, write_picture
from PIL import Image

from outsize.base.errors import SourceError
from outsize.data import media
from outsize.data.found import PictureSet
from outsize.data.scanning import scan, with_trigger


def captioned(path: Path, caption: str = "a cat") -> Path:
    write_picture(path, seed=len(path.name))
    path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def test_pictures_come_sorted_by_relative_path_with_size_digest_and_caption(tmp_path: Path) -> None:
    captioned(tmp_path / "b.png")
    captioned(tmp_path / "a" / "z.JPG", "two\n  lines ")
    captioned(tmp_path / "C.WebP")
    write_picture(tmp_path / "d.bmp", (30, 20)).with_suffix(".TXT").write_text("\ufeffa dog")
    manifest = scan([PictureSet(folder=tmp_path)])
    assert [picture.name for picture in manifest.pictures] == [
        "C.WebP",
        "a/z.JPG",
        "b.png",
        "d.bmp",
    ]
    captions = [picture.caption for picture in manifest.pictures]
    assert captions == ["a cat", "two lines", "a cat", "a dog"]
    last = manifest.pictures[-1]
    assert (last.width, last.height) == (30, 20)
    assert last.digest == hashlib.sha256((tmp_path / "d.bmp").read_bytes()).hexdigest()
    assert manifest.captions() == ("a cat", "two lines", "a dog")


def test_a_turned_picture_has_the_size_it_is_looked_at(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    (tmp_path / "a.txt").write_text("x")
    picture = scan([PictureSet(folder=tmp_path)]).pictures[0]
    assert (picture.width, picture.height) == (20, 40)


def test_all_faults_of_all_sets_are_named_at_once(tmp_path: Path) -> None:
    good = tmp_path / "good"
    captioned(good / "fine.png")
    write_picture(good / "bare.png", seed=1)
    captioned(good / "blank.png", " \n")
    captioned(good / "torn.png")
    (good / "torn.png").write_bytes((good / "torn.png").read_bytes()[:60])
    captioned(good / "zero.jpg").write_bytes(b"")
    captioned(good / "text.png").write_text("no picture at all")
    captioned(good / "latin.png").with_suffix(".txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError) as caught:
        scan(
            [
                PictureSet(folder=good),
                PictureSet(folder=tmp_path / "empty"),
                PictureSet(folder=tmp_path / "gone"),
            ]
        )
    message = str(caught.value)
    assert message.startswith("8 faults in the pictures; nothing was started:")
    for file, fault in {
        "bare.png": "no caption beside it; write bare.txt",
        "blank.txt": "the caption is empty",
        "torn.png": "not a readable picture",
        "zero.jpg": "0 bytes",
        "text.png": "not a readable picture",
        "latin.txt": "UTF-8",
        "empty": "no picture in it",
        "gone": "no such folder",
    }.items():
        assert any(file in line and fault in line for line in message.splitlines()), file
    assert "fine.png" not in message


def test_without_any_set_scanning_is_refused() -> None:
    with pytest.raises(SourceError, match="no folder"):
        scan([])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"trigger": "ohwx"}, "ohwx"),
        ({"default_caption": "a photo"}, "a photo"),
        ({"trigger": "ohwx", "default_caption": "a photo"}, "ohwx, a photo"),
    ],
)
def test_a_trigger_or_default_stands_in_for_a_missing_caption(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    write_picture(tmp_path / "a.png")
    assert scan([PictureSet(folder=tmp_path, **options)]).pictures[0].caption == expected


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a cat", "ohwx, a cat"),
        ("an ohwx cat", "an ohwx cat"),
        ("Ohwx, sitting", "Ohwx, sitting"),
        ("an ohwxy cat", "ohwx, an ohwxy cat"),
        ("", "ohwx"),
    ],
)
def test_the_trigger_is_put_before_captions_that_lack_it_as_a_word(
    caption: str, expected: str
) -> None:
    assert with_trigger(caption, "ohwx") == expected
    assert with_trigger(caption, None) == caption


def test_a_trigger_that_looks_like_a_pattern_is_taken_literally() -> None:
    assert with_trigger("a.b", "a?b+") == "a?b+, a.b"


def test_the_caption_extension_is_taken_with_or_without_its_dot(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    (tmp_path / "a.caption").write_text("from the other file")
    (tmp_path / "a.txt").write_text("not this one")
    for extension in (".caption", "caption"):
        picture = scan([PictureSet(folder=tmp_path, caption_extension=extension)]).pictures[0]
        assert picture.caption == "from the other file"


def test_unread_kinds_lonely_captions_and_duplicates_are_warnings(tmp_path: Path) -> None:
    captioned(tmp_path / "a.png")
    shutil.copy(tmp_path / "a.png", tmp_path / "b.png")
    (tmp_path / "b.txt").write_text("the same")
    (tmp_path / "c.PSD").write_bytes(b"x")
    (tmp_path / "d.txt").write_text("no picture")
    (tmp_path / ".hidden.png").write_bytes(b"x")
    (tmp_path / "notes.md").write_text("ignored")
    manifest = scan([PictureSet(folder=tmp_path)])
    assert len(manifest.pictures) == 2
    text = "\n".join(manifest.warnings)
    assert "c.PSD: pictures of this kind are not read" in text
    assert "d.txt: a caption without a picture" in text
    assert "the same picture 2 times" in text
    assert len(manifest.warnings) == 3


def test_the_digest_follows_contents_captions_and_weights_but_not_the_place(tmp_path: Path) -> None:
    folder = write_captioned(tmp_path / "one", 3, [(16, 16)])
    moved = shutil.copytree(folder, tmp_path / "two")
    first = scan([PictureSet(folder=folder)]).digest()
    assert scan([PictureSet(folder=moved)]).digest() == first
    assert scan([PictureSet(folder=folder, loss_weight=0.5)]).digest() != first
    (moved / "01.txt").write_text("another caption")
    assert scan([PictureSet(folder=moved)]).digest() != first
    write_picture(folder / "01.png", (16, 16), seed=99)
    assert scan([PictureSet(folder=folder)]).digest() != first


def test_a_second_scan_decodes_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_captioned(tmp_path / "pictures", 4, [(16, 16), (20, 10)])
    facts = tmp_path / "facts.json"
    first = scan([PictureSet(folder=folder)], facts_file=facts)
    decoded: list[bytes] = []
    inspect = media.inspect

    def counting(content: bytes) -> media.Look:
        decoded.append(content)
        return inspect(content)

    monkeypatch.setattr(media, "inspect", counting)
    assert scan([PictureSet(folder=folder)], facts_file=facts) == first
    assert decoded == []
    changed = write_picture(folder / "02.png", (30, 20), seed=77)
    assert scan([PictureSet(folder=folder)], facts_file=facts).pictures[2].width == 30
    assert decoded == [changed.read_bytes()]
    changed.write_bytes(changed.read_bytes()[:50])
    with pytest.raises(SourceError, match=r"02\.png"):
        scan([PictureSet(folder=folder)], facts_file=facts)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"version": "media/0, looks/1", "looks": {}}']
)
def test_facts_that_cannot_be_used_are_found_out_again(tmp_path: Path, content: bytes) -> None:
    folder = write_captioned(tmp_path / "pictures", 2, [(16, 16)])
    facts = tmp_path / "facts.json"
    facts.write_bytes(content)
    assert scan([PictureSet(folder=folder)], facts_file=facts) == scan([PictureSet(folder=folder)])
    assert len(json.loads(facts.read_bytes())["looks"]) == 2
