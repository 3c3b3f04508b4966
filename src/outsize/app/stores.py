"""Where the prepared stores of a recipe are, and which are there already; torch is imported when one has to be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.app.parts import Part, parts_of
from outsize.app.wanted import Wanted, known_key, store_key, store_name, wanted
from outsize.base.errors import StoreBroken
from outsize.weights.locate import locate_weights
from outsize.weights.source import Source
from outsize.weights.store import Store, open_store

if TYPE_CHECKING:
    from outsize.app.prepare import Figures, How
    from outsize.recipes.recipe import Recipe


@dataclass
class Stores:
    """The stores of one recipe.

    offline: ask nothing of the network. on_read: told how far hashing a source is. on_missing: makes the store of a slot;
    without it, asking for the key of a source that was never seen hashes the source.
    """

    recipe: Recipe
    offline: bool = False
    on_read: Callable[[str, int, int], None] | None = None
    on_missing: Callable[[str], Store] | None = None
    figures: dict[str, Figures] = field(default_factory=dict, init=False)
    _keys: dict[str, str] = field(default_factory=dict, init=False)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All models of the recipe by slot; each with the packing of its store, once its files were looked at."""
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
        return Source(
            locate_weights(part.named_source, sub_folder=part.folder, offline=self.offline)
        )

    def key(self, slot: str) -> str:
        """Digest of everything that shapes a part's store, which is made first when the source was never seen."""
        key = self._known_key(slot)
        if key is None and self.on_missing is not None:
            key = self.on_missing(slot).key
        elif key is None:
            with self._wanted(slot) as one:
                key = store_key(one, self._progress(slot))
        self._keys[slot] = key
        return key

    def existing(self, slot: str) -> Store | None:
        """A part's store if it is there and whole."""
        key = self._known_key(slot)
        if key is None:
            return None
        try:
            with self._wanted(slot) as one:
                store = open_store(one.folder(key))
        except StoreBroken:
            return None
        return store if store.key == key else None

    def prepare(self, slot: str, how: How) -> Store:
        """Make a part's store, or use the one that is there.

        Raises: as prepare_store.
        """
        from outsize.app.prepare import prepare_in_cache

        with self._wanted(slot) as one:
            store = prepare_in_cache(one, how)
        self._keys[slot] = store.key
        return store

    def _known_key(self, slot: str) -> str | None:
        if slot not in self._keys:
            with self._wanted(slot) as one:
                key = known_key(one, self._progress(slot))
            if key is None:
                return None
            self._keys[slot] = key
        return self._keys[slot]

    @contextmanager
    def _wanted(self, slot: str) -> Iterator[Wanted]:
        part = self.parts[slot]
        with self.source(slot) as source:
            one = wanted(
                name=store_name(part.family_name, part.variant, slot),
                table=part.family.table(part.variant),
                layouts=part.family.layouts(part.variant),
                source=source,
                packing=part.packing,
                cache_root=self.cache_folder,
            )
            self.parts[slot] = replace(part, packing=one.packing)  # as the files ask for
            yield one

    def _progress(self, slot: str) -> Callable[[int, int], None] | None:
        tell = self.on_read
        return None if tell is None else lambda done, total: tell(slot, done, total)
