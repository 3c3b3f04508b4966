"""Adapters from files, of whatever client: told by their keys, brought to our module paths, and held to a base's shapes.

Nothing is passed over. A key, a module or a shape that the base does not have is an error that names all of them, and where
the file fits another base that there is, the error says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from outsize.app.people import shown_in
from outsize.base.errors import AdapterError, RecipeError
from outsize.base.files import file_digest, json_digest
from outsize.dialects.protocol import (
    DIALECTS,
    AdapterFile,
    AdapterWeights,
    Dialect,
    LoraPair,
    TensorFile,
    dialect_of,
    plain_pairs,
)
from outsize.export.combine import combined
from outsize.export.export import read_adapter_files
from outsize.families.protocol import FAMILIES, without_depth

if TYPE_CHECKING:
    from outsize.base.layout import Layout
    from outsize.base.table import ShapeTable
    from outsize.families.protocol import ModelFamily

_TENSORS, _JSON = "*.safetensors", "*.json"
_CONFIG = "adapter_config.json"  # of a PEFT folder
_WEIGHT = ".weight"
_SEVERAL = ":"  # before the weight of an adapter on the command line
TINY = "tiny"  # variants for tests, which real files are not of


@dataclass(frozen=True, slots=True)
class Worn:
    """A file with the weight it counts, as a person names it: "style.safetensors:0.8"."""

    path: Path
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """An adapter read from files, under our module paths.

    base: family.variant that it fits. digest: SHA-256 of what was read. names: what its program calls our modules, where
    that depends on the class that opens the base.
    """

    weights: AdapterWeights
    dialect: str
    base: str
    digest: str
    names: Mapping[str, str]


def parse_worn(text: str) -> Worn:
    """A file or folder, and behind the last colon the weight, if what stands there is a number.

    Raises: RecipeError when there is no such file, or the weight is not finite.
    """
    head, mark, tail = text.rpartition(_SEVERAL)
    try:
        weight = float(tail) if mark and head else None
    except ValueError:  # a drive's letter, or a colon inside a name
        weight = None
    path = Path(text if weight is None else head).expanduser()
    if weight is not None and not math.isfinite(weight):
        raise RecipeError(f"{text}: the weight is {weight}; it must be a finite number")
    if not path.exists():
        raise RecipeError(
            f"{path}: there is no such adapter; name a .safetensors file or a PEFT folder, and behind a colon the weight "
            "it is to have, as in style.safetensors:0.8"
        )
    return Worn(path, 1.0 if weight is None else weight)


def read_worn(several: Iterable[Worn], family_name: str, variant: str) -> AdapterWeights:
    """The weighted sum of adapters from files.

    Raises: AdapterError as `read_adapter`, for the first that does not fit.
    """
    return combined(
        [(read_adapter(one.path, family_name, variant).weights, one.weight) for one in several]
    )


def read_adapter(path: Path, family_name: str, variant: str) -> Found:
    """An adapter of that base.

    Raises: AdapterError naming every key, module and shape that the base does not have, and the base that the file is of,
    if that can be told.
    """
    files = _files(path)
    dialect = dialect_of(_keys(files))
    family = FAMILIES.load(family_name)
    base = f"{family_name}.{variant}"
    try:
        weights, names = _fitted(files, dialect, family, variant)
    except AdapterError as error:
        others = list(_bases(files, dialect, besides=base))
        told = f"; it is an adapter of {' or '.join(others)}" if others else ""
        raise AdapterError(f"{path} ({dialect}) is no adapter of {base}{told}: {error}") from error
    plain_pairs(
        weights, f"{path} can only be worn, merged or lowered in rank by the program that made it"
    )
    weights = replace(weights, subjects=frozenset(shown_in(path)))
    return Found(weights, dialect, base, _digest(path, files), names)


def recognised_adapter(path: Path) -> Found:
    """An adapter of whatever base it fits: that of its header, or the only one that has such modules.

    Raises: AdapterError when it fits none, or several.
    """
    files = _files(path)
    dialect = dialect_of(_keys(files))
    stated = _stated_base(files)
    bases = [stated] if stated is not None else list(_bases(files, dialect))
    if not bases:
        raise AdapterError(
            f"{path} ({dialect}) fits no base that there is; name a recipe of its base in place of the file"
        )
    fits = [one for one in bases if not _variant(one).startswith(TINY)] or bases
    if len(fits) > 1 and len({_family(one) for one in fits}) > 1:
        raise AdapterError(
            f"{path} fits {', '.join(fits)} alike; name a recipe of its base in place of the file"
        )
    return read_adapter(path, _family(fits[0]), _variant(fits[0]))


def fused_with(module: str, others: Iterable[str], layouts: Iterable[Layout]) -> bool:
    """Whether files of some layout keep a module in one matrix with one of the others, so that it is there as zeros."""
    for layout in layouts:
        try:
            _, theirs = layout.rule_of(module + _WEIGHT)
        except KeyError:
            continue
        mates = set(layout.ours_of(theirs)) - {module + _WEIGHT}
        if any(one + _WEIGHT in mates for one in others):
            return True
    return False


def _fitted(
    files: Mapping[str, AdapterFile], dialect: str, family: ModelFamily, variant: str
) -> tuple[AdapterWeights, dict[str, str]]:
    """The adapter under our paths, and what it calls them."""
    layouts, table = family.layouts(variant), family.table(variant)
    plugin = cast("Dialect", DIALECTS.load(dialect))
    adapter = plugin.read(files, layouts)
    names = _names(adapter.pairs, layouts, table)
    pairs = {ours: adapter.pairs[theirs] for ours, theirs in names.items()}
    faults = list(_faults(pairs, table))
    if faults:
        listed = "\n  ".join(faults)
        raise AdapterError(f"{len(faults)} of {len(pairs)} modules do not fit:\n  {listed}")
    lengths = {ours: adapter.lengths[theirs] for ours, theirs in names.items() if adapter.lengths}
    return AdapterWeights(pairs, adapter.rank, adapter.alpha, lengths), names


def _names(modules: Iterable[str], layouts: Iterable[Layout], table: ShapeTable) -> dict[str, str]:
    """Their modules by our paths: another class of the same model may keep them elsewhere, so as most of them are found."""
    known = {spec.module for spec in table.linears()}
    best = {module: module for module in modules}
    num_modules, num_known = len(best), len(known.intersection(best))
    for layout in layouts:
        named = {_ours(layout, module) or module: module for module in best.values()}
        if len(named) == num_modules and len(known.intersection(named)) > num_known:
            best, num_known = named, len(known.intersection(named))
    return best


def _ours(layout: Layout, module: str) -> str | None:
    found = layout.ours_of(module + _WEIGHT)
    return found[0].removesuffix(_WEIGHT) if len(found) == 1 else None


def _faults(pairs: Mapping[str, LoraPair], table: ShapeTable) -> Iterator[str]:
    shapes = {spec.module: spec.shape for spec in table.linears()}
    others = {spec.module for spec in table}
    for module, pair in sorted(pairs.items()):
        found = (pair.B.shape[0], pair.A.shape[1])
        if module not in shapes:
            is_there = module in others
            yield f"{module}: " + (
                "lies outside the blocks, where no adapter is attached"
                if is_there
                else "no such module"
            )
        elif found != shapes[module]:
            yield f"{module}: is for a weight of {found[0]} x {found[1]}, the base's is {' x '.join(map(str, shapes[module]))}"


def _bases(files: Mapping[str, AdapterFile], dialect: str, besides: str = "") -> Iterator[str]:
    """All bases that an adapter fits as it is."""
    for name in FAMILIES.names():
        family = FAMILIES.load(name)
        for variant in family.variants if hasattr(family, "objective") else ():
            base = f"{name}.{variant}"
            try:
                if base != besides:
                    _fitted(files, dialect, family, variant)
                    yield base
            except AdapterError:
                continue


def _stated_base(files: Mapping[str, AdapterFile]) -> str | None:
    """What our own header says, where there is such a base."""
    for file in files.values():
        stated = file.metadata.get("outsize.base", "") if isinstance(file, TensorFile) else ""
        family, variant = _family(stated), _variant(stated)
        known = FAMILIES.load(family).variants if family in FAMILIES.names() else ()
        if without_depth(variant) in known:
            return stated
    return None


def _family(base: str) -> str:
    return base.partition(".")[0]


def _variant(base: str) -> str:
    return base.partition(".")[2]


def _files(path: Path) -> dict[str, AdapterFile]:
    """The files of an adapter: one, or those of a folder.

    Raises: AdapterError when there are none, or several that might be meant.
    """
    if not path.exists():
        raise AdapterError(
            f"{path}: there is no such adapter; name a .safetensors file or a PEFT folder"
        )
    if not path.is_dir():
        return read_adapter_files([path])
    paths = sorted(path.glob(_TENSORS))
    if (path / _CONFIG).exists():
        return read_adapter_files([*paths, path / _CONFIG])
    if len(paths) != 1:
        names = ", ".join(one.name for one in paths) or "none"
        raise AdapterError(
            f"{path} holds no {_CONFIG} and not one safetensors file alone ({names}); name the file that is meant"
        )
    return read_adapter_files(paths)


def _keys(files: Mapping[str, AdapterFile]) -> list[str]:
    return [key for file in files.values() if isinstance(file, TensorFile) for key in file.tensors]


def _digest(path: Path, files: Mapping[str, AdapterFile]) -> str:
    if not path.is_dir():
        return file_digest(path)
    return json_digest({name: file_digest(path / name) for name in files})
