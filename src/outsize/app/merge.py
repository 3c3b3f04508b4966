"""An adapter added to its base: a checkpoint as the source is published, in 16 bits or packed again, window by window.

Nothing is held but one window of rows for each thread, the factors of the adapter and, where the result is packed, the few
bits of one matrix. What every weight's rounding leaves of its delta is measured on the way (export/survival.py): three ways
where it is packed, since a base that was trained on in few bits can be merged from its own few bits or from the weights
that these were made of, and only the latter keeps a delta smaller than a step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from outsize.app._merge_fill import PackedFill, PlainFill, Tensors
from outsize.app._merge_rows import Deltas, FileRows, OurRows
from outsize.app.parts import BASE, parts_of
from outsize.app.people import REPORT, STATED, people_in
from outsize.base.errors import DoesNotFit, FormatError, SourceError
from outsize.base.files import folder_committed_to, write_json_atomically
from outsize.base.progress import OnProgress
from outsize.base.units import format_bytes
from outsize.export.survival import Meter
from outsize.formats._packing import Packing, assign
from outsize.formats.protocol import make_format
from outsize.recipes.recipe import rest_format
from outsize.registry.records import Item
from outsize.registry.standing import place_of
from outsize.weights.budget import MemoryWatch
from outsize.weights.checkpoint_writer import write_checkpoint
from outsize.weights.locate import locate_folder, locate_weights
from outsize.weights.source import Source

if TYPE_CHECKING:
    from outsize.app.parts import Part
    from outsize.base.layout import Layout
    from outsize.dialects.protocol import AdapterWeights
    from outsize.export.survival import Survival
    from outsize.formats.protocol import Publishing
    from outsize.recipes.recipe import FormatChoice, Recipe
    from outsize.weights.mapping import MappedSource

_QUANTISATION = "quantization_config"
_MOST_BYTES = 64 * 2**20  # of a file that is copied beside the weights: tokenizers are large
_COPIED = {".json", ".txt", ".model", ".jinja"}
_WHOLE = 1 << 62  # one file, whatever its size
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for. packed: the format of matrices; None for the types of the source. told: what the report says."""

    into: Path
    packed: FormatChoice | None
    shard_bytes: int
    device: torch.device
    offline: bool
    told: Mapping[str, Any]
    progress: OnProgress | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written, how much of the deltas survived, and the most private host memory above the start's."""

    folder: Path
    num_bytes: int
    meter: Meter
    growth_bytes: int


def merge(recipe: Recipe, adapter: AdapterWeights, order: Order) -> Merged:
    """Write the base with the adapter in it to a new folder, whole or not at all.

    Raises: SourceError when the folder is there, or the weights are of a type that nothing can be added to; DoesNotFit
    when the disk is too small; FormatError for a format that other programs do not read; ConsentMissing.
    """
    if order.into.exists():
        raise SourceError(f"{order.into} is already there; name a new folder")
    people = people_in(recipe, adapter.subjects)
    people.begin("merge", into=str(order.into))
    part = parts_of(recipe)[BASE]
    named = part.source if part.revision is None else f"{part.source}@{part.revision}"
    files = locate_weights(named, sub_folder=part.folder, offline=order.offline)
    with MemoryWatch() as watch, Source(files) as source:
        deltas, meter = Deltas(adapter), Meter()
        fill, config = _plan(part, source, deltas, meter, order)
        _require_room(order.into, fill)
        is_file = Path(part.source).is_file()
        with folder_committed_to(order.into) as folder:
            target = folder if is_file else folder / part.folder
            target.mkdir(parents=True, exist_ok=True)
            written = write_checkpoint(
                target,
                files[0].stem if is_file else part.family.published(part.variant).stem,
                fill.tensors(),
                fill,
                shard_bytes=_WHOLE if is_file else order.shard_bytes,
                num_threads=fill.num_threads(_NUM_THREADS),
                progress=order.progress,
            )
            if not is_file:
                beside = locate_folder(named, part.folder, offline=order.offline)
                _copy_small(beside, target, config)
            num_bytes = sum(path.stat().st_size for path in written)
            stated = {STATED: list(people.subjects)} if people.subjects else {}
            write_json_atomically(folder / REPORT, _report(part, meter, order) | stated)
            people.release("merge", "merge", [Item(place_of(order.into))])
    return Merged(order.into, num_bytes, meter, watch.growth_bytes)


def _plan(
    part: Part, source: Source, deltas: Deltas, meter: Meter, order: Order
) -> tuple[Tensors, dict[str, Any] | None]:
    """What writes the tensors, and what config.json is to say of their packing."""
    table, layouts = part.family.table(part.variant), part.family.layouts(part.variant)
    mapped = source.locate(layouts, table, part.packing.adopts)
    if order.packed is None and not mapped.quantised:
        return PlainFill(FileRows(source, mapped, deltas), deltas, meter), None
    packing = part.packing if order.packed is None else _packing(part, order.packed)
    layout, prefix, extra = _names(layouts, mapped)
    taken = part.packing if mapped.quantised else packing
    rows = OurRows(mapped, taken, deltas, layout=layout, prefix=prefix, extra=extra)
    if order.packed is None:
        _refuse_packed(extra)
        return PlainFill(rows, deltas, meter), None
    if mapped.quantised:
        packing = packing.beside(mapped.quantised, "the source keeps it unpacked")
    return (
        PackedFill(rows, packing, deltas, meter, order.device),
        _config_of(packing, rows),
    )


def _refuse_packed(extra: Sequence[str]) -> None:
    """Refuse to copy matrices in 4 bits into a checkpoint that is to have none."""
    beside = [name.removesuffix(".absmax") for name in extra if name.endswith(".absmax")]
    if beside:
        raise SourceError(
            f"{len(beside)} matrices that the base's family does not know are in 4 bits as well ({beside[0]} for one), and "
            "would be so in a checkpoint in 16 bits; name the bf16 files as base.source, or merge with --format"
        )


def _packing(part: Part, choice: FormatChoice) -> Packing:
    made, rest = (make_format(one.name, one.options) for one in (choice, rest_format("base")))
    if not hasattr(made, "publish"):
        raise FormatError(
            f"no other program reads a checkpoint in {choice.name}; merge into 16 bits, from which `outsize prepare` makes "
            f"a store in {choice.name} with the adapter in it"
        )
    return assign(part.family.table(part.variant), made, rest)


def _names(
    layouts: tuple[Layout, ...], mapped: MappedSource
) -> tuple[Layout, str, tuple[str, ...]]:
    """How tensors are called where each is one of ours, and what else the files hold that goes along."""
    found = next(one for one in layouts if one.name == mapped.layout)
    rules = [found.rule_of(spec.name)[0] for spec in mapped.table]
    if any(rule.part != (0, 1) or rule.is_swapped or rule.ones for rule in rules):
        return layouts[0], layouts[0].prefixes[0], ()
    return found, mapped.prefix, mapped.extra


def _config_of(packing: Packing, rows: OurRows) -> dict[str, Any]:
    plain = [
        name.removesuffix(".weight")
        for name, ours in rows.our_names()
        if rows.table[ours].is_linear and packing.formats[ours] is not packing.packed
    ]
    fmt = cast("Publishing", packing.packed)
    return {_QUANTISATION: fmt.published_config(rows.decoded_dtype(), plain)}


def _copy_small(source: Path, target: Path, config: Mapping[str, Any] | None) -> None:
    """What lies beside the weights and is no weight: configuration, tokenizer; what config.json says of packing is new."""
    for path in sorted(source.iterdir()):
        is_small = path.suffix in _COPIED and path.is_file() and path.stat().st_size <= _MOST_BYTES
        if is_small and not path.name.endswith(".index.json") and path.name != "config.json":
            shutil.copyfile(path, target / path.name)
    if (source / "config.json").is_file():
        said = json.loads((source / "config.json").read_text(encoding="utf-8"))
        said.pop(_QUANTISATION, None)
        write_json_atomically(target / "config.json", said | dict(config or {}))


def _require_room(into: Path, fill: Tensors) -> None:
    into.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(one.num_bytes for one in fill.tensors())
    free = shutil.disk_usage(into.parent).free
    if needed > free:
        raise DoesNotFit(
            f"the merged base takes {format_bytes(needed)}, the disk of {into.parent} has {format_bytes(free)} free; free "
            "some, or name a folder on another disk"
        )


def _report(part: Part, meter: Meter, order: Order) -> dict[str, Any]:
    def row(one: Survival) -> dict[str, Any]:
        return {
            "delta_norm": one.norm,
            "ratio": one.ratio,
            "cosine": one.cosine,
            "share": one.share,
        }

    return {
        "base": f"{part.family_name}.{part.variant}",
        "format": "as the source" if order.packed is None else order.packed.model_dump(mode="json"),
        **order.told,
        "survived": {way: row(meter.overall(way)) for way in meter.ways},
        "modules": {
            way: {module: row(one) for module, one in meter.of_modules(way).items()}
            for way in meter.ways
        },
    }
