"""The manifest: which pictures with which captions a run learns from, and proof that all can be read.

Scanning looks at every file before any work starts and reports every fault at once. Nothing is
left out quietly: a file is in the manifest, a fault, a warning, hidden (its name begins with a
dot), or of a kind that is no picture.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from outsize.base.errors import SourceError
from outsize.base.files import json_digest
from outsize.data import media
from outsize.data.facts import Size, add_facts, read_facts

PICTURE_EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
# Pictures we cannot read, or not without another library: passing over them needs a warning.
OTHER_PICTURES = frozenset({".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".psd"})


@dataclass(frozen=True, slots=True)
class PictureSet:
    """A folder of captioned pictures and how it takes part.

    share: its part of all micro-batches, 0..1; None divides what others leave by number of
    pictures. loss_weight: factor on the loss of its pictures. trigger: word put before captions.
    default_caption: stands in where a picture has none.
    """

    folder: Path
    caption_extension: str = ".txt"
    trigger: str | None = None
    share: float | None = None
    loss_weight: float = 1.0
    is_regularisation: bool = False
    default_caption: str | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture as it is looked at (orientation applied); digest is of the file's bytes."""

    set_index: int
    name: str  # path below the set's folder, with forward slashes
    path: Path
    caption: str
    digest: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All pictures, by set and then by name, and what the user should know about them."""

    sets: tuple[PictureSet, ...]
    pictures: tuple[Picture, ...]
    warnings: tuple[str, ...] = ()

    def digest(self) -> str:
        """Equal exactly when the same pictures with the same captions take part alike.

        File contents count, and their order; where the folders lie does not.
        """
        sets = [
            [item.trigger, item.share, item.loss_weight, item.is_regularisation]
            for item in self.sets
        ]
        pictures = [[item.set_index, item.digest, item.caption] for item in self.pictures]
        return json_digest({"sets": sets, "pictures": pictures})

    def captions(self) -> tuple[str, ...]:
        """Each different caption once, in order of first use."""
        return tuple(dict.fromkeys(picture.caption for picture in self.pictures))

    def set_of(self, picture: Picture) -> PictureSet:
        """The set a picture belongs to."""
        return self.sets[picture.set_index]


def scan(sets: Sequence[PictureSet], *, facts_file: Path | None = None) -> Manifest:
    """Read, hash and decode every picture of every set, and match the captions.

    facts_file: where to remember which contents were decoded; those are read and hashed again, but
    not decoded again.
    Raises: SourceError listing all faults with their files: missing or empty folders, unreadable
    or truncated pictures, missing, empty or undecodable captions.
    """
    faults: list[str] = []
    warnings: list[str] = []
    pictures: list[Picture] = []
    known = read_facts(facts_file) if facts_file else {}
    if not sets:
        faults.append("no folder of pictures is given")
    with ThreadPoolExecutor(min(16, (os.cpu_count() or 1) + 2)) as pool:
        for set_index, item in enumerate(sets):
            found = _Folder.walk(item, faults, warnings)
            captions = [found.caption_of(path, item, faults) for path in found.pictures]
            looks = pool.map(lambda path: _look(path, known), found.pictures)
            for path, caption, look in zip(found.pictures, captions, looks, strict=True):
                if isinstance(look, str):
                    faults.append(f"{path}: {look}")
                elif caption is not None:
                    name = path.relative_to(item.folder).as_posix()
                    pictures.append(Picture(set_index, name, path, caption, *look))
    sizes = {picture.digest: (picture.width, picture.height) for picture in pictures}
    if facts_file and not sizes.keys() <= known.keys():
        add_facts(facts_file, sizes)
    if faults:
        raise SourceError(_list_faults(faults))
    return Manifest(tuple(sets), tuple(pictures), (*warnings, *_duplicates(pictures)))


def with_trigger(caption: str, trigger: str | None) -> str:
    """Put the trigger before the caption unless it is in it as a word, in whatever case."""
    if not trigger:
        return caption
    word = rf"(?<!\w){re.escape(trigger)}(?!\w)"
    if re.search(word, caption, re.IGNORECASE):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


@dataclass(frozen=True, slots=True)
class _Folder:
    """The files of one set: its pictures by name, and its captions by stem."""

    pictures: tuple[Path, ...]
    captions: dict[str, Path]

    @classmethod
    def walk(cls, item: PictureSet, faults: list[str], warnings: list[str]) -> _Folder:
        """List a folder and all below it, in the same order on every system."""
        if not item.folder.is_dir():
            faults.append(f"{item.folder}: there is no such folder")
            return cls((), {})
        files = {path.relative_to(item.folder).as_posix(): path for path in _files(item.folder)}
        pictures = [name for name in sorted(files) if _extension(name) in PICTURE_EXTENSIONS]
        wanted = f".{item.caption_extension.lstrip('.').lower()}"
        captions = {
            name[: -len(wanted)]: path
            for name, path in sorted(files.items())
            if name.lower().endswith(wanted)
        }
        if not pictures:
            faults.append(f"{item.folder}: no picture in it ({_known_extensions()})")
        warnings += [
            f"{files[name]}: pictures of this kind are not read ({_known_extensions()})"
            for name in sorted(files)
            if _extension(name) in OTHER_PICTURES
        ]
        lonely = captions.keys() - {_stem(name) for name in pictures}
        warnings += [f"{captions[stem]}: a caption without a picture" for stem in sorted(lonely)]
        return cls(tuple(files[name] for name in pictures), captions)

    def caption_of(self, path: Path, item: PictureSet, faults: list[str]) -> str | None:
        """The caption, trigger included; None when there is a fault."""
        source = self.captions.get(_stem(path.relative_to(item.folder).as_posix()))
        text, where = "", path
        if source is not None:
            try:
                text = " ".join(source.read_text(encoding="utf-8-sig").split())
            except (OSError, UnicodeDecodeError) as error:
                faults.append(f"{source}: the caption cannot be read as UTF-8: {error}")
                return None
            where = source
        caption = with_trigger(text or item.default_caption or "", item.trigger)
        if caption:
            return caption
        what = "the caption is empty" if source is not None else "has no caption beside it"
        extension = item.caption_extension.lstrip(".")
        faults.append(
            f"{where}: {what}; write {path.stem}.{extension}, or set a trigger or default_caption"
        )
        return None


def _files(folder: Path) -> Iterator[Path]:
    """All files at any depth but hidden ones and those in hidden folders."""
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.is_file():
            yield path


def _look(path: Path, known: Mapping[str, Size]) -> tuple[str, int, int] | str:
    """Digest, width and height; or what is wrong with the file."""
    try:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        width, height = known.get(digest) or media.inspect(content)
    except (OSError, SourceError) as error:
        return str(error)
    return digest, width, height


def _extension(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _stem(name: str) -> str:
    return PurePosixPath(name).with_suffix("").as_posix()


def _known_extensions() -> str:
    return " ".join(sorted(PICTURE_EXTENSIONS))


def _duplicates(pictures: Sequence[Picture]) -> Iterator[str]:
    by_digest = defaultdict(list)
    for picture in pictures:
        by_digest[picture.digest].append(picture)
    for same in by_digest.values():
        if len(same) > 1:
            paths = ", ".join(str(picture.path) for picture in same)
            yield f"the same picture {len(same)} times, it counts that often: {paths}"


def _list_faults(faults: Sequence[str]) -> str:
    noun = "fault" if len(faults) == 1 else "faults"
    lines = "\n".join(f"  {fault}" for fault in faults)
    return f"{len(faults)} {noun} in the pictures; nothing was started:\n{lines}"
