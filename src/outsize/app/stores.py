"""Where the prepared stores of a recipe are, and which are there already; no torch, nothing made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.app.parts import Part, parts_of
from outsize.app.prepare import store_folder, store_key
from outsize.base.errors import StoreBroken
from outsize.weights.locate import locate_weights
from outsize.weights.source import Source
from outsize.weights.store import Store, open_store

if TYPE_CHECKING:
    from outsize.recipes.recipe import Recipe


@dataclass
class Stores:
    """The stores of one recipe. offline: ask nothing of the network. on_read: told how far hashing a source is."""

    recipe: Recipe
    offline: bool = False
    on_read: Callable[[str, int, int], None] | None = None
    _keys: dict[str, str] = field(default_factory=dict, init=False)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All models of the recipe by slot."""
        return parts_of(self.recipe)

    @cached_property
    def cache_folder(self) -> Path:
        """Folder of stores and caches."""
        return self.recipe.cache_folder()

    def source(self, slot: str) -> Source:
        """The published files of a part, opened.

        Raises: SourceError saying what is missing and how to get it.
        """
        part = self.parts[slot]
        named = part.source if part.revision is None else f"{part.source}@{part.revision}"
        return Source(locate_weights(named, sub_folder=part.folder, offline=self.offline))

    def key(self, slot: str) -> str:
        """Digest of everything that shapes a part's store; the store itself need not be there."""
        if slot not in self._keys:
            part = self.parts[slot]
            with self.source(slot) as source:
                self._keys[slot] = store_key(
                    table=part.family.table(part.variant),
                    layouts=part.family.layouts(part.variant),
                    packing=part.packing,
                    source=source,
                    cache_root=self.cache_folder,
                    progress=self._progress(slot),
                )
        return self._keys[slot]

    def folder(self, slot: str) -> Path:
        """Where a part's store is, or will be."""
        part = self.parts[slot]
        return store_folder(
            self.cache_folder,
            family=part.family_name,
            variant=part.variant,
            slot=slot,
            key=self.key(slot),
        )

    def existing(self, slot: str) -> Store | None:
        """A part's store if it is there and whole."""
        try:
            store = open_store(self.folder(slot))
        except StoreBroken:
            return None
        return store if store.key == self.key(slot) else None

    def _progress(self, slot: str) -> Callable[[int, int], None] | None:
        tell = self.on_read
        return None if tell is None else lambda done, total: tell(slot, done, total)
