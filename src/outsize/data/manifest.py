"""The manifest: which pictures with which captions a run learns from. scanning.py makes it, and proves that all can be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outsize.base.files import json_digest
from outsize.data.found import PictureSet
from outsize.data.media import Look
from outsize.data.origin import Origin


@dataclass(frozen=True, slots=True)
class Mask:
    """Which part of a picture is learned. digest: of the bytes it is in; is_alpha: as their transparency."""

    origin: Origin
    digest: str
    is_alpha: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture as it is looked at (orientation applied); digest is of the file's bytes.

    name: below the set's folder, with forward slashes. weight, repeats: its own, beside its set's. has_own_caption: false
    where the trigger or the set's default stands in.
    """

    set_index: int
    name: str
    origin: Origin
    caption: str
    digest: str
    look: Look
    weight: float = 1.0
    repeats: int = 1
    mask: Mask | None = None
    has_own_caption: bool = True

    @property
    def path(self) -> Path:
        """The file that it is in."""
        return self.origin.path

    @property
    def width(self) -> int:
        """Pixels."""
        return self.look.width

    @property
    def height(self) -> int:
        """Pixels."""
        return self.look.height


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A picture that cannot be read and is not trained on, as the recipe says."""

    set_index: int
    origin: Origin
    reason: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All pictures, by set and then by name, and what the user should know about them."""

    sets: tuple[PictureSet, ...]
    pictures: tuple[Picture, ...]
    warnings: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def digest(self) -> str:
        """Equal exactly when the same pictures with the same captions take part alike.

        File contents count, and their order; where the folders lie does not.
        """
        sets = [_told_apart_by(item) for item in self.sets]
        pictures = [
            [one.set_index, one.digest, one.caption, *_unless_default(_extras(one), [1.0, 1, None])]
            for one in self.pictures
        ]
        return json_digest({"sets": sets, "pictures": pictures})

    def captions(self) -> tuple[str, ...]:
        """Each different caption once, in order of first use."""
        return tuple(dict.fromkeys(picture.caption for picture in self.pictures))

    def set_of(self, picture: Picture) -> PictureSet:
        """The set a picture belongs to."""
        return self.sets[picture.set_index]


def _told_apart_by(item: PictureSet) -> list[object]:
    extras: list[object] = [item.repeats, item.flip, list(item.background)]
    masks = [item.mask_floor, item.mask_normalised] if item.has_masks else []
    first = [item.trigger, item.share, item.loss_weight, item.is_regularisation]
    return [*first, *_unless_default([*extras, *masks], [1, 0.0, [255, 255, 255]])]


def _extras(one: Picture) -> list[object]:
    mask = None if one.mask is None else [one.mask.digest, one.mask.is_alpha]
    return [one.weight, one.repeats, mask]


def _unless_default(values: list[object], default: list[object]) -> list[object]:
    """What came after manifests were first told apart counts only where it is used."""
    return [] if values == default else values
