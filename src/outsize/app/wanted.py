"""A store that is wanted: what it is made from, where it would be, and whether it may be there; no torch, nothing made.

Its key is a digest of all that shapes its bytes, the content of the source included. Asking for the key of a source whose
content is not known reads the whole source, so `known_key` does that only where a store might turn out to be it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.base.errors import StoreBroken
from outsize.base.files import json_digest
from outsize.base.layout import Layout
from outsize.base.progress import OnProgress
from outsize.base.table import ShapeTable
from outsize.formats._packing import Packing
from outsize.weights.identity import LEDGER_NAME, DigestLedger, fingerprint, state_key
from outsize.weights.mapping import MappedSource
from outsize.weights.source import Source
from outsize.weights.store import MANIFEST, STORE_VERSION, read_manifest

_PARTIAL = "partial"
_NOT_PACKED = "the files keep it unpacked beside matrices in 4 bits"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A store that is wanted: where from, and all that shapes it. name: what a person calls it."""

    name: str
    mapped: MappedSource
    packing: Packing
    cache_root: Path

    @property
    def ledger(self) -> DigestLedger:
        """Where fingerprints are remembered."""
        return DigestLedger(self.cache_root / LEDGER_NAME)

    def provenance(self, content: str) -> dict[str, Any]:
        """All that shapes the store's bytes. content: the fingerprint of the source."""
        return {"source": content, **self.made}

    @property
    def maker(self) -> str:
        """Digest of how any source is made into such a store."""
        return json_digest(self.made)

    @property
    def made(self) -> dict[str, Any]:
        """What shapes the store's bytes, whatever the source holds."""
        specs = [[s.name, list(s.shape), s.role, s.block, s.is_linear] for s in self.mapped.table]
        return {
            "table": json_digest(specs),
            "packing": self.packing.describe(),
            "layout": self.mapped.layout,
            "store_version": STORE_VERSION,
        }

    def adopted(self) -> str:
        """What is taken from a quantised source as it is, and what is not; "" for a plain source."""
        quantised, formats = self.mapped.quantised, self.packing.formats
        if self.mapped.scaled:
            return f"{len(self.mapped.scaled)} matrices read from 8-bit floats by their scales"
        if not quantised:
            return ""
        taken = [name for name in quantised if formats[name] is self.packing.packed]
        forms = sorted({str(quantised[name].form) for name in taken})
        told = [f"{len(taken)} matrices taken as they are ({'; '.join(forms)})"]
        if len(taken) < len(quantised):
            told.append(f"{len(quantised) - len(taken)} decoded, as this model keeps them plain")
        beside = sum(left.reason == _NOT_PACKED for left in self.packing.left_plain)
        if beside:
            told.append(f"{beside} left unpacked, as the files have them")
        return ", ".join(told)

    def folder(self, key: str) -> Path:
        """The folder of the store of that key: readable, and distinct."""
        return self.cache_root / f"{self.name}-{key[:16]}"

    def partial_folder(self) -> Path:
        """Where a source whose content is not known is prepared: found again while its files stay as they are."""
        state = json_digest([state_key(self.mapped), self.maker])
        return self.cache_root / f"{self.name}-{_PARTIAL}-{state[:16]}"

    def partial_folders(self) -> tuple[Path, ...]:
        """All unfinished stores of this name."""
        return tuple(self.cache_root.glob(f"{self.name}-{_PARTIAL}-*"))

    def might_exist(self) -> bool:
        """Whether a store is there that was made in the same way, of whatever source."""
        return any(
            is_made_by(folder, self.maker) for folder in self.cache_root.glob(f"{self.name}-*")
        )


def wanted(
    *,
    name: str,
    table: ShapeTable,
    layouts: Sequence[Layout],
    source: Source,
    packing: Packing,
    cache_root: Path,
) -> Wanted:
    """The store of a source. Where the files hold matrices in 4 bits, these are taken as they are, and no other packed.

    Raises: SourceError when the files do not hold the table's tensors, or in a form that the format cannot take.
    """
    mapped = source.locate(layouts, table, packing.adopts)
    if mapped.quantised:
        packing = packing.beside(mapped.quantised, _NOT_PACKED)
    return Wanted(name, mapped, packing, cache_root)


def store_name(family: str, variant: str, slot: str) -> str:
    """What a store's folder is called before its key, on every system."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{family}-{variant}-{slot}")


def known_key(one: Wanted, progress: OnProgress | None = None) -> str | None:
    """The key of a store, when it is remembered, or a store is there that might be it; else None, and nothing is read.

    progress: of hashing, where files have to be read.
    """
    content = one.ledger.look_up(one.mapped)
    if content is None and one.might_exist():
        content = fingerprint(one.mapped, one.ledger, progress)
    return None if content is None else json_digest(one.provenance(content))


def store_key(one: Wanted, progress: OnProgress | None = None) -> str:
    """Digest of everything that shapes a store's bytes, hexadecimal; the files are read where they must be."""
    return json_digest(one.provenance(fingerprint(one.mapped, one.ledger, progress)))


def is_made_by(folder: Path, maker: str) -> bool:
    """Whether a folder holds a store made in that way; only its manifest is looked at."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        made = dict(read_manifest(folder).provenance)
    except StoreBroken:
        return False
    made.pop("source", None)
    return json_digest(made) == maker
