"""Pictures that are kept from training and measured instead: always the same ones, whatever the seed or the files' order.

Which ones follows from what the pictures hold: the same picture under two names is held out under both or under neither,
so none that is measured has been learned.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from outsize.data.manifest import Manifest
from outsize.data.samples import Sample


def held_out_pictures(manifest: Manifest, share: float) -> frozenset[int]:
    """Places in the manifest: all of the sets that are held out, and a share of every other one's.

    Regularisation sets give none: how a model draws other subjects is what they keep. A set gives at least one picture of
    two and never its last.
    """
    chosen = {
        manifest.pictures[index].digest
        for index, picture in enumerate(manifest.pictures)
        if manifest.set_of(picture).is_held_out
    }
    by_set: dict[int, set[str]] = defaultdict(set)
    for picture in manifest.pictures:
        if not manifest.set_of(picture).is_regularisation:
            by_set[picture.set_index].add(picture.digest)
    for digests in by_set.values():
        ordered = sorted(digests - chosen, key=_rank)
        count = min(max(round(share * len(ordered)), 1), len(ordered) - 1) if share else 0
        chosen |= set(ordered[: max(count, 0)])
    return frozenset(i for i, one in enumerate(manifest.pictures) if one.digest in chosen)


def held_out_samples(
    manifest: Manifest, samples: Sequence[Sample], pictures: frozenset[int]
) -> tuple[int, ...]:
    """Places in the samples of what is measured, each picture once at each resolution, in an order that is none of names."""
    first: dict[tuple[str, int], int] = {}
    for index, one in enumerate(samples):
        if one.picture in pictures:
            first.setdefault((manifest.pictures[one.picture].digest, one.resolution), index)
    return tuple(first[key] for key in sorted(first, key=lambda key: (_rank(key[0]), key[1])))


def level_seed(digest: str, level: int) -> int:
    """The seed of the noise by which a picture is measured at one level of noise: 63 bits."""
    return int.from_bytes(_hashed(f"{digest}:{level}")[:8], "little") >> 1


def _rank(digest: str) -> bytes:
    return _hashed(f"held out:{digest}")


def _hashed(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
