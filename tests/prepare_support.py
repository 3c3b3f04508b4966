"""Checkpoints, tables and child processes for the tests of preparing; imports what a child needs and no test library."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from safetensors.torch import save_file

from outsize.app.prepare import How, prepare_in_cache, prepare_store
from outsize.app.wanted import wanted
from outsize.base.journal import Journal
from outsize.base.layout import Layout, Rule
from outsize.base.table import ShapeTable, TensorSpec
from outsize.formats._packing import Packing, assign
from outsize.formats.protocol import make_format
from outsize.weights.header import build_header
from outsize.weights.source import Source
from outsize.weights.store import STAMPS, Store

LAYOUTS = (
    Layout("own"),
    Layout(
        "fused",
        (
            Rule("b.{i}.q.weight", "blocks.{i}.qk.weight", (0, 2)),
            Rule("b.{i}.k.weight", "blocks.{i}.qk.weight", (1, 2)),
            Rule("b.{i}.odd.weight", "blocks.{i}.odd.weight"),
            Rule("b.{i}.norm", "blocks.{i}.norm"),
            Rule("b.{i}.bias", "blocks.{i}.bias"),
            Rule("head.weight", "last.weight", is_swapped=True),
            Rule("mean", "mean"),
        ),
        prefixes=("model.",),
    ),
)


def small_table(num_blocks: int = 4, rows: int = 48) -> ShapeTable:
    """Blocks of two matrices any format holds, one that stays plain, and small tensors; a head and a buffer besides."""
    blocks = [
        spec
        for i in range(num_blocks)
        for spec in (
            TensorSpec(f"b.{i}.norm", (128,), "norm", i),
            TensorSpec(f"b.{i}.q.weight", (rows, 128), "attention", i, is_linear=True),
            TensorSpec(f"b.{i}.k.weight", (rows, 128), "attention", i, is_linear=True),
            TensorSpec(f"b.{i}.odd.weight", (rows, 31), "mlp", i, is_linear=True),
            TensorSpec(f"b.{i}.bias", (rows,), "mlp", i),
        )
    ]
    head = TensorSpec("head.weight", (rows, 128), "head", is_linear=True)
    return ShapeTable((*blocks, head, TensorSpec("mean", (3,), "buffer")))


def tensors_of(table: ShapeTable, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Seeded values for every tensor of a table."""
    generator = torch.Generator().manual_seed(11)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(dtype)
        if spec.role != "buffer"
        else torch.randn(spec.shape, generator=generator)
        for spec in table
    }


def in_layout(layout: Layout, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors as a file of that layout holds them: fused, swapped, renamed, under its last prefix."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        rule, theirs = layout.rule_of(name)
        value = torch.cat(tensor.chunk(2)[::-1]) if rule.is_swapped else tensor
        value = value.reshape((*value.shape, *[1] * rule.ones))
        pieces.setdefault(layout.prefixes[-1] + theirs, {})[rule.part[0]] = value
    return {
        name: torch.cat([parts[k] for k in sorted(parts)]) if len(parts) > 1 else parts[0]
        for name, parts in pieces.items()
    }


def packing_for(table: ShapeTable, name: str = "nf4", **options: object) -> Packing:
    return assign(table, make_format(name, options), make_format("plain"))


def save_checkpoint(path: Path, table: ShapeTable) -> Path:
    save_file(tensors_of(table), path)
    return path


def write_sparse_checkpoint(path: Path, specs: Iterable[TensorSpec]) -> int:
    """A bf16 checkpoint of zeros that takes no time to write and no disk; returns its bytes."""
    rows, position = [], 0
    for spec in specs:
        end = position + 2 * spec.num_elements
        rows.append((spec.name, "BF16", spec.shape, position, end))
        position = end
    header = build_header(rows, {}, alignment=8)
    path.write_bytes(header)
    os.truncate(path, len(header) + position)
    return position


def prepare(
    checkpoint: Path,
    folder: Path,
    table: ShapeTable,
    packing: Packing,
    *,
    budget_bytes: int = 2**30,
    journal: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    log = Journal(journal) if journal is not None else None
    try:
        with Source([checkpoint]) as source:
            return prepare_store(
                table=table,
                layouts=LAYOUTS,
                source=source,
                packing=packing,
                folder=folder,
                ram_budget_bytes=budget_bytes,
                journal=log,
                progress=progress,
            )
    finally:
        if log is not None:
            log.close()


def prepare_cached(
    checkpoint: Path,
    cache: Path,
    table: ShapeTable,
    packing: Packing,
    *,
    journal: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """As a command does it: the store is named by its content, which is not known before."""
    with (
        Source([checkpoint]) as source,
        closing(Journal(journal)) if journal is not None else nullcontext() as log,
    ):
        one = wanted(
            name="x",
            table=table,
            layouts=LAYOUTS,
            source=source,
            packing=packing,
            cache_root=cache,
        )
        return prepare_in_cache(one, How(2**30, journal=log, progress=progress))


def prepare_in_child(
    checkpoint: Path,
    folder: Path,
    num_blocks: int,
    begins: Event,
    journal: Path | None,
    *,
    is_cache: bool,
) -> None:
    """What a killed or a competing process runs. is_cache: the folder is the cache, not the store."""
    torch.set_num_threads(1)
    table = small_table(num_blocks)
    packing = packing_for(table)
    begins.set()
    run = prepare_cached if is_cache else prepare
    run(checkpoint, folder, table, packing, journal=journal)


def content_of(folder: Path) -> dict[str, str]:
    """Digests of all files of a store; the stamps hold times, the lock nothing."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in {STAMPS, ".lock"}
    }
