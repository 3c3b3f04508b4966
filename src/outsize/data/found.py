"""What a set names: pictures with captions, weights and masks, found in a folder, a manifest or a dataset.

Nothing is opened here but what holds words. Every reader of a kind of set (folders.py, rows.py) gives Findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from outsize.data._kinds import PICTURE_EXTENSIONS
from outsize.data.origin import Origin

_NAMED = 3  # examples that a warning about many pictures gives


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSet:
    """A folder of captioned pictures and how it takes part; recipes/pictures.py says what each field means.

    share: its part of all samples, 0..1; None divides what others leave by number of pictures. background: red, green and
    blue, 0..255.
    """

    folder: Path
    manifest: Path | None = None
    split: str | None = None
    caption_extension: str = ".txt"
    caption_column: str | None = None
    image_column: str | None = None
    trigger: str | None = None
    default_caption: str | None = None
    share: float | None = None
    repeats: int = 1
    loss_weight: float = 1.0
    is_regularisation: bool = False
    is_held_out: bool = False
    flip: float = 0.0
    background: tuple[int, int, int] = (255, 255, 255)
    masks: Path | None = None
    alpha_as_mask: bool = False
    mask_floor: float = 0.0
    mask_normalised: bool = True

    @property
    def caption_columns(self) -> tuple[str, ...]:
        """Where a row or a JSON object may hold its caption, the likeliest first."""
        named = self.caption_column
        return ("caption", "text", "prompt") if named is None else (named,)

    @property
    def has_masks(self) -> bool:
        """Whether its pictures are expected to have masks."""
        return self.masks is not None or self.alpha_as_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A picture that a set names, not opened yet.

    name: below the set's folder, with forward slashes. caption: as it is written, "" where none is. uncaptioned: what to
    say, and to do, when there is no caption. mask: None where it has none, or its own transparency is the mask.
    """

    name: str
    origin: Origin
    caption: str
    uncaptioned: str
    weight: float = 1.0
    repeats: int = 1
    mask: Origin | None = None


@dataclass(slots=True)
class Findings:
    """All that a set names, and what is wrong with it."""

    pictures: list[Found] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def files_below(folder: Path, *, without: Path | None = None) -> dict[str, Path]:
    """All files at any depth by name below the folder, sorted; but hidden ones, those in hidden folders, or in `without`."""
    found = {}
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        is_elsewhere = without is not None and path.is_relative_to(without)
        if not is_hidden and not is_elsewhere and path.is_file():
            found[relative.as_posix()] = path
    return dict(sorted(found.items()))


def masks_below(folder: Path, findings: Findings) -> dict[str, Origin]:
    """Masks by the stem of their names; of two with one stem the first, and a warning."""
    if not folder.is_dir():
        findings.faults.append(f"{folder}: there is no such folder of masks")
        return {}
    found: dict[str, Origin] = {}
    for name, path in files_below(folder).items():
        if not is_picture(name):
            continue
        if stem_of(name) in found:
            findings.warnings.append(f"{path}: a second mask of that name is not used")
        found.setdefault(stem_of(name), Origin(path))
    return found


def extension_of(name: str) -> str:
    """A file name's ending with its dot, in small letters."""
    return PurePosixPath(name).suffix.lower()


def is_picture(name: str) -> bool:
    """Whether a file is named as a picture that is read."""
    return extension_of(name) in PICTURE_EXTENSIONS


def stem_of(name: str) -> str:
    """A relative name without its ending."""
    return PurePosixPath(name).with_suffix("").as_posix()


def together(what: str, names: Sequence[object]) -> Iterator[str]:
    """One sentence on all pictures that have something in common; none where there are none."""
    if len(names) == 1:
        yield f"{names[0]}: {what}"
    elif names:
        some = ", ".join(map(str, names[:_NAMED]))
        more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"{len(names)} pictures: {what}: {some}{more}"
