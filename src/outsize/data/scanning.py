"""Scanning: every picture of every set is read, hashed and decoded before any work starts, and every fault told at once.

Nothing is left out quietly: a file is in the manifest, a fault, a warning, listed as left out because the
recipe says so, hidden (its name begins with a dot), or of a kind that is no picture.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from outsize.base.errors import SourceError
from outsize.data import media
from outsize.data._kinds import LibraryMissing
from outsize.data.facts import add_facts, read_facts
from outsize.data.folders import find_in_folder
from outsize.data.found import Findings, Found, PictureSet, files_below, together
from outsize.data.manifest import LeftOut, Manifest, Mask, Picture
from outsize.data.media import Look
from outsize.data.origin import TABLES, Origin
from outsize.data.rows import find_in_dataset, find_in_manifests, is_dataset, manifests_of

_OF_ANOTHER_SHAPE = 0.02  # of a picture's aspect: more than rounding a small mask's sides explains


def scan(
    sets: Sequence[PictureSet], *, facts_file: Path | None = None, leaves_out_broken: bool = False
) -> Manifest:
    """Read, hash and decode every picture of every set, and match captions and masks.

    facts_file: where to remember which contents were decoded; those are read and hashed again, but
    not decoded again. leaves_out_broken: pictures that cannot be read are listed in left_out; else
    they are faults.
    Raises: SourceError listing all faults with their files: missing or empty folders, unreadable
    or truncated pictures, missing, empty or undecodable captions.
    """
    scanning = _Scan(read_facts(facts_file) if facts_file else {}, leaves_out_broken)
    if not sets:
        scanning.faults.append("no folder of pictures is given")
    with ThreadPoolExecutor(min(16, (os.cpu_count() or 1) + 2)) as pool:
        for set_index, item in enumerate(sets):
            found = find_pictures(item)
            scanning.faults += found.faults
            scanning.warnings += found.warnings
            looks = pool.map(lambda one, item=item: scanning.look(one, item), found.pictures)
            scanning.join(set_index, item, found.pictures, looks)
    if facts_file and scanning.new:
        add_facts(facts_file, scanning.new)
    if scanning.faults:
        raise SourceError(list_faults(scanning.faults, leaves_out_broken=leaves_out_broken))
    pictures = tuple(scanning.pictures)
    if not pictures:
        scanning.faults += [f"{one.origin}: {one.reason}" for one in scanning.left_out]
        raise SourceError(list_faults(scanning.faults, leaves_out_broken=leaves_out_broken))
    warnings = (*scanning.warnings, *_duplicates(pictures))
    return Manifest(tuple(sets), pictures, warnings, tuple(scanning.left_out))


def find_pictures(item: PictureSet) -> Findings:
    """What a set names; nothing is opened but what holds words."""
    if item.folder.suffix.lower() in TABLES and item.folder.is_file():
        return find_in_dataset(item)
    if not item.folder.is_dir():
        return Findings(faults=[f"{item.folder}: there is no such folder"])
    files = files_below(item.folder, without=item.masks)
    if item.manifest is not None:
        return find_in_manifests(item, [item.manifest], files)
    findings = Findings()
    manifests = manifests_of(item, files, findings)
    if findings.faults:
        return findings
    if manifests:
        made = find_in_manifests(item, manifests, files)
    elif is_dataset(files):
        made = find_in_dataset(item)
    else:
        made = find_in_folder(item, files)
    made.warnings += findings.warnings
    return made


def with_trigger(caption: str, trigger: str | None) -> str:
    """Put the trigger before the caption unless it is in it as a word, in whatever case."""
    if not trigger:
        return caption
    word = rf"(?<!\w){re.escape(trigger)}(?!\w)"
    if re.search(word, caption, re.IGNORECASE):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


@dataclass(frozen=True, slots=True)
class _Looked:
    """One picture and its mask, read."""

    digest: str
    look: Look
    mask: Mask | None


@dataclass(slots=True)
class _Scan:
    """What is gathered while scanning. known: looks of earlier scans, by digest; new: those of this one."""

    known: Mapping[str, Look]
    leaves_out: bool
    new: dict[str, Look] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def look(self, one: Found, item: PictureSet) -> _Looked | SourceError:
        """Read a picture and its mask; or what is wrong with them. Any thread may ask."""
        try:
            digest, look = self._inspect(one.origin)
            if item.alpha_as_mask and one.mask is None:
                mask = Mask(one.origin, digest, is_alpha=True) if look.has_alpha else None
            else:
                mask = self._mask(one, look)
        except FileNotFoundError:
            return SourceError("there is no such file")
        except OSError as error:
            return SourceError(f"cannot be read: {error}")
        except SourceError as error:
            return error
        return _Looked(digest, look, mask)

    def join(
        self,
        set_index: int,
        item: PictureSet,
        found: Sequence[Found],
        looks: Iterator[_Looked | SourceError],
    ) -> None:
        """Take the pictures of a set that can be read and have captions."""
        notes: dict[str, list[str]] = defaultdict(list)
        for one, looked in zip(found, looks, strict=True):
            if isinstance(looked, SourceError):
                if self.leaves_out and not isinstance(looked, LibraryMissing):
                    self.left_out.append(LeftOut(set_index, one.origin, str(looked)))
                else:
                    self.faults.append(f"{one.origin}: {looked}")
                continue
            caption = with_trigger(one.caption or item.default_caption or "", item.trigger)
            if not caption:
                self.faults.append(one.uncaptioned)
                continue
            if looked.look.note:
                notes[looked.look.note].append(str(one.origin))
            if item.has_masks and looked.mask is None:
                notes["has no mask: it is learned whole"].append(str(one.origin))
            self.pictures.append(
                Picture(
                    set_index=set_index,
                    name=one.name,
                    origin=one.origin,
                    caption=caption,
                    digest=looked.digest,
                    look=looked.look,
                    weight=one.weight,
                    repeats=one.repeats,
                    mask=looked.mask,
                    has_own_caption=bool(one.caption),
                )
            )
        for what, names in notes.items():
            self.warnings += together(what, names)

    def _inspect(self, origin: Origin) -> tuple[str, Look]:
        content = origin.read()
        digest = hashlib.sha256(content).hexdigest()
        look = self.known.get(digest)
        if look is None:
            look = self.new[digest] = media.inspect(content)
        return digest, look

    def _mask(self, one: Found, look: Look) -> Mask | None:
        if one.mask is None:
            return None
        try:
            digest, shape = self._inspect(one.mask)
        except OSError as error:
            raise SourceError(f"its mask cannot be read: {error}") from error
        except SourceError as error:
            raise type(error)(f"its mask {one.mask}: {error}") from error
        ours, theirs = look.width * shape.height, shape.width * look.height
        if abs(ours - theirs) > _OF_ANOTHER_SHAPE * max(ours, theirs):
            raise SourceError(
                f"its mask {one.mask} has {shape.width} x {shape.height} px, which is another shape than the picture's "
                f"{look.width} x {look.height}; make it of the same shape"
            )
        return Mask(one.mask, digest)


def _duplicates(pictures: Sequence[Picture]) -> Iterator[str]:
    by_digest = defaultdict(list)
    for picture in pictures:
        by_digest[picture.digest].append(picture)
    for same in by_digest.values():
        if len(same) > 1:
            names = ", ".join(str(picture.origin) for picture in same)
            yield f"the same picture {len(same)} times, it counts that often: {names}"


_OR_LEAVE_OUT = "; `data.broken: leave_out` trains without pictures that cannot be read"


def list_faults(faults: Sequence[str], *, leaves_out_broken: bool) -> str:
    """All faults as one message."""
    noun = "fault" if len(faults) == 1 else "faults"
    lines = "\n".join(f"  {fault}" for fault in faults)
    return (
        f"{len(faults)} {noun} in the pictures; nothing was started:\n{lines}\n"
        f"Mend or remove what is named{'' if leaves_out_broken else _OR_LEAVE_OUT}."
    )
